// Norms of gradients that are one outer product each, d a^T: a linear layer with one position for
// each sample. Both sides are transformed and measured in one go, because what is left of a call
// once its products are done is what a small layer pays for.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

// How a side is transformed: not at all, by U [size, size], or by V [size, rank] and `values` with
// U = tail I + V diag(values - tail) V^T. Not told by pointers: those of empty tensors are null.
enum class RankOneForm { none, full, low_rank };

// One side: a row x of `width` elements for each sample, `row_stride` apart.
struct RankOneSide {
  const void* rows;
  int64_t row_stride;
  int64_t width;
  RankOneForm form;
  // U or V in the dtype of the rows, float or double. If size is width + 1, a 1 stands behind every
  // row.
  const void* matrix;
  int64_t matrix_stride;
  int64_t size;
  void* transformed;  // [batch, size]: x U
  const void* values;
  int64_t rank;
  double tail;
};

// sq_norms[b] = |U d_b|^2 |U a_b|^2, the last factor plus 1 if `bias`: a bias's gradient is d. From
// the rounded numbers in `transformed`, so that it is the norm of what is summed.
void rank_one_sq_norms(const RankOneSide& activations, const RankOneSide& errors, int64_t batch,
                       Dtype dtype, bool bias, double* sq_norms, const Executor& executor);

}  // namespace dpk
