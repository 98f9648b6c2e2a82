// dpkernels::tsvd_soft_threshold, tsvd_shrink and tsvd_singular_values on CPU tensors.
//
// Friendly messages come from the Python functions; the checks here keep a direct call of the
// operators from reading or writing memory that is not theirs. Only the content of the tensors is
// judged here alone.
#include <ATen/core/Tensor.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/real.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "common/torch_executor.h"
#include "tsvd/tsvd.h"

namespace {

using TensorVector = std::vector<at::Tensor>;

// The layers as the kernels take them, with the memory that they need.
struct Layers {
  TensorVector tensors, planes, operators, values;
  std::vector<std::vector<dpk::SliceResult>> results;
  std::vector<std::vector<dpk::ShrinkCurve>> curves;
  std::vector<dpk::ClientTensor> layers;

  explicit Layers(at::TensorList given) : results(given.size()) {
    for (size_t l = 0; l < given.size(); ++l) {
      const at::Tensor& x = given[l];
      TORCH_CHECK_VALUE(
          x.is_cpu() && x.dim() == 3 && x.numel() > 0 && x.scalar_type() == at::kFloat,
          "tensors must be [d, h, K] float32 CPU tensors without empty dimensions; "
          "the reference takes float64");
      tensors.push_back(x);
      dpk::ClientTensor layer{};
      layer.x = x.const_data_ptr<float>();
      layer.x_strides = strides_of(x);
      layer.rows = std::max(x.size(0), x.size(1));
      layer.cols = std::min(x.size(0), x.size(1));
      layer.clients = x.size(2);
      planes.push_back(at::empty({layer.slices(), layer.rows, 2 * layer.cols}, at::kFloat));
      layer.planes = planes.back().mutable_data_ptr<float>();
      results[l].resize(layer.slices());
      layer.results = results[l].data();
      layers.push_back(layer);
    }
  }
  Layers(const Layers&) = delete;

  int64_t count() const { return static_cast<int64_t>(layers.size()); }

  // The kernels' rows are the longer of the first two dimensions.
  static dpk::ClientStrides strides_of(const at::Tensor& x) {
    const bool tall = x.size(0) >= x.size(1);
    return {x.stride(tall ? 0 : 1), x.stride(tall ? 1 : 0), x.stride(2)};
  }

  // A tensor, not a vector: torch reuses the memory from one call to the next.
  at::Tensor workspace(const dpk::Executor& executor) const {
    const int64_t bytes = dpk::tsvd_workspace_bytes(layers.data(), count(), executor);
    return at::empty({bytes / static_cast<int64_t>(sizeof(double))}, at::kDouble);
  }

  void transform(const char* op, const at::Tensor& workspace, const dpk::Executor& executor) {
    const int64_t bad =
        dpk::transform_clients(layers.data(), count(), workspace.mutable_data_ptr(), executor);
    TORCH_CHECK_VALUE(bad < 0, op, ": tensors[", bad,
                      "] has values that are not finite, or whose sum over the clients is not; "
                      "drop that client's upload");
  }

  // Slice s of layer l as a matrix.
  at::Tensor slice(size_t l, int64_t s) const {
    const at::Tensor plane = planes[l].select(0, s);
    const int64_t cols = layers[l].cols;
    const at::Tensor re = plane.narrow(1, 0, cols);
    return layers[l].slice_is_real(s) ? re : at::complex(re, plane.narrow(1, cols, cols));
  }

  template <class Replace>
  void replace_where_needed(Replace&& replace) {
    for (size_t l = 0; l < layers.size(); ++l) {
      for (int64_t s = 0; s < layers[l].slices(); ++s) {
        if (results[l][s].outcome == dpk::Outcome::needs_svd) replace(l, s);
      }
    }
  }
};

// Shrinks slice s of layer l in place by its SVD.
void shrink_by_svd(Layers& layers, size_t l, int64_t s) {
  const dpk::ShrinkCurve& curve = layers.curves[l][s];
  const int64_t cols = layers.layers[l].cols;
  const auto [u, values, vh] = at::linalg_svd(layers.slice(l, s), /*full_matrices=*/false);
  at::Tensor shrunk = values.clone();
  int64_t kept = 0;
  for (int64_t k = 0; k < cols; ++k) {
    float& value = shrunk.mutable_data_ptr<float>()[k];
    kept += value > curve.cut;
    value = static_cast<float>(value * curve.factor(value));
  }
  const at::Tensor product = u.mul(shrunk).matmul(vh);
  at::Tensor plane = layers.planes[l].select(0, s);
  if (product.is_complex()) {
    plane.narrow(1, 0, cols).copy_(at::real(product));
    plane.narrow(1, cols, cols).copy_(at::imag(product));
  } else {
    plane.narrow(1, 0, cols).copy_(product);
  }
  layers.results[l][s] = {dpk::Outcome::replaced, kept};
}

// Shrinks the layers by their curves. op: named where a value is not finite.
std::tuple<TensorVector, TensorVector> shrink_layers(const char* op, Layers& layers) {
  TensorVector outs, kept;
  for (size_t l = 0; l < layers.layers.size(); ++l) {
    dpk::ClientTensor& layer = layers.layers[l];
    layer.curves = layers.curves[l].data();
    layers.operators.push_back(
        at::empty({layer.slices(), 2 * layer.cols, 2 * layer.cols}, at::kFloat));
    layer.operators = layers.operators.back().mutable_data_ptr<float>();
    outs.push_back(at::empty_like(layers.tensors[l]));
    layer.out = outs.back().mutable_data_ptr<float>();
    layer.out_strides = Layers::strides_of(outs.back());
  }
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace = layers.workspace(executor);
  layers.transform(op, workspace, executor);
  dpk::shrink_operators(layers.layers.data(), layers.count(), workspace.mutable_data_ptr(),
                        executor);
  layers.replace_where_needed([&](size_t l, int64_t s) { shrink_by_svd(layers, l, s); });
  dpk::transform_back(layers.layers.data(), layers.count(), workspace.mutable_data_ptr(), executor);
  for (const std::vector<dpk::SliceResult>& results : layers.results) {
    at::Tensor counts = at::empty({static_cast<int64_t>(results.size())}, at::kLong);
    for (size_t s = 0; s < results.size(); ++s) {
      counts.mutable_data_ptr<int64_t>()[s] = results[s].kept;
    }
    kept.push_back(counts);
  }
  return {outs, kept};
}

std::tuple<TensorVector, TensorVector> soft_threshold(at::TensorList tensors,
                                                      at::ArrayRef<double> thresholds) {
  TORCH_CHECK_VALUE(tensors.size() == thresholds.size(),
                    "thresholds must have one number for each of tensors");
  Layers layers(tensors);
  for (size_t l = 0; l < tensors.size(); ++l) {
    const double tau = thresholds[l];
    TORCH_CHECK_VALUE(tau > 0, "thresholds must be > 0");
    layers.curves.emplace_back(layers.layers[l].slices(), dpk::ShrinkCurve{tau, tau, 0.0, 0.0});
  }
  return shrink_layers("soft_threshold", layers);
}

// curves: cut, subtracted, upper and lower of every slice of every tensor.
std::tuple<TensorVector, TensorVector> shrink(at::TensorList tensors, at::ArrayRef<double> curves) {
  Layers layers(tensors);
  const double* next = curves.begin();
  for (const dpk::ClientTensor& layer : layers.layers) {
    std::vector<dpk::ShrinkCurve>& of_layer = layers.curves.emplace_back();
    TORCH_CHECK_VALUE(curves.end() - next >= 4 * layer.slices(),
                      "curves must have 4 numbers for each slice of tensors");
    for (int64_t s = 0; s < layer.slices(); ++s, next += 4) {
      const dpk::ShrinkCurve curve{next[0], next[1], next[2], next[3]};
      TORCH_CHECK_VALUE(std::isfinite(curve.cut) && curve.subtracted >= 0 && curve.lower >= 0 &&
                            curve.cut >= curve.subtracted && curve.cut >= curve.upper &&
                            curve.upper >= curve.lower,
                        "curves must have cut >= subtracted >= 0 and cut >= upper >= lower >= 0");
      of_layer.push_back(curve);
    }
  }
  TORCH_CHECK_VALUE(next == curves.end(), "curves must have 4 numbers for each slice of tensors");
  return shrink_layers("shrink", layers);
}

TensorVector singular_values(at::TensorList tensors) {
  Layers layers(tensors);
  for (dpk::ClientTensor& layer : layers.layers) {
    layers.values.push_back(at::empty({layer.slices(), layer.cols}, at::kFloat));
    layer.values = layers.values.back().mutable_data_ptr<float>();
  }
  const dpk::Executor executor = dpk::torch_executor();
  const at::Tensor workspace = layers.workspace(executor);
  layers.transform("singular_values", workspace, executor);
  dpk::slice_singular_values(layers.layers.data(), layers.count(), workspace.mutable_data_ptr(),
                             executor);
  layers.replace_where_needed([&](size_t l, int64_t s) {
    layers.values[l].select(0, s).copy_(at::linalg_svdvals(layers.slice(l, s)));
  });
  return layers.values;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("tsvd_soft_threshold", soft_threshold);
  m.impl("tsvd_shrink", shrink);
  m.impl("tsvd_singular_values", singular_values);
}
