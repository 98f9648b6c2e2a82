// Eigendecompositions of symmetric matrices, and what follows from them.
//
// Matrices are dense, row-major and contiguous; T is float or double. Everything here works on
// `scale * (A + A^T) / 2` with a power of two as scale, so that no size of element overflows.
#pragma once

#include <cstdint>

#include "common/executor.h"
#include "roots/scale.h"

namespace dpk {

// How far a matrix may be from symmetric, relative to its largest element: what a product with
// TF32 or float16 inputs may do. More is a mistake of the caller's.
constexpr double kAsymmetry = 0x1p-10;

// What must be known of a matrix before anything is done with it.
struct MatrixFacts {
  bool finite;
  double largest;    // max |a_ij|
  double asymmetry;  // max |a_ij - a_ji|
};

template <class T>
MatrixFacts inspect_matrix(const T* a, int64_t n);

// to = scale (A + A^T) / 2, both triangles.
template <class T>
void symmetrise(const T* a, int64_t n, double scale, T* to);

// One matrix and where its results go: values ascending, row j of `vectors` is eigenvector j.
template <class T>
struct EighProblem {
  const T* matrix;
  double scale;
  T* values;
  T* vectors;
};

// How many matrices of one size eigh_in_lanes works on at a time.
template <class T>
int eigh_lanes();

// Householder tridiagonalisation and implicit QR, one matrix in each SIMD lane, in one thread;
// `count` <= eigh_lanes() matrices n x n. About 9 n^3 flops for each. Returns false if an
// eigenvalue did not converge (which no finite matrix is known to do).
template <class T>
bool eigh_in_lanes(const EighProblem<T>* problems, int count, int64_t n);

// Parallel-order Jacobi, in one thread, with the arithmetic of the CUDA kernel (jacobi.h).
template <class T>
bool eigh_by_jacobi(const EighProblem<T>& problem, int64_t n);

// out = sum_j factors[j] v_j v_j^T for the rows v_j of `vectors`; half of a product: n^3 flops.
template <class T>
void sum_of_projections(const T* vectors, const double* factors, int64_t n, T* out);

// out = (A + damping I)^power for -1 <= power < 0, damping > 0 and positive semidefinite A, without
// eigenvectors (see tridiagonal.h). About 10/3 n^3 flops; keeps n^2 + 320 n elements beside `out`.
// Returns false, with `out` unspecified, if A has an eigenvalue below what rounding errors explain:
// negative ones count as 0, which takes their eigenvectors.
template <class T>
bool inverse_root_by_tridiagonal(const T* a, double largest, int64_t n, double power,
                                 double damping, T* out, const Executor& executor);

}  // namespace dpk
