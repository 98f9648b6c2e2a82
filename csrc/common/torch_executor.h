// PyTorch's own thread pool as an Executor. For binding code: the kernels do not include torch.
#pragma once

#include <ATen/Parallel.h>

#include <thread>
#include <vector>

#include "common/executor.h"

namespace dpk {

inline Executor torch_executor() {
#if defined(DPKERNELS_STD_THREADS)
  // For the thread sanitizer, which sees the order that starting and joining a thread makes, but
  // not that of the pool's barriers: the pool's library is not compiled with it.
  return {at::get_num_threads(), [](int tasks, void (*task)(void*, int), void* context) {
            std::vector<std::thread> threads;
            for (int i = 0; i < tasks; ++i) threads.emplace_back(task, context, i);
            for (std::thread& thread : threads) thread.join();
          }};
#else
  // Inside another parallel region at::parallel_for runs its body in the calling thread.
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return {threads, [](int tasks, void (*task)(void*, int), void* context) {
            at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) task(context, static_cast<int>(i));
            });
          }};
#endif
}

}  // namespace dpk
