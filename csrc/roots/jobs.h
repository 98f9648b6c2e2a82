// Work of very different sizes, shared out over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "common/executor.h"

namespace dpk {

// `run` gets the threads that it may use; it must not throw.
struct Job {
  double cost;
  std::function<void(const Executor&)> run;
};

// Runs all jobs, largest first. One that is larger than a thread's share of what is left would keep
// the others waiting, so it gets all threads; the rest run side by side, one thread each.
inline void run_jobs(std::vector<Job> jobs, const Executor& executor) {
  std::stable_sort(jobs.begin(), jobs.end(),
                   [](const Job& a, const Job& b) { return a.cost > b.cost; });
  double left = 0.0;
  for (const Job& job : jobs) left += job.cost;
  size_t alone = 0;
  for (; alone < jobs.size() && jobs[alone].cost * executor.threads > left; ++alone) {
    left -= jobs[alone].cost;
    jobs[alone].run(executor);
  }
  std::atomic<size_t> next{alone};
  const size_t side_by_side = jobs.size() - alone;
  const int tasks = static_cast<int>(std::min<size_t>(executor.threads, side_by_side));
  if (tasks == 0) return;
  for_each_task(executor, tasks, [&](int) {
    for (size_t i = next++; i < jobs.size(); i = next++) jobs[i].run(serial_executor());
  });
}

}  // namespace dpk
