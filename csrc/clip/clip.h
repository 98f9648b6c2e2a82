// Norms, clip factors and clipped sums of the rows of materialised per-sample gradients.
//
// Squared norms are double: products of floats are exact there, and no float is too large or too
// small for its square. Factors are rounded towards zero. Together: factor * |row| <= C.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

// One tensor of a list that shares the batch: B rows of `cols` elements, `row_stride` elements
// apart. `out` has `cols` elements, float (double for f64).
struct RowTensor {
  const void* data;
  int64_t row_stride;
  int64_t cols;
  void* out;
};

struct Rows {
  const RowTensor* tensors;
  int64_t count;
  int64_t batch;
  Dtype dtype;
};

// How a norm becomes a factor: min(1, bound / norm), or bound / (norm + gamma) if `normalise`.
struct ClipRule {
  const double* bounds;  // one over all tensors, or one for each
  int64_t bound_count;
  bool normalise;
  double gamma;
};

// Squares of doubles below 1e-154 are lost (squares of floats never get there). This covers all
// that a row can lose, and is itself lost beside any other squared norm.
constexpr double kLostSquares = 0x1p-1000;

// The factor of one row with a valid norm, before rounding. No branches: whether a row is clipped
// is as good as random, and a misprediction costs more than a division.
inline double clip_factor(double sq_norm, double bound, bool normalise, double gamma) {
  const double norm = std::sqrt(sq_norm + kLostSquares);
  const double ratio = bound / (normalise ? norm + gamma : norm);
  return normalise ? ratio : std::min(ratio, 1.0);
}

// Rounding towards zero keeps the product of factor and norm below the bound.
inline float round_factor_down(double factor) {
  factor = std::min(factor, static_cast<double>(std::numeric_limits<float>::max()));
  float rounded = static_cast<float>(factor);
  int32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  // The float just below a positive one has the bits just below.
  bits -= static_cast<double>(rounded) > factor;
  std::memcpy(&rounded, &bits, sizeof(bits));
  return rounded;
}

// sq_norms: [batch], over all tensors, or [count, batch] if per_tensor.
void row_sq_norms(const Rows& rows, bool per_tensor, double* sq_norms, const Executor& executor);

// sq_norms and factors: [rule.bound_count, batch]; factors float, or double if `wide`. A sample
// with a norm that is not finite, or negative, gets the factor zero under every bound.
void clip_factors(const double* sq_norms, int64_t batch, const ClipRule& rule, bool wide,
                  void* factors);

// factors [batch] of samples whose gradients are spread over layers: sq_norms is [layers][batch],
// of gradients that are `scale` times too small, and what is returned is `scale` times the factor.
void layer_factors(const double* const* sq_norms, int64_t layers, int64_t batch, double scale,
                   const ClipRule& rule, bool wide, void* factors);

// out (+)= sum over rows of factor * row; factors: [1, batch] or [count, batch]. A factor of zero
// leaves its row out, whatever it holds.
void weighted_row_sum(const Rows& rows, const void* factors, int64_t factor_rows, bool accumulate,
                      void* workspace, const Executor& executor);

// Both at once, reading memory once where a few rows fit in the cache. sq_norms and factors are
// results, [rule.bound_count, batch].
void clip_and_sum(const Rows& rows, const ClipRule& rule, bool accumulate, double* sq_norms,
                  void* factors, void* workspace, const Executor& executor);

// How many bytes of workspace weighted_row_sum and clip_and_sum (with_norms) need.
int64_t sum_workspace_bytes(const Rows& rows, bool with_norms, const Executor& executor);

}  // namespace dpk
