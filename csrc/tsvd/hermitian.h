// A Hermitian eigenproblem in double and the memory that solves it. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tsvd/scratch.h"

namespace dpk {

// Columns that hermitian.inl works on at once at most (AVX-512: 4 vectors of 8): rows are padded
// to a multiple of them with zeros.
constexpr int64_t kHermitianPad = 32;

// Distance between rows of `n` doubles: room for whole vectors, and an odd number of cache lines.
// Rows a power of two apart share few of the first-level cache's sets. Measured for n = 120 with
// 128 and with 136 doubles: QL with vectors takes 0.89 and 0.71 ms, the reflections 0.43 and 0.30.
inline int64_t hermitian_stride(int64_t n) {
  return (n + kHermitianPad - 1) / kHermitianPad * kHermitianPad + 8;
}

// A chain of plane rotations of the rows (high, high - 1), ..., (low + 1, low).
struct Sweep {
  int64_t low;
  int64_t high;
  int64_t first;  // where its cosines and sines begin
};

struct Rotation {
  double c;
  double s;
};

// An n x n problem. Matrices have rows `stride` apart.
struct Hermitian {
  int64_t n;
  int64_t stride;
  // In: the strictly lower triangle, zeros elsewhere. Out: Householder vector i in row i.
  double* re;
  double* im;
  double* values;         // in: the diagonal; out: the eigenvalues, in any order
  double* off;            // off-diagonal of the tridiagonal form
  double* scale_re;       // tau of the reflections I - tau v v^H
  double* scale_im;       //
  double* vectors;        // row k: eigenvector k of the tridiagonal form
  double* product[2][2];  // A v and w of two reflections, real and imaginary parts
  Sweep* sweeps;
  Rotation* rotations;

  // Rotations are applied when so many have been found: 64 KiB, an eighth of the second-level
  // cache. Measured for n = 120: QL takes 0.84 ms if they are applied sweep by sweep, 0.72 with
  // 1024 at a time and 0.71 with 4096.
  static constexpr int64_t kRotations = 4096;

  // Takes the memory for problems of up to `most`.
  Hermitian(int64_t most, Scratch& scratch) : n(most), stride(hermitian_stride(most)) {
    re = scratch.take<double>(2 * n * stride);
    im = re + n * stride;
    vectors = scratch.take<double>(n * stride);
    for (double** part : {&values, &off, &scale_re, &scale_im, &product[0][0], &product[0][1],
                          &product[1][0], &product[1][1]}) {
      *part = scratch.take<double>(stride);
    }
    sweeps = scratch.take<Sweep>(kRotations);
    rotations = scratch.take<Rotation>(kRotations + n);
  }

  // Sets the size, at most the one that it was made for, and fills the matrix with zeros.
  void clear(int64_t size) {
    n = size;
    stride = hermitian_stride(size);
    im = re + n * stride;
    std::fill_n(re, 2 * n * stride, 0.0);
  }
};

}  // namespace dpk
