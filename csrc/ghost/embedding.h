// Per-sample norms and weighted sums of the gradient of an embedding table.
//
// A sample's gradient has one row for each distinct token: the sum of the errors at its positions.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

struct EmbeddingProblem {
  int64_t batch, tokens, width;
  int64_t vocabulary;
  const int64_t* indices;  // [batch, tokens], contiguous, each in [0, vocabulary)
  const void* errors;      // [batch, tokens, width], the last axis contiguous
  int64_t batch_stride, token_stride;
  Dtype dtype;
  int64_t padding_index;  // a token that is left out, or -1
  const double* scale;    // [vocabulary] factors of the table's rows, or null
};

void embedding_sq_norms(const EmbeddingProblem& problem, double* sq_norms,
                        const Executor& executor);

// out [vocabulary, width] (+)= sum over samples of factor * gradient; factors and out are float
// (double for f64). A factor of zero leaves its sample out. The same bits for any number of
// threads.
void embedding_weighted_sum(const EmbeddingProblem& problem, const void* factors, void* out,
                            bool accumulate, const Executor& executor);

}  // namespace dpk
