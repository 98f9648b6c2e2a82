// dpkernels::ghost_linear_rank_one and ghost_linear_rank_one_clip_ on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs. The second one refuses whatever
// linear_clip_and_sum refuses, which relies on it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "clip/clip.h"
#include "common/torch_dtype.h"
#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "ghost/linear.h"
#include "ghost/rank_one.h"

namespace {

// A side as the kernel takes it; keeps the tensors (or their copies) alive.
struct Side {
  at::Tensor rows, matrix, values, transformed;
  dpk::RankOneSide view;

  // factor: {}, {matrix [n, n]} or {vectors [n, r], values [r]}.
  Side(const at::Tensor& x, at::TensorList factor, double tail, bool augment) {
    const auto with_neighbours = [](const at::Tensor& t) {
      return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
    };
    rows = with_neighbours(x);
    if (!factor.empty()) {
      check_factor(x, factor, x.size(2) + augment);
      matrix = with_neighbours(factor[0]);
      if (factor.size() == 2) values = factor[1].contiguous();
      transformed = at::empty({x.size(0), 1, matrix.size(0)}, x.scalar_type());
    } else {
      transformed = at::empty({0}, x.scalar_type());
    }
    view = {rows.const_data_ptr(),
            rows.stride(0),
            rows.size(2),
            factor.empty()       ? dpk::RankOneForm::none
            : factor.size() == 1 ? dpk::RankOneForm::full
                                 : dpk::RankOneForm::low_rank,
            matrix.defined() ? matrix.const_data_ptr() : nullptr,
            matrix.defined() ? matrix.stride(0) : 0,
            matrix.defined() ? matrix.size(0) : 0,
            transformed.mutable_data_ptr(),
            values.defined() ? values.const_data_ptr() : nullptr,
            values.defined() ? values.size(0) : 0,
            tail};
  }
  Side(const Side&) = delete;

  static void check_factor(const at::Tensor& x, at::TensorList factor, int64_t size) {
    const at::ScalarType type = x.scalar_type();
    bool fits = factor.size() <= 2 && (type == at::kFloat || type == at::kDouble);
    for (const at::Tensor& part : factor) fits &= part.is_cpu() && part.scalar_type() == type;
    fits = fits && factor[0].dim() == 2 && factor[0].size(0) == size;
    if (fits && factor.size() == 1) fits = factor[0].size(1) == size;
    if (fits && factor.size() == 2) {
      fits = factor[1].dim() == 1 && factor[1].size(0) == factor[0].size(1);
    }
    TORCH_CHECK_VALUE(fits,
                      "right and left must be [n, n], or [n, r] and [r], for rows of n elements "
                      "(n + 1 if augment), on the CPU, all float32 or all float64");
  }

  // What the sum is made from: the rows, as transformed if they are.
  dpk::Positions positions() const {
    if (!matrix.defined()) return {view.rows, view.row_stride, view.width};
    return {transformed.const_data_ptr(), view.size, view.size};
  }
};

void check_vectors(const at::Tensor& activations, const at::Tensor& errors, bool augment,
                   bool has_right) {
  TORCH_CHECK_VALUE(activations.is_cpu() && errors.is_cpu() && activations.dim() == 3 &&
                        errors.dim() == 3 && activations.size(0) == errors.size(0) &&
                        activations.size(1) == 1 && errors.size(1) == 1 &&
                        activations.scalar_type() == errors.scalar_type(),
                    "activations and errors must be [B, 1, I] and [B, 1, O] CPU tensors of one "
                    "dtype");
  TORCH_CHECK_VALUE(has_right || !augment, "augment needs right, of size I + 1");
}

void check_output(const at::Tensor& out, at::IntArrayRef sizes, at::ScalarType type) {
  TORCH_CHECK_VALUE(out.is_cpu() && out.is_contiguous() && out.sizes() == sizes &&
                        out.scalar_type() == type && !out.requires_grad() &&
                        (!out.is_inference() || c10::InferenceMode::is_enabled()),
                    "out and bias_out must be contiguous [O, I] and [O] CPU tensors, float32 "
                    "(float64 for float64), and writable: no grad, no inference tensors");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ghost_linear_rank_one(
    const at::Tensor& activations, const at::Tensor& errors, at::TensorList right,
    double right_tail, at::TensorList left, double left_tail, bool augment, bool bias) {
  check_vectors(activations, errors, augment, !right.empty());
  const dpk::Dtype dtype = dpk::dtype_of(activations, "activations");
  const Side a(activations, right, right_tail, augment), d(errors, left, left_tail, false);
  at::Tensor sq_norms = at::empty({activations.size(0)}, at::kDouble);
  dpk::rank_one_sq_norms(a.view, d.view, activations.size(0), dtype, bias,
                         sq_norms.mutable_data_ptr<double>(), dpk::torch_executor());
  return {a.transformed, d.transformed, sq_norms};
}

std::tuple<at::Tensor, at::Tensor> ghost_linear_rank_one_clip_(
    const at::Tensor& out, const std::optional<at::Tensor>& bias_out, const at::Tensor& activations,
    const at::Tensor& errors, at::TensorList right, double right_tail, at::TensorList left,
    double left_tail, bool augment, double max_norm, bool accumulate) {
  check_vectors(activations, errors, augment, !right.empty());
  const int64_t batch = activations.size(0), outputs = errors.size(2);
  const at::ScalarType type = dpk::sum_type(activations.scalar_type());
  check_output(out, {outputs, activations.size(2)}, type);
  if (bias_out) check_output(*bias_out, {outputs}, type);
  TORCH_CHECK_VALUE(bias_out || !augment, "augment needs bias_out");
  TORCH_CHECK_VALUE(max_norm > 0 && std::isfinite(max_norm),
                    "max_norm must be a finite number > 0");
  std::vector<at::Tensor> outs = {out}, inputs = {activations, errors};
  if (bias_out) outs.push_back(*bias_out);
  inputs.insert(inputs.end(), right.begin(), right.end());
  inputs.insert(inputs.end(), left.begin(), left.end());
  dpk::check_disjoint(outs, inputs);

  const dpk::Dtype dtype = dpk::dtype_of(activations, "activations");
  const Side a(activations, right, right_tail, augment), d(errors, left, left_tail, false);
  at::Tensor sq_norms = at::empty({batch}, at::kDouble), factors = at::empty({batch}, type);
  double* const squares = sq_norms.mutable_data_ptr<double>();
  const dpk::Executor executor = dpk::torch_executor();
  dpk::rank_one_sq_norms(a.view, d.view, batch, dtype, bias_out && !augment, squares, executor);
  dpk::clip_factors(squares, batch, {&max_norm, 1, /*normalise=*/false, 0.0}, type == at::kDouble,
                    factors.mutable_data_ptr());
  const dpk::LinearBatch vectors{a.positions(), d.positions(), batch, 1, dtype};
  dpk::linear_weighted_sum(vectors, factors.const_data_ptr(), nullptr, augment,
                           out.mutable_data_ptr(),
                           bias_out ? bias_out->mutable_data_ptr() : nullptr, accumulate, executor);
  return {sq_norms, factors};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("ghost_linear_rank_one", ghost_linear_rank_one);
  m.impl("ghost_linear_rank_one_clip_", ghost_linear_rank_one_clip_);
}
