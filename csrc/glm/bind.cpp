// dpkernels::glm_* on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "glm/glm.h"

namespace {

void check_float(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_cpu() &&
                        (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble),
                    name, " must be a float32 or float64 CPU tensor, got ", tensor.scalar_type());
}

at::Tensor checked_indices(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == at::kLong, name,
                    " must be an int64 CPU tensor, got ", tensor.scalar_type());
  return tensor.contiguous();
}

// The records as the kernels take them; keeps the tensors (or their copies) alive.
struct Records {
  at::Tensor x, labels, spans, theta;

  Records(const at::Tensor& features, const at::Tensor* given_labels, const at::Tensor& given_spans,
          const at::Tensor* weights)
      : spans(checked_indices(given_spans, "spans")) {
    check_float(features, "x");
    TORCH_CHECK_VALUE(features.dim() == 2, "x must be [N, d]");
    x = features.size(1) <= 1 || features.stride(1) == 1 ? features : features.contiguous();
    TORCH_CHECK_VALUE(spans.dim() == 2 && spans.size(1) == 2, "spans must be [clients, 2]");
    const int64_t* const rows = spans.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < spans.size(0); ++i) {
      TORCH_CHECK_VALUE(
          0 <= rows[2 * i] && rows[2 * i] <= rows[2 * i + 1] && rows[2 * i + 1] <= x.size(0),
          "spans must be ranges of rows of x; client ", i, " has ", rows[2 * i], " to ",
          rows[2 * i + 1], " of ", x.size(0));
    }
    if (given_labels != nullptr) {
      labels = checked_indices(*given_labels, "labels");
      TORCH_CHECK_VALUE(labels.dim() == 1 && labels.size(0) == x.size(0), "labels must be [N]");
    }
    if (weights != nullptr) {
      TORCH_CHECK_VALUE(weights->is_cpu() && weights->scalar_type() == x.scalar_type() &&
                            weights->dim() == 3 &&
                            (weights->size(0) == 1 || weights->size(0) == spans.size(0)) &&
                            weights->size(2) == x.size(1) && weights->size(1) > 0,
                        "theta must be [1 or clients, C, d] with C > 0, of the dtype of x");
      theta = weights->contiguous();
    }
  }

  template <class T>
  dpk::ClientRecords<T> view() const {
    const int64_t classes = theta.defined() ? theta.size(1) : 0;
    return {x.const_data_ptr<T>(),
            x.stride(0),
            x.size(0),
            x.size(1),
            labels.defined() ? labels.const_data_ptr<int64_t>() : nullptr,
            spans.const_data_ptr<int64_t>(),
            spans.size(0),
            theta.defined() ? theta.const_data_ptr<T>() : nullptr,
            theta.defined() && theta.size(0) > 1 ? classes * x.size(1) : 0,
            classes};
  }

  int64_t clients() const { return spans.size(0); }
  at::Tensor per_record() const { return at::empty({x.size(0)}, at::kDouble); }
};

// Calls body(T()) with the type of the tensor's elements.
template <class Body>
void with_type(const at::Tensor& tensor, Body&& body) {
  if (tensor.scalar_type() == at::kDouble) {
    body(double());
  } else {
    body(float());
  }
}

// Right-hand sides and damping of all clients.
struct Systems {
  at::Tensor v, gammas;

  Systems(const at::Tensor& given_v, const at::Tensor& given_gammas, at::ScalarType type,
          at::IntArrayRef shape)
      : v(given_v.contiguous()), gammas(given_gammas.contiguous()) {
    TORCH_CHECK_VALUE(v.is_cpu() && v.scalar_type() == type && v.sizes() == shape,
                      "v must have the shape ", shape, " and the other tensors' dtype");
    TORCH_CHECK_VALUE(gammas.is_cpu() && gammas.scalar_type() == at::kDouble && gammas.dim() == 1 &&
                          gammas.size(0) == shape[0],
                      "gammas must be [clients] float64");
  }
};

std::tuple<at::Tensor, at::Tensor> glm_record_norms(const at::Tensor& x, const at::Tensor& labels,
                                                    const at::Tensor& spans, int64_t /*most*/,
                                                    const at::Tensor& theta) {
  const Records records(x, &labels, spans, &theta);
  at::Tensor gradient = records.per_record(), hessian = records.per_record();
  with_type(x, [&](auto element) {
    dpk::glm_record_norms(records.view<decltype(element)>(), gradient.mutable_data_ptr<double>(),
                          hessian.mutable_data_ptr<double>(), dpk::torch_executor());
  });
  return {gradient, hessian};
}

// Where a sum goes: null if there is no buffer for it.
template <class T>
T* data_of(const std::optional<at::Tensor>& sums) {
  return sums ? sums->mutable_data_ptr<T>() : nullptr;
}

std::tuple<at::Tensor, at::Tensor> glm_clipped_sums_(const std::optional<at::Tensor>& gradients,
                                                     const std::optional<at::Tensor>& hessians,
                                                     const at::Tensor& x, const at::Tensor& labels,
                                                     const at::Tensor& spans, int64_t /*most*/,
                                                     const at::Tensor& theta, double gradient_bound,
                                                     double hessian_bound) {
  const Records records(x, &labels, spans, &theta);
  const int64_t classes = theta.size(1), features = x.size(1), n = classes * features;
  std::vector<at::Tensor> outs;
  const auto add_out = [&](const std::optional<at::Tensor>& sums, at::IntArrayRef sizes) {
    if (!sums) return;
    TORCH_CHECK_VALUE(sums->is_cpu() && sums->is_contiguous() && sums->sizes() == sizes &&
                          sums->scalar_type() == x.scalar_type(),
                      "gradients and hessians must be contiguous [clients, C, d] and [clients, "
                      "C d, C d] CPU tensors of the dtype of x");
    outs.push_back(*sums);
  };
  add_out(gradients, {records.clients(), classes, features});
  add_out(hessians, {records.clients(), n, n});
  dpk::check_disjoint(outs, {x, labels, spans, theta});
  const auto norms_of = [&](const std::optional<at::Tensor>& sums) {
    return sums ? records.per_record() : at::empty({0}, at::kDouble);
  };
  at::Tensor gradient_norms = norms_of(gradients), hessian_norms = norms_of(hessians);
  with_type(x, [&](auto element) {
    using T = decltype(element);
    const dpk::ClippedSums<T> sums{gradient_bound,
                                   hessian_bound,
                                   data_of<T>(gradients),
                                   data_of<T>(hessians),
                                   gradient_norms.mutable_data_ptr<double>(),
                                   hessian_norms.mutable_data_ptr<double>()};
    dpk::glm_clipped_sums(records.view<T>(), sums, dpk::torch_executor());
  });
  return {gradient_norms, hessian_norms};
}

std::tuple<at::Tensor, at::Tensor> glm_feature_covariance(const at::Tensor& x,
                                                          const at::Tensor& spans, int64_t /*most*/,
                                                          double bound) {
  const Records records(x, nullptr, spans, nullptr);
  at::Tensor sums = at::empty({records.clients(), x.size(1), x.size(1)}, x.scalar_type());
  at::Tensor sq_norms = records.per_record();
  with_type(x, [&](auto element) {
    using T = decltype(element);
    dpk::glm_feature_covariance(records.view<T>(), bound, sums.mutable_data_ptr<T>(),
                                sq_norms.mutable_data_ptr<double>(), dpk::torch_executor());
  });
  return {sums, sq_norms};
}

std::tuple<at::Tensor, at::Tensor> glm_solve(const at::Tensor& hessians, const at::Tensor& v,
                                             const at::Tensor& gammas) {
  check_float(hessians, "hessians");
  TORCH_CHECK_VALUE(hessians.dim() == 3 && hessians.size(1) == hessians.size(2),
                    "hessians must be [clients, n, n]");
  const int64_t clients = hessians.size(0), n = hessians.size(1);
  const at::Tensor matrices = hessians.contiguous();
  const Systems systems(v, gammas, hessians.scalar_type(), {clients, n});
  at::Tensor solutions = at::empty({clients, n}, hessians.scalar_type());
  at::Tensor failed = at::empty({clients}, at::kLong);
  with_type(hessians, [&](auto element) {
    using T = decltype(element);
    dpk::glm_solve(matrices.const_data_ptr<T>(), clients, n, systems.v.const_data_ptr<T>(),
                   systems.gammas.const_data_ptr<double>(), solutions.mutable_data_ptr<T>(),
                   failed.mutable_data_ptr<int64_t>(), dpk::torch_executor());
  });
  return {solutions, failed};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> glm_newton(const at::Tensor& x,
                                                          const at::Tensor& spans, int64_t /*most*/,
                                                          const at::Tensor& theta,
                                                          double hessian_bound, const at::Tensor& v,
                                                          const at::Tensor& gammas) {
  const Records records(x, nullptr, spans, &theta);
  const int64_t clients = records.clients();
  const Systems systems(v, gammas, x.scalar_type(), {clients, theta.size(1), x.size(1)});
  at::Tensor solutions = at::empty(systems.v.sizes(), x.scalar_type());
  at::Tensor failed = at::empty({clients}, at::kLong), norms = records.per_record();
  with_type(x, [&](auto element) {
    using T = decltype(element);
    dpk::glm_newton(records.view<T>(), hessian_bound, systems.v.const_data_ptr<T>(),
                    systems.gammas.const_data_ptr<double>(), solutions.mutable_data_ptr<T>(),
                    failed.mutable_data_ptr<int64_t>(), norms.mutable_data_ptr<double>(),
                    dpk::torch_executor());
  });
  return {solutions, failed, norms};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> glm_newton_cg(
    const at::Tensor& x, const at::Tensor& spans, int64_t /*most*/, const at::Tensor& theta,
    double hessian_bound, const at::Tensor& v, const at::Tensor& gammas, double tolerance,
    int64_t max_iterations) {
  const Records records(x, nullptr, spans, &theta);
  const int64_t clients = records.clients();
  const Systems systems(v, gammas, x.scalar_type(), {clients, theta.size(1), x.size(1)});
  at::Tensor solutions = at::empty(systems.v.sizes(), x.scalar_type());
  at::Tensor iterations = at::empty({clients}, at::kLong);
  at::Tensor residuals = at::empty({clients}, at::kDouble), norms = records.per_record();
  with_type(x, [&](auto element) {
    using T = decltype(element);
    dpk::glm_newton_cg(records.view<T>(), hessian_bound, systems.v.const_data_ptr<T>(),
                       systems.gammas.const_data_ptr<double>(), {tolerance, max_iterations},
                       solutions.mutable_data_ptr<T>(), iterations.mutable_data_ptr<int64_t>(),
                       residuals.mutable_data_ptr<double>(), norms.mutable_data_ptr<double>(),
                       dpk::torch_executor());
  });
  return {solutions, iterations, residuals, norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("glm_record_norms", glm_record_norms);
  m.impl("glm_clipped_sums_", glm_clipped_sums_);
  m.impl("glm_feature_covariance", glm_feature_covariance);
  m.impl("glm_solve", glm_solve);
  m.impl("glm_newton", glm_newton);
  m.impl("glm_newton_cg", glm_newton_cg);
}
