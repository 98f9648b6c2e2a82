// Per-sample gradient norms and weighted gradient sums of a linear layer, from its inputs
// (activations a) and the gradients of its outputs (errors d): g_b = sum over positions t of
// d_bt a_bt^T. No g_b is stored.
//
// A norm must not come out low: what its rounding may have cost is added to it (ghost/rounding.h).
// So that this is little, products are summed in float over kChain terms only and in double from
// there on, and what cancels too much for float is done again in double.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

// batch x positions rows of `width` neighbouring elements, `row_stride` elements apart.
struct Positions {
  const void* data;
  int64_t row_stride;
  int64_t width;
};

struct LinearBatch {
  Positions activations;
  Positions errors;
  int64_t batch;
  int64_t positions;
  Dtype dtype;
};

enum class LinearFormula {
  gram,          // sum over s, t of (a_s . a_t)(d_s . d_t): positions^2 (inputs + outputs) flops
  materialised,  // the squares of sum over t of d_t a_t^T: 2 positions inputs outputs flops
};

// sq_norms[b] = |g_b|^2, plus |sum over t of d_bt|^2 if `bias`, with what their sum may round. Not
// finite if anything in sample b is not finite. apart[b]: whether terms cancel so far that the
// sample must not be part of a product in float (sum_limit of ghost/rounding.h).
void linear_sq_norms(const LinearBatch& batch, bool bias, LinearFormula formula, double* sq_norms,
                     bool* apart, const Executor& executor);

// out [outputs, inputs] (+)= sum over b of factors[b] g_b, and, unless null, bias_out [outputs]
// (+)= sum over b, t of factors[b] d_bt w_bt. If `homogeneous`, the last activation is not one of
// the inputs: it is w. Otherwise w is 1. A sample with the factor zero is not looked at. What
// samples with apart[b], unless that is null, add is computed in double and rounded once. Factors
// and outputs are float (double for f64).
void linear_weighted_sum(const LinearBatch& batch, const void* factors, const bool* apart,
                         bool homogeneous, void* out, void* bias_out, bool accumulate,
                         const Executor& executor);

}  // namespace dpk
