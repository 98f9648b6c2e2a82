// Batched eigensolver for small symmetric matrices: one block for each, Jacobi in shared memory.
#include <cfloat>

#include "roots/cuda.h"
#include "roots/jacobi.h"
#include "roots/scale.h"

namespace dpk {
namespace {

// A round of a 64 x 64 matrix has 32 x 64 pairs of elements to rotate, 8 for each of 256 threads,
// and a sweep has 189 barriers, where more threads would wait for each other. Not measured: no GPU
// was at hand.
constexpr int kThreads = 256;

template <class T>
__device__ T largest_of_block(T value, T* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = fmax(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  T largest = shared[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = fmax(largest, shared[warp]);
  __syncthreads();
  return largest;
}

// x.a = scale (A + A^T) / 2, x.vectors = I; returns what is wrong with A.
template <class T>
__device__ EighStatus load_matrix(const T* from, double tolerance, const JacobiProblem<T>& x,
                                  T* shared, double& scale) {
  T largest = 0, asymmetry = 0;
  int finite = 1;
  for (int item = threadIdx.x; item < x.n * x.n; item += kThreads) {
    const int i = item / x.n, j = item % x.n;
    const T value = from[item], mirrored = from[j * x.n + i];
    finite &= fabs(value) <= (sizeof(T) == 4 ? T(FLT_MAX) : T(DBL_MAX));
    largest = fmax(largest, fabs(value));
    // Halves: the difference of two large numbers may overflow.
    asymmetry = fmax(asymmetry, fabs(value / 2 - mirrored / 2));
  }
  if (!__syncthreads_and(finite)) return EighStatus::not_finite;
  largest = largest_of_block(largest, shared);
  asymmetry = largest_of_block(asymmetry, shared);
  if (2 * double(asymmetry) > tolerance * double(largest)) return EighStatus::asymmetric;
  scale = power_of_two_scale(double(largest));
  for (int item = threadIdx.x; item < x.n * x.n; item += kThreads) {
    const int i = item / x.n, j = item % x.n;
    const double sum = double(from[item]) + double(from[j * x.n + i]);
    x.a[i * x.stride + j] = T(0.5 * sum * scale);
    x.vectors[i * x.stride + j] = i == j ? T(1) : T(0);
  }
  __syncthreads();
  return EighStatus::done;
}

// Sweeps until no element off the diagonal is worth a rotation; false if that never comes.
template <class T>
__device__ bool diagonalise(const JacobiProblem<T>& x) {
  for (int sweep = 0; sweep < kJacobiSweeps; ++sweep) {
    bool rotated = false;
    for (int round = 0; round < x.rounds(); ++round) {
      const bool found = jacobi_find_rotations(x, round, threadIdx.x, kThreads);
      if (!__syncthreads_or(found)) continue;
      rotated = true;
      jacobi_rotate_rows(x, round, threadIdx.x, kThreads);
      __syncthreads();
      jacobi_rotate_columns(x, round, threadIdx.x, kThreads);
      __syncthreads();
    }
    if (!rotated) return true;
  }
  return false;
}

__device__ double sum_of_warp(double value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Makes the values exact and writes them in order, with the vectors, normalised, as rows: one warp
// for each vector.
template <class T>
__device__ void store_pairs(const JacobiProblem<T>& x, const T* matrix, double scale, T* values,
                            T* vectors) {
  const int lane = threadIdx.x % 32;
  for (int j = threadIdx.x / 32; j < x.n; j += kThreads / 32) {
    JacobiQuotient quotient{0.0, 0.0};
    jacobi_add_quotient(x, matrix, scale, j, lane, 32, quotient);
    const double change = sum_of_warp(quotient.change), square = sum_of_warp(quotient.square);
    const double factor = 1.0 / sqrt(square);
    for (int i = lane; i < x.n; i += 32) x.vectors[j * x.stride + i] *= factor;
    if (lane == 0) x.a[j * x.stride + j] += T(change / square);
  }
  __syncthreads();
  for (int j = threadIdx.x / 32; j < x.n; j += kThreads / 32) {
    const int rank = jacobi_rank(x, j);
    for (int i = lane; i < x.n; i += 32) vectors[rank * x.n + i] = x.vectors[j * x.stride + i];
    if (lane == 0) values[rank] = T(x.a[j * x.stride + j] / scale);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) jacobi_eigh(const T* matrices, int n, double tolerance,
                                                        T* values, T* vectors, EighStatus* status) {
  extern __shared__ double memory[];
  __shared__ T warps[kThreads / 32];
  const int64_t which = blockIdx.x;
  JacobiProblem<T> x;
  // One element between rows: a column's elements lie in different banks.
  x.n = n;
  x.stride = n + 1;
  x.a = reinterpret_cast<T*>(memory);
  x.vectors = x.a + n * x.stride;
  x.sine = x.vectors + n * x.stride;
  x.tau = x.sine + x.pairs();
  double scale = 1.0;
  EighStatus found = load_matrix(matrices + which * n * n, tolerance, x, warps, scale);
  if (found == EighStatus::done) {
    if (!diagonalise(x)) found = EighStatus::not_converged;
    store_pairs(x, matrices + which * n * n, scale, values + which * n, vectors + which * n * n);
  }
  if (threadIdx.x == 0) status[which] = found;
}

}  // namespace

template <class T>
int launch_eigh(const T* matrices, int64_t batch, int n, double asymmetry, T* values, T* vectors,
                EighStatus* status, void* stream) {
  if (batch == 0 || n == 0) return 0;
  const size_t bytes = (2 * size_t(n) * (n + 1) + n + 1) * sizeof(T);
  const cudaError_t error = cudaFuncSetAttribute(
      jacobi_eigh<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  jacobi_eigh<T>
      <<<static_cast<unsigned>(batch), kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(
          matrices, n, asymmetry, values, vectors, status);
  return static_cast<int>(cudaGetLastError());
}

template int launch_eigh<float>(const float*, int64_t, int, double, float*, float*, EighStatus*,
                                void*);
template int launch_eigh<double>(const double*, int64_t, int, double, double*, double*, EighStatus*,
                                 void*);

}  // namespace dpk
