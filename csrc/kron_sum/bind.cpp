// dpkernels::kron_sum_ on CPU tensors.
//
// Friendly messages come from the Python function. The operator refuses whatever that one refuses,
// which relies on it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "kron_sum/kron_sum.h"

namespace {

// The layers as the kernel takes them; keeps contiguous tensors alive.
template <class T>
struct Layers {
  std::vector<at::Tensor> held;
  std::vector<dpk::KronSumLayer<T>> layers;

  const T* hold(const at::Tensor& tensor) {
    held.push_back(tensor.contiguous());
    return held.back().template const_data_ptr<T>();
  }

  void add(const at::Tensor& out, const at::Tensor& g, const at::Tensor& a, const at::Tensor& x,
           const at::Tensor* center) {
    layers.push_back({hold(g), hold(a), hold(x), center == nullptr ? nullptr : hold(*center),
                      out.template mutable_data_ptr<T>(), g.size(0), x.size(0), x.size(1)});
  }
};

template <class T>
void run(at::TensorList out, at::TensorList gs, at::TensorList as, at::TensorList xs,
         at::TensorList centers, bool accumulate) {
  Layers<T> layers;
  for (size_t l = 0; l < out.size(); ++l) {
    layers.add(out[l], gs[l], as[l], xs[l], centers.empty() ? nullptr : &centers[l]);
  }
  const int64_t count = static_cast<int64_t>(out.size());
  const dpk::Executor executor = dpk::torch_executor();
  const int64_t bytes = dpk::kron_sum_workspace_bytes(layers.layers.data(), count, executor);
  const at::Tensor workspace = at::empty({bytes / 8 + 1}, at::kDouble);
  dpk::kron_sum(layers.layers.data(), count, accumulate, workspace.mutable_data_ptr(), executor);
}

void check(at::TensorList out, at::TensorList gs, at::TensorList as, at::TensorList xs,
           at::TensorList centers) {
  TORCH_CHECK_VALUE(gs.size() == out.size() && as.size() == out.size() && xs.size() == out.size() &&
                        (centers.empty() || centers.size() == out.size()),
                    "kron_sum_: all lists must have one tensor for each layer");
  const at::ScalarType type = out[0].scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble,
                    "kron_sum_: out must be float32 or float64");
  std::vector<at::Tensor> inputs;
  for (at::TensorList list : {gs, as, xs, centers}) {
    inputs.insert(inputs.end(), list.begin(), list.end());
  }
  for (const at::Tensor& tensor : inputs) {
    TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == type,
                      "kron_sum_: all tensors must be on the CPU and of one dtype");
  }
  for (size_t l = 0; l < out.size(); ++l) {
    const at::Tensor &x = xs[l], &g = gs[l], &a = as[l];
    TORCH_CHECK_VALUE(
        !out[l].requires_grad() && (!out[l].is_inference() || c10::InferenceMode::is_enabled()),
        "kron_sum_: out must be writable: no grad, no inference tensors");
    TORCH_CHECK_VALUE(x.dim() == 2 && g.dim() == 3 && a.dim() == 3,
                      "kron_sum_: gs and as must be [n, ., .] and xs [O, I]");
    const int64_t n = g.size(0), rows = x.size(0), cols = x.size(1);
    TORCH_CHECK_VALUE(
        g.sizes() == at::IntArrayRef({n, rows, rows}) &&
            a.sizes() == at::IntArrayRef({n, cols, cols}) &&
            (centers.empty() || centers[l].sizes() == at::IntArrayRef({n, rows, cols})) &&
            out[l].sizes() == x.sizes() && out[l].is_contiguous() && out[l].is_cpu() &&
            out[l].scalar_type() == type,
        "kron_sum_: for xs [O, I], gs must be [n, O, O], as [n, I, I], centers [n, O, I] and out "
        "contiguous [O, I]");
  }
  dpk::check_disjoint(out, inputs);
}

void kron_sum_(at::TensorList out, at::TensorList gs, at::TensorList as, at::TensorList xs,
               at::TensorList centers, bool accumulate) {
  if (out.empty()) return;
  check(out, gs, as, xs, centers);
  if (out[0].scalar_type() == at::kDouble) {
    run<double>(out, gs, as, xs, centers, accumulate);
  } else {
    run<float>(out, gs, as, xs, centers, accumulate);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("kron_sum_", kron_sum_); }
