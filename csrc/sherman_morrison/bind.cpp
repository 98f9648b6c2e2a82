// The Sherman-Morrison operators on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs. sofim_step_ refuses whatever its
// Python function refuses, which relies on it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "sherman_morrison/sherman_morrison.h"

namespace {

bool is_compiled_type(at::ScalarType type) { return type == at::kFloat || type == at::kDouble; }

dpk::Dtype grad_dtype(at::ScalarType params, at::ScalarType grads) {
  if (params == grads) return params == at::kDouble ? dpk::Dtype::f64 : dpk::Dtype::f32;
  TORCH_CHECK_VALUE(params == at::kFloat && (grads == at::kBFloat16 || grads == at::kHalf),
                    "grads must be of the dtype of params, or bfloat16 or float16 beside float32");
  return grads == at::kHalf ? dpk::Dtype::f16 : dpk::Dtype::bf16;
}

// Whether the elements of all three lie in the same order, with no gaps: then any order will do.
bool same_layout(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return a.is_non_overlapping_and_dense() && a.strides() == b.strides() &&
         a.strides() == c.strides();
}

template <class T>
dpk::StepResult step_typed(at::TensorList params, at::TensorList momentum, at::TensorList grads,
                           const dpk::Step& step) {
  std::vector<at::Tensor> held;
  std::vector<dpk::StepTensor<T>> tensors;
  for (size_t i = 0; i < params.size(); ++i) {
    const bool as_is = same_layout(params[i], momentum[i], grads[i]);
    const auto add = [&](const at::Tensor& x) { held.push_back(as_is ? x : x.contiguous()); };
    add(params[i]);
    add(momentum[i]);
    add(grads[i]);
    const at::Tensor* const triple = &held[held.size() - 3];
    tensors.push_back({triple[0].mutable_data_ptr<T>(), triple[1].mutable_data_ptr<T>(),
                       triple[2].const_data_ptr(), triple[0].numel()});
  }
  const dpk::StepResult result = dpk::sofim_step<T>(
      tensors.data(), static_cast<int64_t>(tensors.size()), step, dpk::torch_executor());
  for (size_t i = 0; result.applied && i < params.size(); ++i) {
    if (!held[3 * i].is_same(params[i])) params[i].copy_(held[3 * i]);
    if (!held[3 * i + 1].is_same(momentum[i])) momentum[i].copy_(held[3 * i + 1]);
  }
  return result;
}

at::Tensor sofim_step_(at::TensorList params, at::TensorList momentum, at::TensorList grads,
                       double beta, double rho, double lr) {
  TORCH_CHECK_VALUE(
      !params.empty() && params.size() == momentum.size() && params.size() == grads.size(),
      "params, momentum and grads must be lists of one length, at least 1");
  const at::ScalarType type = params[0].scalar_type(), grad_type = grads[0].scalar_type();
  TORCH_CHECK_VALUE(is_compiled_type(type), "params must be float32 or float64, got ", type);
  const double most =
      type == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  // False for NaN, too.
  TORCH_CHECK_VALUE(beta >= 0 && beta < 1 && rho > 0 && std::isfinite(rho) && lr >= 0 &&
                        std::isfinite(lr) && lr / rho <= most,
                    "beta must be in [0, 1), rho > 0, lr >= 0 and lr / rho a finite number");
  std::vector<at::Tensor> written;
  const auto add_written = [&written](const at::Tensor& x) {
    TORCH_CHECK_VALUE(!x.requires_grad() && (!x.is_inference() || c10::InferenceMode::is_enabled()),
                      "params and momentum must be writable: no grad, no inference tensors");
    written.push_back(x);
  };
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].is_cpu() && momentum[i].is_cpu() && grads[i].is_cpu() &&
                          params[i].scalar_type() == type && momentum[i].scalar_type() == type &&
                          grads[i].scalar_type() == grad_type &&
                          params[i].sizes() == momentum[i].sizes() &&
                          params[i].sizes() == grads[i].sizes(),
                      "params, momentum and grads must be CPU tensors that share shapes and dtype");
    add_written(params[i]);
    add_written(momentum[i]);
  }
  dpk::check_disjoint(written, grads);
  const dpk::Step step{beta, rho, lr, grad_dtype(type, grad_type)};
  const dpk::StepResult result = type == at::kDouble
                                     ? step_typed<double>(params, momentum, grads, step)
                                     : step_typed<float>(params, momentum, grads, step);
  at::Tensor out = at::empty({3}, at::kDouble);
  double* const values = out.mutable_data_ptr<double>();
  values[0] = result.momentum_dot_grad;
  values[1] = result.momentum_sq_norm;
  values[2] = result.applied ? 1.0 : 0.0;
  return out;
}

template <class T>
dpk::RankOneResult update_typed(const at::Tensor& inverse, const at::Tensor& u,
                                const std::optional<at::Tensor>& v, double tolerance) {
  const int64_t n = inverse.size(0);
  const at::Tensor workspace = at::empty({dpk::rank_one_workspace(n)}, inverse.scalar_type());
  return dpk::rank_one_inverse_update<T>(inverse.mutable_data_ptr<T>(), n, u.const_data_ptr<T>(),
                                         v ? v->const_data_ptr<T>() : nullptr, tolerance,
                                         workspace.mutable_data_ptr<T>(), dpk::torch_executor());
}

at::Tensor rank_one_inverse_update_(const at::Tensor& inverse, const at::Tensor& u,
                                    const std::optional<at::Tensor>& v, double tolerance) {
  const auto is_vector = [&](const at::Tensor& x) {
    return x.is_cpu() && x.dim() == 1 && x.size(0) == inverse.size(0) &&
           x.scalar_type() == inverse.scalar_type();
  };
  TORCH_CHECK_VALUE(inverse.is_cpu() && inverse.dim() == 2 && inverse.size(0) == inverse.size(1) &&
                        inverse.is_contiguous() && is_compiled_type(inverse.scalar_type()),
                    "inverse must be a contiguous [n, n] CPU tensor, float32 or float64");
  TORCH_CHECK_VALUE(is_vector(u) && (!v || is_vector(*v)),
                    "u and v must be [n] CPU tensors of the dtype of inverse");
  std::vector<at::Tensor> inputs{u.contiguous()};
  std::optional<at::Tensor> right;
  if (v) {
    right = v->contiguous();
    inputs.push_back(*right);
  }
  dpk::check_disjoint({inverse}, inputs);
  const dpk::RankOneResult result = inverse.scalar_type() == at::kDouble
                                        ? update_typed<double>(inverse, inputs[0], right, tolerance)
                                        : update_typed<float>(inverse, inputs[0], right, tolerance);
  at::Tensor out = at::empty({2}, at::kDouble);
  out.mutable_data_ptr<double>()[0] = result.denominator;
  out.mutable_data_ptr<double>()[1] = result.magnitude;
  return out;
}

// Rows with any distance; elements of a row are neighbours.
at::Tensor with_columns_adjacent(const at::Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

template <class T>
dpk::Window<T> window_of(const at::Tensor& rows) {
  return {rows.const_data_ptr<T>(), rows.stride(0), rows.size(0), rows.size(1)};
}

void check_window(const at::Tensor& window, const at::Tensor& g) {
  TORCH_CHECK_VALUE(window.is_cpu() && window.dim() == 2 && is_compiled_type(window.scalar_type()),
                    "window must be a [k, d] CPU tensor, float32 or float64");
  TORCH_CHECK_VALUE(g.is_cpu() && g.dim() == 1 && g.size(0) == window.size(1) &&
                        g.scalar_type() == window.scalar_type(),
                    "g must be a [d] CPU tensor of the window's dtype");
}

template <class T>
void gram_typed(const at::Tensor& u, const std::optional<at::Tensor>& v, const at::Tensor& g,
                const at::Tensor& products) {
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace = at::empty(
      {dpk::window_gram_workspace(u.size(0), u.size(1), !v.has_value(), executor)}, at::kDouble);
  dpk::window_gram<T>(window_of<T>(u), v ? v->const_data_ptr<T>() : nullptr, v ? v->stride(0) : 0,
                      g.const_data_ptr<T>(), products.mutable_data_ptr<double>(),
                      workspace.mutable_data_ptr<double>(), executor);
}

at::Tensor window_gram(const at::Tensor& u, const std::optional<at::Tensor>& v,
                       const at::Tensor& g) {
  check_window(u, g);
  TORCH_CHECK_VALUE(
      !v || (v->is_cpu() && v->sizes() == u.sizes() && v->scalar_type() == u.scalar_type()),
      "v must be a CPU tensor of the shape and dtype of u");
  const at::Tensor rows = with_columns_adjacent(u), vector = g.contiguous();
  std::optional<at::Tensor> left;
  if (v) left = with_columns_adjacent(*v);
  at::Tensor products = at::empty({u.size(0), u.size(0) + 1}, at::kDouble);
  if (u.scalar_type() == at::kDouble) {
    gram_typed<double>(rows, left, vector, products);
  } else {
    gram_typed<float>(rows, left, vector, products);
  }
  return products;
}

at::Tensor window_project(const at::Tensor& window, const at::Tensor& g) {
  check_window(window, g);
  const at::Tensor rows = with_columns_adjacent(window), vector = g.contiguous();
  at::Tensor products = at::empty({window.size(0)}, at::kDouble);
  double* const out = products.mutable_data_ptr<double>();
  const dpk::Executor executor = dpk::torch_executor();
  if (window.scalar_type() == at::kDouble) {
    dpk::window_project(window_of<double>(rows), vector.const_data_ptr<double>(), out, executor);
  } else {
    dpk::window_project(window_of<float>(rows), vector.const_data_ptr<float>(), out, executor);
  }
  return products;
}

void window_combine_(const at::Tensor& out, const at::Tensor& window, const at::Tensor& g,
                     const at::Tensor& weights, double scale) {
  check_window(window, g);
  TORCH_CHECK_VALUE(weights.is_cpu() && weights.dim() == 1 && weights.size(0) == window.size(0) &&
                        weights.scalar_type() == at::kDouble,
                    "weights must be a [k] float64 CPU tensor");
  TORCH_CHECK_VALUE(out.is_cpu() && out.is_contiguous() && out.sizes() == g.sizes() &&
                        out.scalar_type() == g.scalar_type(),
                    "out must be a contiguous [d] CPU tensor of the dtype of g");
  const at::Tensor rows = with_columns_adjacent(window), vector = g.contiguous();
  const at::Tensor factors = weights.contiguous();
  dpk::check_disjoint({out}, {rows, vector, factors});
  const double* const y = factors.const_data_ptr<double>();
  const dpk::Executor executor = dpk::torch_executor();
  if (window.scalar_type() == at::kDouble) {
    dpk::window_combine(window_of<double>(rows), vector.const_data_ptr<double>(), y, scale,
                        out.mutable_data_ptr<double>(), executor);
  } else {
    dpk::window_combine(window_of<float>(rows), vector.const_data_ptr<float>(), y, scale,
                        out.mutable_data_ptr<float>(), executor);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("sofim_step_", sofim_step_);
  m.impl("rank_one_inverse_update_", rank_one_inverse_update_);
  m.impl("window_gram", window_gram);
  m.impl("window_project", window_project);
  m.impl("window_combine_", window_combine_);
}
