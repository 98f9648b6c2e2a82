// sum_i G_i X A_i over clients, for all layers of a model in one call: the FedFisher server's step.
#pragma once

#include <cstdint>

#include "common/executor.h"

namespace dpk {

// One layer: g [clients, rows, rows] and a [clients, cols, cols], both symmetric; x and out
// [rows, cols]; centers [clients, rows, cols], or null for none. All contiguous.
template <class T>
struct KronSumLayer {
  const T* g;
  const T* a;
  const T* x;
  const T* centers;
  T* out;
  int64_t clients, rows, cols;
};

// out (+)= sum_i g_i (x - centers_i) a_i for each layer. T is float or double.
template <class T>
void kron_sum(const KronSumLayer<T>* layers, int64_t count, bool accumulate, void* workspace,
              const Executor& executor);

template <class T>
int64_t kron_sum_workspace_bytes(const KronSumLayer<T>* layers, int64_t count,
                                 const Executor& executor);

}  // namespace dpk
