// Shrinking the singular values of a tensor's Fourier slices. The mathematics is in
// dpkernels/ops/tsvd/__init__.py. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/executor.h"

namespace dpk {

// What becomes of a slice. `replaced` slices hold their result already; `needs_svd` marks those
// that the Gram matrix cannot serve, for the caller to replace.
enum class Outcome : int8_t { multiplied, vanished, needs_svd, replaced };

struct SliceResult {
  Outcome outcome;
  int64_t kept;  // singular values above the cut
};

// How the singular values of a slice shrink: soft, hard and optimal shrinkers are members of one
// family, dpkernels/ops/tsvd/shrinkers.py. cut >= subtracted, cut >= upper >= lower, all >= 0.
struct ShrinkCurve {
  double cut;
  double subtracted;
  double upper;
  double lower;

  bool changes_nothing() const { return cut == 0.0; }

  // What a singular value is multiplied with: 0 up to the cut, then at most 1.
  double factor(double s) const {
    if (s <= cut) return 0.0;
    const double u = upper / s, l = lower / s;
    return (1.0 - subtracted / s) * std::sqrt((1.0 - u) * (1.0 + u) * (1.0 - l) * (1.0 + l));
  }
};

struct ClientStrides {
  int64_t row;
  int64_t col;
  int64_t client;
};

// The weights of one layer, of all clients: rows x cols x clients, rows >= cols >= 1, clients >= 1.
// Slices [0, clients / 2] of the Fourier transform are the only ones that are kept.
struct ClientTensor {
  const float* x;
  ClientStrides x_strides;
  float* out;
  ClientStrides out_strides;
  int64_t rows;
  int64_t cols;
  int64_t clients;
  const ShrinkCurve* curves;  // [slices]
  float* planes;              // [slices, rows, 2 cols]: real parts, then imaginary parts of a row
  float* operators;           // [slices, 2 cols, 2 cols]
  SliceResult* results;       // [slices]
  float* values;              // [slices, cols]: singular values, largest first

  int64_t slices() const { return clients / 2 + 1; }
  bool slice_is_real(int64_t s) const { return s == 0 || 2 * s == clients; }
  // Columns of slice s as real numbers.
  int64_t width(int64_t s) const { return slice_is_real(s) ? cols : 2 * cols; }
  float* plane(int64_t s) const { return planes + s * rows * 2 * cols; }
  float* slice_operator(int64_t s) const { return operators + s * 4 * cols * cols; }
};

// How many bytes of workspace each of the functions below needs.
int64_t tsvd_workspace_bytes(const ClientTensor* layers, int64_t count, const Executor& executor);

// planes = the real Fourier transform of x over the clients, unnormalised. Returns the first layer
// with an element of it that is not finite, or -1.
int64_t transform_clients(const ClientTensor* layers, int64_t count, void* workspace,
                          const Executor& executor);

// The operator P = V factor(s) V^H of every slice M = U s V^H, from the eigendecomposition of
// M^H M in double: M P is the result. Writes operators and results.
void shrink_operators(const ClientTensor* layers, int64_t count, void* workspace,
                      const Executor& executor);

// out = the inverse transform of the slices, after each has been multiplied by its operator.
void transform_back(const ClientTensor* layers, int64_t count, void* workspace,
                    const Executor& executor);

// Singular values of all slices, from the same Gram matrices. Writes values, and results for those
// that need an SVD.
void slice_singular_values(const ClientTensor* layers, int64_t count, void* workspace,
                           const Executor& executor);

}  // namespace dpk
