// dpkernels::row_sq_norms, clip_factors, weighted_row_sum_ and clip_and_sum_ on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "clip/clip.h"
#include "common/torch_dtype.h"
#include "common/torch_executor.h"
#include "common/torch_overlap.h"

namespace {

// The gradients as the kernels take them; keeps the tensors (or their copies) alive.
struct Gradients {
  std::vector<at::Tensor> held;
  std::vector<dpk::RowTensor> tensors;
  dpk::Rows rows;

  explicit Gradients(at::TensorList grads) {
    TORCH_CHECK_VALUE(!grads.empty(), "grads must hold at least one tensor");
    for (const at::Tensor& g : grads) {
      TORCH_CHECK_VALUE(g.is_cpu() && g.dim() == 2 && g.size(0) == grads[0].size(0) &&
                            g.scalar_type() == grads[0].scalar_type(),
                        "grads must be [B, D] CPU tensors of one dtype that share B");
      // Any distance between rows will do; elements of a row must be neighbours.
      held.push_back(g.size(1) <= 1 || g.stride(1) == 1 ? g : g.contiguous());
      const at::Tensor& row = held.back();
      tensors.push_back({row.const_data_ptr(), row.stride(0), row.size(1), nullptr});
    }
    rows = {tensors.data(), static_cast<int64_t>(tensors.size()), grads[0].size(0),
            dpk::dtype_of(grads[0], "grads")};
  }
  Gradients(const Gradients&) = delete;

  // `inputs`: what else is read.
  void set_outputs(at::TensorList out, std::vector<at::Tensor> inputs) {
    TORCH_CHECK_VALUE(out.size() == held.size(), "out must have one tensor for each of grads");
    for (size_t l = 0; l < held.size(); ++l) {
      TORCH_CHECK_VALUE(out[l].is_cpu() && out[l].dim() == 1 && out[l].is_contiguous() &&
                            out[l].size(0) == held[l].size(1) &&
                            out[l].scalar_type() == dpk::sum_type(held[l].scalar_type()),
                        "out must be contiguous [D] CPU tensors, float32 (float64 for float64)");
      tensors[l].out = out[l].mutable_data_ptr();
    }
    inputs.insert(inputs.end(), held.begin(), held.end());
    dpk::check_disjoint(out, inputs);
  }
};

at::Tensor workspace_for(const dpk::Rows& rows, bool with_norms, const dpk::Executor& executor) {
  // A tensor, not a vector: torch reuses the memory from one step to the next.
  const int64_t bytes = dpk::sum_workspace_bytes(rows, with_norms, executor);
  const at::ScalarType type = rows.dtype == dpk::Dtype::f64 ? at::kDouble : at::kFloat;
  return at::empty({bytes / static_cast<int64_t>(at::elementSize(type))}, type);
}

at::Tensor row_sq_norms(at::TensorList grads, bool per_tensor) {
  const Gradients gradients(grads);
  const int64_t batch = gradients.rows.batch;
  at::Tensor sq_norms = per_tensor ? at::empty({gradients.rows.count, batch}, at::kDouble)
                                   : at::empty({batch}, at::kDouble);
  dpk::row_sq_norms(gradients.rows, per_tensor, sq_norms.mutable_data_ptr<double>(),
                    dpk::torch_executor());
  return sq_norms;
}

dpk::ClipRule rule_of(at::ArrayRef<double> max_norms, bool normalise, double gamma) {
  return {max_norms.data(), static_cast<int64_t>(max_norms.size()), normalise, gamma};
}

at::Tensor clip_factors(const at::Tensor& sq_norms, at::ArrayRef<double> max_norms, bool normalise,
                        double gamma, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(sq_norms.is_cpu() && sq_norms.scalar_type() == at::kDouble &&
                        sq_norms.dim() == 2 &&
                        sq_norms.size(0) == static_cast<int64_t>(max_norms.size()),
                    "sq_norms must be a float64 CPU tensor with one row for each of max_norms");
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble,
                    "dtype must be float32 or float64");
  const at::Tensor norms = sq_norms.contiguous();
  at::Tensor factors = at::empty(norms.sizes(), dtype);
  dpk::clip_factors(norms.const_data_ptr<double>(), norms.size(1),
                    rule_of(max_norms, normalise, gamma), dtype == at::kDouble,
                    factors.mutable_data_ptr());
  return factors;
}

at::Tensor layer_factors(at::TensorList sq_norms, double scale, double max_norm, bool normalise,
                         double gamma, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!sq_norms.empty() && (dtype == at::kFloat || dtype == at::kDouble),
                    "sq_norms must be a list of tensors, and dtype float32 or float64");
  const int64_t batch = sq_norms[0].numel();
  std::vector<at::Tensor> held;
  std::vector<const double*> rows;
  for (const at::Tensor& row : sq_norms) {
    TORCH_CHECK_VALUE(
        row.is_cpu() && row.scalar_type() == at::kDouble && row.dim() == 1 && row.numel() == batch,
        "sq_norms must be float64 CPU tensors [B]");
    held.push_back(row.contiguous());
    rows.push_back(held.back().const_data_ptr<double>());
  }
  at::Tensor factors = at::empty({batch}, dtype);
  dpk::layer_factors(rows.data(), static_cast<int64_t>(rows.size()), batch, scale,
                     {&max_norm, 1, normalise, gamma}, dtype == at::kDouble,
                     factors.mutable_data_ptr());
  return factors;
}

void weighted_row_sum_(at::TensorList out, at::TensorList grads, const at::Tensor& factors,
                       bool accumulate) {
  Gradients gradients(grads);
  gradients.set_outputs(out, {factors});
  const dpk::Rows& rows = gradients.rows;
  TORCH_CHECK_VALUE(factors.is_cpu() && factors.dim() == 2 && factors.size(1) == rows.batch &&
                        (factors.size(0) == 1 || factors.size(0) == rows.count) &&
                        factors.scalar_type() == dpk::sum_type(grads[0].scalar_type()),
                    "factors must be [1, B] or [L, B], of the dtype of out");
  const at::Tensor weights = factors.contiguous();
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace = workspace_for(rows, false, executor);
  dpk::weighted_row_sum(rows, weights.const_data_ptr(), weights.size(0), accumulate,
                        workspace.mutable_data_ptr(), executor);
}

std::tuple<at::Tensor, at::Tensor> clip_and_sum_(at::TensorList out, at::TensorList grads,
                                                 at::ArrayRef<double> max_norms, bool normalise,
                                                 double gamma, bool accumulate) {
  Gradients gradients(grads);
  gradients.set_outputs(out, {});
  const dpk::Rows& rows = gradients.rows;
  const dpk::ClipRule rule = rule_of(max_norms, normalise, gamma);
  TORCH_CHECK_VALUE(rule.bound_count == 1 || rule.bound_count == rows.count,
                    "max_norms must have one bound, or one for each of grads");
  at::Tensor sq_norms = at::empty({rule.bound_count, rows.batch}, at::kDouble);
  at::Tensor factors =
      at::empty({rule.bound_count, rows.batch}, dpk::sum_type(grads[0].scalar_type()));
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace = workspace_for(rows, true, executor);
  dpk::clip_and_sum(rows, rule, accumulate, sq_norms.mutable_data_ptr<double>(),
                    factors.mutable_data_ptr(), workspace.mutable_data_ptr(), executor);
  return {sq_norms, factors};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("row_sq_norms", row_sq_norms);
  m.impl("clip_factors", clip_factors);
  m.impl("layer_factors", layer_factors);
  m.impl("weighted_row_sum_", weighted_row_sum_);
  m.impl("clip_and_sum_", clip_and_sum_);
}
