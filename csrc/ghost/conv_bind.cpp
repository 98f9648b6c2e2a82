// dpkernels::ghost_conv_norms on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operator from reading memory that is not its own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>
#include <vector>

#include "common/torch_convolution.h"
#include "common/torch_dtype.h"
#include "common/torch_executor.h"
#include "ghost/conv.h"

namespace {

// The last axes of three; the first ones are absent.
dpk::ConvShape shape_of(const at::Tensor& x, const at::Tensor& d, at::IntArrayRef kernel,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                        int64_t groups) {
  const int64_t rank = static_cast<int64_t>(kernel.size());
  TORCH_CHECK_VALUE(rank >= 1 && rank <= 3 && stride.size() == kernel.size() &&
                        padding.size() == kernel.size() && dilation.size() == kernel.size(),
                    "kernel_size, stride, padding and dilation must have 1 to 3 numbers each");
  TORCH_CHECK_VALUE(x.is_cpu() && d.is_cpu() && x.dim() == rank + 2 && d.dim() == rank + 2 &&
                        x.size(0) == d.size(0) && x.scalar_type() == d.scalar_type(),
                    "activations [B, C, ...] and errors [B, O, ...] must be CPU tensors that share "
                    "B and the dtype");
  dpk::check_conv_numbers("ghost_conv_norms", kernel, stride, padding, dilation, groups, x.size(1));
  TORCH_CHECK_VALUE(d.size(1) % groups == 0, "groups must divide the channels of errors");
  dpk::ConvShape shape{x.size(0), x.size(1), d.size(1), groups, {}};
  dpk::ConvPart planes(x.size(1)), columns(x.size(1)), table(1);
  for (int64_t a = 0; a < 3; ++a) {
    const int64_t i = a - (3 - rank);
    if (i < 0) {
      shape.axes[a] = {1, 1, 1, 1, 0, 1};
      continue;
    }
    shape.axes[a] = {x.size(i + 2), d.size(i + 2), kernel[i], stride[i], padding[i], dilation[i]};
    const int64_t padded = x.size(i + 2) + 2 * padding[i];
    const int64_t room = padded - dilation[i] * (kernel[i] - 1) - 1;
    TORCH_CHECK_VALUE(room >= 0 && d.size(i + 2) == room / stride[i] + 1,
                      "errors do not have the size that this convolution gives");
    // A plane is at most one element longer than the padded axis.
    planes *= padded + 1;
    planes *= std::min(kernel[i], stride[i]);
    columns *= kernel[i];
    table *= kernel[i];
    table *= d.size(i + 2);
  }
  return shape;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ghost_conv_norms(
    const at::Tensor& activations, const at::Tensor& errors, at::IntArrayRef kernel_size,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
    bool bias, const std::optional<at::Tensor>& scale, std::string_view formula, bool keep) {
  const dpk::ConvShape shape =
      shape_of(activations, errors, kernel_size, stride, padding, dilation, groups);
  const bool gram = formula == "gram";
  TORCH_CHECK_VALUE(gram || formula == "materialised", "no formula ", formula);
  TORCH_CHECK_VALUE(!gram || (!keep && !scale.has_value()),
                    "the Gram formula has no gradients to keep or to scale");
  TORCH_CHECK_VALUE(!gram || shape.pixels() < std::numeric_limits<int32_t>::max(),
                    "the Gram formula takes less than 2^31 pixels");
  std::vector<double> column_scale;
  if (scale.has_value()) {
    TORCH_CHECK_VALUE(scale->is_cpu() && scale->scalar_type() == at::kDouble && scale->dim() == 1 &&
                          scale->size(0) == shape.columns() + 1,
                      "scale must be a float64 CPU tensor with one number for each column and one "
                      "for the bias");
    const at::Tensor contiguous = scale->contiguous();
    const double* values = contiguous.const_data_ptr<double>();
    column_scale.assign(values, values + contiguous.numel());
    column_scale.resize(shape.columns() + 4, 0.0);  // the kernel reads four at a time
  }
  const at::Tensor x = activations.contiguous(), d = errors.contiguous();
  const at::ScalarType sums = dpk::sum_type(x.scalar_type());
  at::Tensor sq_norms = at::empty({shape.batch}, at::kDouble);
  at::Tensor grads = at::empty({shape.batch, keep ? shape.out_channels : 0, shape.columns()}, sums);
  at::Tensor bias_grads = at::empty({shape.batch, keep && bias ? shape.out_channels : 0}, sums);
  const dpk::ConvProblem problem{shape,
                                 x.const_data_ptr(),
                                 d.const_data_ptr(),
                                 dpk::dtype_of(x, "activations"),
                                 bias,
                                 gram,
                                 scale.has_value() ? column_scale.data() : nullptr};
  const dpk::ConvOutputs outputs{sq_norms.mutable_data_ptr<double>(),
                                 keep ? grads.mutable_data_ptr() : nullptr,
                                 keep && bias ? bias_grads.mutable_data_ptr() : nullptr};
  dpk::conv_norms(problem, outputs, dpk::torch_executor());
  return {sq_norms, grads, bias_grads};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("ghost_conv_norms", ghost_conv_norms); }
