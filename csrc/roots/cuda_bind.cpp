// dpkernels::eigh on CUDA tensors. Empty in builds without CUDA.
#if defined(DPKERNELS_CUDA_VERSION)

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/ones_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "roots/cuda.h"
#include "roots/roots.h"

namespace {

template <class T>
int launch(const at::Tensor& x, at::Tensor& values, at::Tensor& rows, at::Tensor& status) {
  return dpk::launch_eigh<T>(x.const_data_ptr<T>(), x.size(0), static_cast<int>(x.size(1)),
                             dpk::kAsymmetry, values.mutable_data_ptr<T>(),
                             rows.mutable_data_ptr<T>(),
                             reinterpret_cast<dpk::EighStatus*>(status.mutable_data_ptr<int32_t>()),
                             c10::cuda::getCurrentCUDAStream().stream());
}

int code(dpk::EighStatus status) { return static_cast<int>(status); }

void check_status(const at::Tensor& status, size_t index, int64_t n) {
  const at::Tensor found = status.cpu();
  const int32_t* const each = found.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < found.numel(); ++b) {
    const auto is = static_cast<dpk::EighStatus>(each[b]);
    if (is == dpk::EighStatus::done) continue;
    TORCH_CHECK(is != dpk::EighStatus::not_converged, "eigh: the eigenvalues of matrix ", index,
                " of the list (number ", b, " of its batch, ", n, " x ", n, ") did not converge");
    TORCH_CHECK_VALUE(false, "eigh: matrix ", index, " of the list (number ", b, " of its batch, ",
                      n, " x ", n, ")",
                      is == dpk::EighStatus::not_finite
                          ? " has NaN or Inf"
                          : " is not symmetric; pass (A + A^T) / 2 if that is what you mean");
  }
}

// Sizes past the kernel's go to PyTorch's solver, which neither checks nor scales anything.
std::tuple<at::Tensor, at::Tensor> eigh_of_large(const at::Tensor& x, size_t index) {
  const at::Tensor largest = x.abs().amax({1, 2}, true).to(at::kDouble);
  const at::Tensor exponent = std::get<1>(at::frexp(largest)).clamp_min(-1022);
  const at::Tensor scale = at::ones_like(largest).ldexp(exponent.neg());
  const at::Tensor scaled = x.to(at::kDouble).mul(scale);
  const at::Tensor difference = scaled.sub(scaled.mT()).abs().amax({1, 2}, true);
  // A comparison with NaN is false, so that a matrix is wrong in one way only.
  const at::Tensor wrong = difference.gt(largest.mul(scale).mul(dpk::kAsymmetry));
  const at::Tensor status = largest.isfinite()
                                .logical_not()
                                .to(at::kInt)
                                .mul(code(dpk::EighStatus::not_finite))
                                .add(wrong.to(at::kInt).mul(code(dpk::EighStatus::asymmetric)));
  check_status(status.flatten(), index, x.size(1));
  const at::Tensor symmetric = scaled.add(scaled.mT()).div(2).to(x.scalar_type());
  const auto [values, vectors] = at::linalg_eigh(symmetric);
  return {values.div(scale.squeeze(-1)).to(x.scalar_type()), vectors.mT().contiguous().mT()};
}

void check_list(at::TensorList matrices) {
  for (const at::Tensor& x : matrices) {
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(1) == x.size(2),
                      "eigh: matrices must be [b, n, n], got ", x.sizes());
    TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble,
                      "eigh: matrices must be float32 or float64, got ", x.scalar_type());
    TORCH_CHECK_VALUE(
        x.scalar_type() == matrices[0].scalar_type() && x.device() == matrices[0].device(),
        "eigh: matrices must share one dtype and one device");
  }
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList matrices,
                                                                  c10::string_view method) {
  TORCH_CHECK_VALUE(method == "auto" || method == "jacobi",
                    "eigh: method must be auto or jacobi on CUDA tensors, got ", method);
  check_list(matrices);
  std::vector<at::Tensor> values, vectors, statuses;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const at::Tensor x = matrices[i].contiguous();
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t n = x.size(1);
    statuses.emplace_back();
    if (n > dpk::kLargestCudaEigh) {
      TORCH_CHECK_VALUE(method == "auto", "eigh: method jacobi takes matrices up to ",
                        dpk::kLargestCudaEigh, " on CUDA tensors, got ", n, "; use auto");
      auto [large_values, large_vectors] = eigh_of_large(x, i);
      values.push_back(large_values);
      vectors.push_back(large_vectors);
      continue;
    }
    at::Tensor value = at::empty({x.size(0), n}, x.options());
    at::Tensor rows = at::empty(x.sizes(), x.options());
    at::Tensor status = at::empty({n == 0 ? 0 : x.size(0)}, x.options().dtype(at::kInt));
    const int error = x.scalar_type() == at::kDouble ? launch<double>(x, value, rows, status)
                                                     : launch<float>(x, value, rows, status);
    TORCH_CHECK(error == 0, "eigh: the CUDA kernel did not start: ",
                cudaGetErrorString(static_cast<cudaError_t>(error)), " (CUDA error ", error, ")");
    values.push_back(value);
    vectors.push_back(rows.mT());
    statuses.back() = status;
  }
  // Reading one waits for the GPU: only after everything has been launched.
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (statuses[i].defined()) check_status(statuses[i], i, matrices[i].size(1));
  }
  return {values, vectors};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CUDA, m) { m.impl("eigh", eigh); }

#endif
