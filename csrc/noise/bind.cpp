// dpkernels::add_gaussian_noise_ on CPU tensors.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "noise/noise.h"

namespace {

template <class T>
void add_noise(const std::vector<at::Tensor>& xs, double std, int64_t key, int64_t counter,
               double scale) {
  std::vector<dpk::NoiseTarget<T>> targets;
  for (const at::Tensor& x : xs) targets.push_back({x.mutable_data_ptr<T>(), x.numel()});
  dpk::add_gaussian_noise(targets.data(), static_cast<int64_t>(targets.size()), std, scale,
                          static_cast<uint64_t>(key), static_cast<uint64_t>(counter),
                          dpk::torch_executor());
}

void add_gaussian_noise_(at::TensorList xs, double std, int64_t key, int64_t counter,
                         double scale) {
  // The stream runs in logical order; a tensor with other strides goes through a copy.
  std::vector<at::Tensor> contiguous;
  for (const at::Tensor& x : xs) {
    TORCH_CHECK_VALUE(x.scalar_type() == xs[0].scalar_type() && x.is_cpu(),
                      "add_gaussian_noise_: xs must share one dtype and be on the CPU");
    contiguous.push_back(x.contiguous());
  }
  if (contiguous.empty()) return;
  dpk::check_disjoint(xs, {});
  if (xs[0].scalar_type() == at::kDouble) {
    add_noise<double>(contiguous, std, key, counter, scale);
  } else {
    TORCH_CHECK_VALUE(xs[0].scalar_type() == at::kFloat,
                      "add_gaussian_noise_: xs must be float32 or float64, got ",
                      xs[0].scalar_type());
    add_noise<float>(contiguous, std, key, counter, scale);
  }
  for (size_t i = 0; i < xs.size(); ++i) {
    if (!xs[i].is_contiguous()) xs[i].copy_(contiguous[i]);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("add_gaussian_noise_", add_gaussian_noise_); }
