// Per-sample gradients of an elementwise scale and shift, as normalisation layers end in.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

struct ScaleShiftProblem {
  int64_t batch, positions, width;
  const void* normalised;  // [batch, positions, width], or [batch, width, positions]; contiguous
  const void* errors;      // the same
  Dtype dtype;
  bool channels_first;
  const double* weight_scale;  // [width] factors of the gradient's elements, or null
  const double* bias_scale;
};

// weight[b, j] = scale_j * sum over positions of normalised * errors, bias[b, j] = scale_j * sum
// over positions of errors; summed in double, written as float (double for f64). bias may be null.
void scale_shift_grads(const ScaleShiftProblem& problem, void* weight, void* bias,
                       const Executor& executor);

}  // namespace dpk
