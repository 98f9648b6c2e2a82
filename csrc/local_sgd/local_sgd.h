// One epoch of SGD of many clients, each on a network of two layers of its own.
//
// The first layer is kept in the span of the client's n records: its weights are W0 + C^T X with
// coefficients C [n, hidden], so that of records B it makes start_B + K_B C, where K = X X^T and
// start = X W0^T. Products stay in one thread's cache from the first step of an epoch to the last.
#pragma once

#include <cstdint>

#include "common/executor.h"

namespace dpk {

// A client with `count` records. All contiguous: gram [count, count]; start, coefficients
// [count, hidden]; weight [classes, hidden], the second layer's; biases [hidden] and [classes], or
// null. order: which record is where in the epoch; labels and mask (null: all ones), [count] and
// [count, hidden], are in that order.
template <class T>
struct TwoLayerClient {
  int64_t count;
  const T* gram;
  const T* start;
  const int64_t* order;
  const int64_t* labels;
  const T* mask;
  T* coefficients;
  T* weight;
  T* hidden_bias;
  T* bias;
};

struct TwoLayerEpoch {
  int64_t hidden, classes, batch_size;
  double lr;
};

// How many elements of workspace two_layer_epoch needs.
template <class T>
int64_t two_layer_workspace(int64_t count, const TwoLayerEpoch& epoch, const Executor& executor);

// Takes every client's steps: mean cross-entropy of softmax(W relu(z) * mask), z the first layer's.
template <class T>
void two_layer_epoch(const TwoLayerClient<T>* clients, int64_t count, const TwoLayerEpoch& epoch,
                     T* workspace, const Executor& executor);

}  // namespace dpk
