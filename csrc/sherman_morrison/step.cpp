#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "sherman_morrison/sherman_morrison.h"
#define DPK_KERNELS "sherman_morrison/step.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Elements that one call of a kernel takes and one pair of partial sums covers. Measured on two
// threads: 4,096 / 16,384 / 65,536 take 244 / 230 / 232 us for 1 M elements in the last-level cache
// and 7.6 / 6.9 / 7.8 ms for 10 M.
constexpr int64_t kBlock = 16384;
// Where a second thread begins to pay. Measured: 32,768 elements take 9.9 us on one thread and 10.7
// on two, 65,536 take 22.4 and 15.6.
constexpr int64_t kElementsPerTask = 32768;

template <class T>
struct StepKernels {
  void (*dots)(const T* m, const void* g, int64_t n, double beta, double* sums);
  void (*write)(T* theta, T* m, const void* g, int64_t n, double beta, double along_grad,
                double along_momentum);
  int64_t grad_bytes;
};

template <class G>
StepKernels<typename SumOf<G>::type> kernels_of() {
  const Isa isa = active_isa();
  return {DPK_FOR_ISA(isa, step_dots<G>), DPK_FOR_ISA(isa, step_write<G>), sizeof(G)};
}

template <class T>
StepKernels<T> kernels_for(Dtype grad_dtype) {
  if constexpr (sizeof(T) == sizeof(double))
    return kernels_of<double>();
  else if (grad_dtype == Dtype::bf16)
    return kernels_of<BFloat16>();
  else if (grad_dtype == Dtype::f16)
    return kernels_of<Float16>();
  else
    return kernels_of<float>();
}

// The elements [begin, begin + n) of a tensor; `before` elements of the list come before them.
struct Block {
  int64_t tensor, begin, n, before;
};

template <class T>
std::vector<Block> blocks_of(const StepTensor<T>* tensors, int64_t count) {
  std::vector<Block> blocks;
  int64_t before = 0;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t begin = 0; begin < tensors[t].n; begin += kBlock) {
      const int64_t n = std::min(kBlock, tensors[t].n - begin);
      blocks.push_back({t, begin, n, before});
      before += n;
    }
  }
  return blocks;
}

// The first block of each task, and the end: the tasks have about equally many elements.
std::vector<int64_t> shares_of(const std::vector<Block>& blocks, const Executor& executor) {
  const int64_t total = blocks.empty() ? 0 : blocks.back().before + blocks.back().n;
  const int64_t tasks = std::clamp<int64_t>(total / kElementsPerTask, 1, executor.threads);
  std::vector<int64_t> first;
  for (int64_t task = 0; task <= tasks; ++task) {
    const auto at = std::partition_point(blocks.begin(), blocks.end(), [&](const Block& block) {
      return block.before < total * task / tasks;
    });
    first.push_back(at - blocks.begin());
  }
  return first;
}

}  // namespace

template <class T>
StepResult sofim_step(const StepTensor<T>* tensors, int64_t count, const Step& step,
                      const Executor& executor) {
  const StepKernels<T> kernels = kernels_for<T>(step.grad_dtype);
  const std::vector<Block> blocks = blocks_of(tensors, count);
  const std::vector<int64_t> first = shares_of(blocks, executor);
  const int tasks = static_cast<int>(first.size()) - 1;
  const auto grad = [&](const Block& block) {
    return static_cast<const char*>(tensors[block.tensor].grad) + block.begin * kernels.grad_bytes;
  };

  std::vector<double> sums(2 * blocks.size());
  for_each_task(executor, tasks, [&](int task) {
    for (int64_t b = first[task]; b < first[task + 1]; ++b) {
      const Block& block = blocks[b];
      kernels.dots(tensors[block.tensor].momentum + block.begin, grad(block), block.n, step.beta,
                   &sums[2 * b]);
    }
  });
  StepResult result{0.0, 0.0, false};
  for (size_t b = 0; b < blocks.size(); ++b) {
    result.momentum_dot_grad += sums[2 * b];
    result.momentum_sq_norm += sums[2 * b + 1];
  }
  const double along_grad = step.lr / step.rho;
  const double along_momentum =
      along_grad * (result.momentum_dot_grad / (step.rho + result.momentum_sq_norm));
  result.applied =
      std::isfinite(result.momentum_dot_grad) && std::isfinite(result.momentum_sq_norm) &&
      std::isfinite(static_cast<T>(along_grad)) && std::isfinite(static_cast<T>(along_momentum));
  if (!result.applied) return result;
  for_each_task(executor, tasks, [&](int task) {
    // Backwards: what the first pass read last is still in the cache.
    for (int64_t b = first[task + 1] - 1; b >= first[task]; --b) {
      const Block& block = blocks[b];
      const StepTensor<T>& tensor = tensors[block.tensor];
      kernels.write(tensor.theta + block.begin, tensor.momentum + block.begin, grad(block), block.n,
                    step.beta, along_grad, along_momentum);
    }
  });
  return result;
}

template StepResult sofim_step<float>(const StepTensor<float>*, int64_t, const Step&,
                                      const Executor&);
template StepResult sofim_step<double>(const StepTensor<double>*, int64_t, const Step&,
                                       const Executor&);

}  // namespace dpk
