// dpkernels::eigh on CUDA tensors. Empty in builds without CUDA.
#if defined(DPKERNELS_CUDA_VERSION)

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_eigh.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
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
                      is == dpk::EighStatus::not_finite ? " has NaN or Inf" : " is not symmetric");
  }
}

// Sizes past the kernel's go to PyTorch's solver, which checks and scales nothing by itself.
std::tuple<at::Tensor, at::Tensor> eigh_of_large(const at::Tensor& x, size_t index) {
  const at::Tensor largest = x.abs().amax({1, 2}, true);
  const at::Tensor difference = (x - x.mT()).abs().amax({1, 2}, true);
  const at::Tensor wrong = difference.gt(largest * dpk::kAsymmetry);
  const at::Tensor status = largest.isfinite().logical_not().to(at::kInt) *
                                static_cast<int>(dpk::EighStatus::not_finite) +
                            wrong.to(at::kInt) * static_cast<int>(dpk::EighStatus::asymmetric);
  check_status(status.flatten(), index, x.size(1));
  const at::Tensor scale =
      largest.clamp_min(std::numeric_limits<float>::min()).log2().ceil().exp2();
  const at::Tensor scaled = x / scale;
  auto [values, vectors] = at::linalg_eigh((scaled + scaled.mT()) / 2);
  return {values * scale.squeeze(-1), vectors.mT().contiguous().mT()};
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> eigh(at::TensorList matrices,
                                                                  c10::string_view method) {
  TORCH_CHECK_VALUE(method == "auto" || method == "jacobi",
                    "eigh: method must be auto or jacobi on CUDA tensors, got ", method);
  std::vector<at::Tensor> values, vectors;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const at::Tensor x = matrices[i].contiguous();
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t n = x.size(1);
    if (n > dpk::kLargestCudaEigh) {
      TORCH_CHECK_VALUE(method == "auto", "eigh: method jacobi takes matrices up to ",
                        dpk::kLargestCudaEigh, " on CUDA tensors, got ", n);
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
    TORCH_CHECK(error == 0, "eigh: the CUDA kernel did not start, error ", error);
    check_status(status, i, n);
    values.push_back(value);
    vectors.push_back(rows.mT());
  }
  return {values, vectors};
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CUDA, m) { m.impl("eigh", eigh); }

#endif
