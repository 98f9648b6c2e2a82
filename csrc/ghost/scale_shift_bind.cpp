// dpkernels::ghost_scale_shift_grads on CPU tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "common/torch_dtype.h"
#include "common/torch_executor.h"
#include "ghost/scale_shift.h"

namespace {

at::Tensor checked_scale(const std::optional<at::Tensor>& scale, int64_t width) {
  if (!scale.has_value()) return {};
  TORCH_CHECK_VALUE(scale->is_cpu() && scale->scalar_type() == at::kDouble && scale->dim() == 1 &&
                        scale->size(0) == width,
                    "scales must be float64 CPU tensors with one number for each element");
  return scale->contiguous();
}

const double* pointer(const at::Tensor& scale) {
  return scale.defined() ? scale.const_data_ptr<double>() : nullptr;
}

std::tuple<at::Tensor, at::Tensor> ghost_scale_shift_grads(
    const at::Tensor& normalised, const at::Tensor& errors, bool channels_first, bool bias,
    const std::optional<at::Tensor>& weight_scale, const std::optional<at::Tensor>& bias_scale) {
  TORCH_CHECK_VALUE(normalised.is_cpu() && errors.is_cpu() && normalised.dim() == 3 &&
                        normalised.sizes() == errors.sizes() &&
                        normalised.scalar_type() == errors.scalar_type(),
                    "normalised and errors must be CPU tensors of one 3-D shape and one dtype");
  const at::Tensor x = normalised.contiguous(), d = errors.contiguous();
  const int64_t batch = x.size(0), width = x.size(channels_first ? 1 : 2);
  const at::Tensor scale = checked_scale(weight_scale, width);
  const at::Tensor shift = checked_scale(bias_scale, width);
  const at::ScalarType sums = dpk::sum_type(x.scalar_type());
  at::Tensor weight_grads = at::empty({batch, width}, sums);
  at::Tensor bias_grads = at::empty({batch, bias ? width : 0}, sums);
  const dpk::ScaleShiftProblem problem{batch,
                                       x.size(channels_first ? 2 : 1),
                                       width,
                                       x.const_data_ptr(),
                                       d.const_data_ptr(),
                                       dpk::dtype_of(x, "normalised"),
                                       channels_first,
                                       pointer(scale),
                                       pointer(shift)};
  dpk::scale_shift_grads(problem, weight_grads.mutable_data_ptr(),
                         bias ? bias_grads.mutable_data_ptr() : nullptr, dpk::torch_executor());
  return {weight_grads, bias_grads};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("ghost_scale_shift_grads", ghost_scale_shift_grads);
}
