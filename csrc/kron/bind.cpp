// dpkernels::apply_factor_, apply_kron_, second_moment and conv_second_moment on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "common/torch_convolution.h"
#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "kron/kron.h"

namespace {

at::ScalarType sum_type(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  TORCH_CHECK_VALUE(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble,
      "x must be float32, bfloat16, float16 or float64, got ", type);
  return type == at::kDouble ? type : at::kFloat;
}

// A tensor, not a vector: torch reuses the memory from one step to the next.
at::Tensor workspace_of(int64_t bytes) { return at::empty({bytes / 8 + 1}, at::kDouble); }

// A factor as the operators take it; keeps contiguous tensors alive.
struct Factor {
  dpk::Form form = dpk::Form::identity;
  at::Tensor data, gains;
  double tail;

  Factor(at::TensorList parts, double tail, int64_t size, at::ScalarType type) : tail(tail) {
    if (parts.empty()) return;
    const int64_t dim = parts[0].dim();
    form = parts.size() == 2 ? dpk::Form::low_rank
           : dim == 2        ? dpk::Form::full
                             : dpk::Form::diagonal;
    const bool square = form != dpk::Form::full || parts[0].size(1) == size;
    const bool values = form != dpk::Form::low_rank ||
                        (dim == 2 && parts[1].dim() == 1 && parts[1].size(0) == parts[0].size(1));
    TORCH_CHECK_VALUE(
        parts.size() <= 2 && (dim == 1 || dim == 2) && parts[0].size(0) == size && square && values,
        "a factor must be [], [diagonal], [matrix] or [vectors, values] of size ", size);
    for (const at::Tensor& part : parts) {
      TORCH_CHECK_VALUE(part.is_cpu() && part.scalar_type() == type,
                        "factors must be CPU tensors of dtype ", type);
    }
    data = parts[0].contiguous();
    if (form == dpk::Form::low_rank) gains = at::sub(parts[1], tail).contiguous();
  }

  template <class T>
  dpk::Side<T> side(int64_t size) const {
    if (form == dpk::Form::identity) return {form, size, 0, nullptr, nullptr, T(1)};
    const int64_t rank = form == dpk::Form::low_rank ? data.size(1) : 0;
    return {form,
            size,
            rank,
            data.const_data_ptr<T>(),
            rank > 0 ? gains.const_data_ptr<T>() : nullptr,
            static_cast<T>(tail)};
  }
};

void check_output(const at::Tensor& out, const at::Tensor& x, at::ScalarType type,
                  at::TensorList factors) {
  TORCH_CHECK_VALUE(x.is_cpu() && out.is_cpu() && out.is_contiguous() && out.scalar_type() == type,
                    "out must be a contiguous CPU tensor of dtype ", type);
  std::vector<at::Tensor> inputs(factors.begin(), factors.end());
  inputs.push_back(x);
  dpk::check_disjoint(at::TensorList(&out, 1), inputs);
}

template <class T>
void low_rank(const at::Tensor& out, const at::Tensor& x, const Factor& factor, bool bias) {
  const dpk::Executor executor = dpk::torch_executor();
  const dpk::Side<T> side = factor.side<T>(out.size(1));
  const at::Tensor workspace = workspace_of(dpk::low_rank_workspace_bytes(side, executor));
  dpk::apply_low_rank(side, bias, x.const_data_ptr<T>(), x.stride(0), x.size(0),
                      out.mutable_data_ptr<T>(), workspace.mutable_data_ptr(), executor);
}

void diagonal(at::Tensor out, const at::Tensor& x, const at::Tensor& values) {
  const int64_t n = x.size(1);
  at::Tensor inside = out.narrow(1, 0, n);
  if (values.defined()) {
    at::mul_out(inside, x, values.narrow(0, 0, n));
  } else {
    inside.copy_(x);
  }
  if (out.size(1) == n) return;
  at::Tensor last = out.select(1, n);
  if (values.defined()) {
    last.copy_(values.select(0, n).expand(last.sizes()));
  } else {
    last.fill_(1);
  }
}

// out = x U for the rows of x, already of out's dtype.
void apply_to_rows(at::Tensor out, const at::Tensor& x, const Factor& factor, bool bias) {
  const int64_t n = x.size(1);
  if (factor.form == dpk::Form::low_rank && factor.data.size(1) > 0) {
    const at::Tensor rows = n <= 1 || x.stride(1) == 1 ? x : x.contiguous();
    if (out.scalar_type() == at::kDouble) {
      low_rank<double>(out, rows, factor, bias);
    } else {
      low_rank<float>(out, rows, factor, bias);
    }
  } else if (factor.form == dpk::Form::low_rank) {
    diagonal(out, x, at::empty({n + bias}, out.options()).fill_(factor.tail));
  } else if (factor.form != dpk::Form::full) {
    diagonal(out, x, factor.data);
  } else if (bias) {
    // One product is all there is, and the library's is the fastest.
    at::addmm_out(out, factor.data.select(0, n), x, factor.data.narrow(0, 0, n));
  } else {
    at::mm_out(out, x, factor.data);
  }
}

void apply_factor_(at::Tensor out, const at::Tensor& x, at::TensorList factor, double tail,
                   bool bias) {
  const at::ScalarType type = sum_type(x);
  TORCH_CHECK_VALUE(
      x.dim() == 2 && out.dim() == 2 && out.size(0) == x.size(0) && out.size(1) == x.size(1) + bias,
      "apply_factor_: out must be [M, n], or [M, n + 1] with bias, for x [M, n]");
  check_output(out, x, type, factor);
  const Factor side(factor, tail, out.size(1), type);
  apply_to_rows(out, x.to(type), side, bias);
}

template <class T>
void both(const at::Tensor& out, const at::Tensor& x, const Factor& left, const Factor& right) {
  const dpk::Executor executor = dpk::torch_executor();
  const dpk::Side<T> left_side = left.side<T>(x.size(1)), right_side = right.side<T>(x.size(2));
  const dpk::Matrices<T> matrices{x.const_data_ptr<T>(), out.mutable_data_ptr<T>(), x.size(0),
                                  x.size(1), x.size(2)};
  const at::Tensor workspace =
      workspace_of(dpk::both_workspace_bytes(left_side, right_side, matrices, executor));
  dpk::apply_both(left_side, right_side, matrices, workspace.mutable_data_ptr(), executor);
}

// One matrix, all threads: its rows first, then the rows of its transpose.
void apply_to_matrix(at::Tensor out, const at::Tensor& x, const Factor& left, const Factor& right) {
  if (left.form == dpk::Form::identity) return apply_to_rows(out, x, right, false);
  at::Tensor half = x;
  if (right.form != dpk::Form::identity) {
    half = at::empty(x.sizes(), out.options());
    apply_to_rows(half, x, right, false);
  }
  if (left.form == dpk::Form::full) {
    at::mm_out(out, left.data, half);
  } else if (left.form == dpk::Form::diagonal) {
    at::mul_out(out, half, left.data.unsqueeze(1));
  } else {
    at::Tensor inner = at::mm(left.data.t(), half).mul_(left.gains.unsqueeze(1));
    at::addmm_out(out, half, left.data, inner, left.tail);
  }
}

void apply_kron_(at::Tensor out, const at::Tensor& x, at::TensorList left, double left_tail,
                 at::TensorList right, double right_tail) {
  const at::ScalarType type = sum_type(x);
  TORCH_CHECK_VALUE(x.dim() == 3 && out.sizes() == x.sizes(),
                    "apply_kron_: out and x must be [N, O, I], both the same");
  std::vector<at::Tensor> factors(left.begin(), left.end());
  factors.insert(factors.end(), right.begin(), right.end());
  check_output(out, x, type, factors);
  const Factor left_side(left, left_tail, x.size(1), type);
  const Factor right_side(right, right_tail, x.size(2), type);
  const at::Tensor matrices = x.to(type).contiguous();
  if (matrices.size(0) < dpk::torch_executor().threads) {
    for (int64_t i = 0; i < matrices.size(0); ++i) {
      apply_to_matrix(out.select(0, i), matrices.select(0, i), left_side, right_side);
    }
  } else if (type == at::kDouble) {
    both<double>(out, matrices, left_side, right_side);
  } else {
    both<float>(out, matrices, left_side, right_side);
  }
}

// Whether all rows of x [B, T, n] are equally far apart.
bool in_one_piece(const at::Tensor& x) {
  return x.size(1) == 1 || x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1);
}

template <class T>
void moment_of(const at::Tensor& x, bool bias, double scale, const at::Tensor& out) {
  const bool one = in_one_piece(x);
  const int64_t stride = x.size(1) == 1 ? x.stride(0) : x.stride(1);
  const dpk::MomentRows<T> rows{x.const_data_ptr<T>(),
                                one ? 1 : x.size(0),
                                one ? x.size(0) * x.size(1) : x.size(1),
                                x.size(2),
                                x.stride(0),
                                stride,
                                x.stride(2)};
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace =
      workspace_of(dpk::second_moment_workspace_bytes(rows, bias, executor));
  dpk::second_moment(rows, bias, scale, out.mutable_data_ptr<T>(), workspace.mutable_data_ptr(),
                     executor);
}

// Fewer positions than this, if they are not in one piece with those of the next sample, are copied
// into rows: every sample's product reads and writes the whole sum. Measured for 16,384 positions
// of 32 channels, one thread: in samples of 16, 0.91 ms as they are and 0.71 copied; of 32, 0.82
// both; of 64, 0.46 and 0.80.
constexpr int64_t kShortSegment = 32;

at::Tensor second_moment(const at::Tensor& x, bool bias, double scale) {
  const at::ScalarType type = sum_type(x);
  TORCH_CHECK_VALUE(x.is_cpu() && x.dim() == 3, "second_moment: x must be a [B, T, n] CPU tensor");
  const int64_t n = x.size(2) + bias;
  at::Tensor out = at::empty({n, n}, x.options().dtype(type));
  if (x.size(0) * x.size(1) == 0) return out.zero_();
  at::Tensor rows = x.to(type);
  if (rows.size(1) < kShortSegment && !in_one_piece(rows)) rows = rows.contiguous();
  if (type == at::kDouble) {
    moment_of<double>(rows, bias, scale, out);
  } else {
    moment_of<float>(rows, bias, scale, out);
  }
  return out;
}

dpk::Convolution convolution_of(const at::Tensor& x, at::IntArrayRef kernel, at::IntArrayRef stride,
                                at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const size_t axes = static_cast<size_t>(x.dim()) - 2;
  TORCH_CHECK_VALUE(x.is_cpu() && axes >= 1 && axes <= 3 && kernel.size() == axes &&
                        stride.size() == axes && padding.size() == axes && dilation.size() == axes,
                    "conv_second_moment: x must be [B, C, ...] with 1 to 3 spatial axes on the "
                    "CPU, and the lists as long");
  dpk::check_conv_numbers("conv_second_moment", kernel, stride, padding, dilation, groups,
                          x.size(1));
  dpk::Convolution shape{x.size(0), x.size(1), groups,    {1, 1, 1}, {1, 1, 1},
                         {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}};
  dpk::ConvPart image(x.size(1)), patch(x.size(1)), positions(x.size(0));
  for (size_t i = 0; i < axes; ++i) {
    const size_t to = 3 - axes + i;
    shape.size[to] = x.size(static_cast<int64_t>(i) + 2);
    shape.kernel[to] = kernel[i];
    shape.stride[to] = stride[i];
    shape.padding[to] = padding[i];
    shape.dilation[to] = dilation[i];
    const int64_t room = shape.size[to] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1;
    shape.out[to] = room < 0 ? 0 : room / stride[i] + 1;
    image *= shape.size[to] + 2 * padding[i];
    patch *= kernel[i];
    positions *= shape.out[to];
  }
  return shape;
}

template <class T>
void conv_moment_of(const dpk::Convolution& shape, const at::Tensor& x, bool bias, double scale,
                    const at::Tensor& out) {
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace = workspace_of(dpk::conv_workspace_bytes<T>(shape, bias, executor));
  dpk::conv_second_moment(shape, x.const_data_ptr<T>(), bias, scale, out.mutable_data_ptr<T>(),
                          workspace.mutable_data_ptr(), executor);
}

at::Tensor conv_second_moment(const at::Tensor& x, at::IntArrayRef kernel, at::IntArrayRef stride,
                              at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                              bool bias, double scale) {
  const at::ScalarType type = sum_type(x);
  const dpk::Convolution shape = convolution_of(x, kernel, stride, padding, dilation, groups);
  const int64_t n = shape.patch() + bias;
  at::Tensor out = at::empty({groups, n, n}, x.options().dtype(type));
  if (shape.batch * shape.positions() == 0) return out.zero_();
  const at::Tensor images = x.to(type).contiguous();
  if (type == at::kDouble) {
    conv_moment_of<double>(shape, images, bias, scale, out);
  } else {
    conv_moment_of<float>(shape, images, bias, scale, out);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("apply_factor_", apply_factor_);
  m.impl("apply_kron_", apply_kron_);
  m.impl("second_moment", second_moment);
  m.impl("conv_second_moment", conv_second_moment);
}
