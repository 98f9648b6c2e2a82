// dpkernels::ghost_linear_sq_norms and ghost_linear_weighted_sum_ on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "common/torch_dtype.h"
#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "ghost/linear.h"

namespace {

// Activations and errors as the kernels take them; keeps the tensors (or their copies) alive.
struct Batch {
  at::Tensor activations, errors;
  dpk::LinearBatch view;

  Batch(const at::Tensor& a, const at::Tensor& d) {
    TORCH_CHECK_VALUE(a.is_cpu() && d.is_cpu() && a.dim() == 3 && d.dim() == 3 &&
                          a.scalar_type() == d.scalar_type() && a.size(0) == d.size(0) &&
                          a.size(1) == d.size(1),
                      "activations and errors must be [B, T, I] and [B, T, O] CPU tensors of one "
                      "dtype");
    activations = rows_of(a);
    errors = rows_of(d);
    view = {positions_of(activations), positions_of(errors), a.size(0), a.size(1),
            dpk::dtype_of(a, "activations")};
  }
  Batch(const Batch&) = delete;

 private:
  // [B * T, width] with neighbouring elements in a row; a copy only where no view is that.
  static at::Tensor rows_of(const at::Tensor& x) {
    const at::Tensor rows = x.reshape({x.size(0) * x.size(1), x.size(2)});
    return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
  }
  static dpk::Positions positions_of(const at::Tensor& rows) {
    return {rows.const_data_ptr(), rows.stride(0), rows.size(1)};
  }
};

std::tuple<at::Tensor, at::Tensor> ghost_linear_sq_norms(const at::Tensor& activations,
                                                         const at::Tensor& errors, bool bias,
                                                         bool gram) {
  const Batch batch(activations, errors);
  at::Tensor sq_norms = at::empty({batch.view.batch}, at::kDouble);
  at::Tensor apart = at::empty({batch.view.batch}, at::kBool);
  dpk::linear_sq_norms(
      batch.view, bias, gram ? dpk::LinearFormula::gram : dpk::LinearFormula::materialised,
      sq_norms.mutable_data_ptr<double>(), apart.mutable_data_ptr<bool>(), dpk::torch_executor());
  return {sq_norms, apart};
}

void ghost_linear_weighted_sum_(const at::Tensor& out, const std::optional<at::Tensor>& bias_out,
                                const at::Tensor& activations, const at::Tensor& errors,
                                const at::Tensor& factors, const std::optional<at::Tensor>& apart,
                                bool accumulate) {
  const Batch batch(activations, errors);
  const at::ScalarType type = activations.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t outputs = errors.size(2), width = activations.size(2);
  TORCH_CHECK_VALUE(out.is_cpu() && out.dim() == 2 && out.is_contiguous() &&
                        out.scalar_type() == type && out.size(0) == outputs &&
                        (out.size(1) == width || (bias_out && out.size(1) + 1 == width)),
                    "out must be a contiguous [O, I] CPU tensor, float32 (float64 for float64)");
  TORCH_CHECK_VALUE(
      !bias_out || (bias_out->is_cpu() && bias_out->dim() == 1 && bias_out->is_contiguous() &&
                    bias_out->scalar_type() == type && bias_out->size(0) == outputs),
      "bias_out must be a contiguous [O] CPU tensor of the dtype of out");
  TORCH_CHECK_VALUE(factors.is_cpu() && factors.dim() == 1 && factors.size(0) == batch.view.batch &&
                        factors.scalar_type() == type,
                    "factors must be [B], of the dtype of out");
  TORCH_CHECK_VALUE(
      !apart || (apart->is_cpu() && apart->dim() == 1 && apart->is_contiguous() &&
                 apart->size(0) == batch.view.batch && apart->scalar_type() == at::kBool),
      "apart must be a contiguous [B] CPU tensor of bool");
  std::vector<at::Tensor> outs = {out};
  if (bias_out) outs.push_back(*bias_out);
  dpk::check_disjoint(outs, {activations, errors, factors});
  const at::Tensor weights = factors.contiguous();
  dpk::linear_weighted_sum(
      batch.view, weights.const_data_ptr(), apart ? apart->const_data_ptr<bool>() : nullptr,
      out.size(1) + 1 == width, out.mutable_data_ptr(),
      bias_out ? bias_out->mutable_data_ptr() : nullptr, accumulate, dpk::torch_executor());
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("ghost_linear_sq_norms", ghost_linear_sq_norms);
  m.impl("ghost_linear_weighted_sum_", ghost_linear_weighted_sum_);
}
