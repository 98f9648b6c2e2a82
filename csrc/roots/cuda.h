// Launch of the CUDA eigensolver (cuda.cu). The stream is passed as void*, so that whoever includes
// this needs no CUDA headers.
#pragma once

#include <cstdint>

namespace dpk {

// What a block found about its matrix.
enum class EighStatus : int32_t { done, not_finite, asymmetric, not_converged };

// Matrices up to this size fit in the shared memory of every GPU since compute capability 8.0,
// vectors and all: 2 * 64 * 65 float64 are 65 KiB of 99 or more.
constexpr int kLargestCudaEigh = 64;

// Eigenvalues, ascending, [batch, n], and eigenvectors, as rows, [batch, n, n], of matrices
// [batch, n, n] on the device, n <= kLargestCudaEigh; status is [batch]. T is float or double.
// `asymmetry` is the largest |a_ij - a_ji| that is taken, relative to the largest element.
// Returns the error of the launch as CUDA numbers it, 0 for none.
template <class T>
int launch_eigh(const T* matrices, int64_t batch, int n, double asymmetry, T* values, T* vectors,
                EighStatus* status, void* stream);

}  // namespace dpk
