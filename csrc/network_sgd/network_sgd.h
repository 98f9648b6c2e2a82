// One epoch of SGD of many clients, each on a sequential network of its own: convolutions, then
// linear layers, with ReLU, tanh, max-pooling and dropout between them.
//
// A client stays in one thread from its first batch to its last, and so does all that it works in.
// Images are kept with channels last: a patch of a convolution is then kernel-height runs of
// consecutive numbers, and no patch matrix is made. What comes back through a max-pooling is zero
// at three of four places and through ReLU at more: backward convolutions take only the others.
#pragma once

#include <cstdint>

#include "common/executor.h"

namespace dpk {

enum class LayerKind : int64_t { pass, convolution, linear };
enum class Activation : int64_t { none, relu, tanh };

// [0] is of rows, [1] of columns.
struct Window {
  int64_t size[2], stride[2], padding[2];
};

// outputs = mask * pool(activation(affine(inputs))).
struct NetLayer {
  LayerKind kind;
  // Of what it takes; a flat layer has height and width 1.
  int64_t channels, height, width;
  int64_t outputs;  // channels of what it makes
  Window kernel;    // 1 x 1 unless it is a convolution
  // Where they begin in the vector of all parameters, in torch's layout; bias -1: none.
  int64_t weight, bias;
  Activation activation;
  Window pool;  // 1 x 1 without one
  // Dropout keeps a number if its random level, of `levels` (256 or 65536), is below `kept`, and
  // scales it by levels / kept; levels 0: none.
  int64_t kept, levels;

  int64_t conv_size(int axis) const { return windows(axis == 0 ? height : width, kernel, axis); }
  int64_t pool_size(int axis) const { return windows(conv_size(axis), pool, axis); }
  int64_t positions() const { return conv_size(0) * conv_size(1); }
  int64_t pooled() const { return pool_size(0) * pool_size(1); }
  int64_t features() const { return pooled() * outputs; }
  int64_t window() const { return pool.size[0] * pool.size[1]; }
  bool is_flat() const {
    return height == 1 && width == 1 && pooled() == 1 && kind != LayerKind::convolution;
  }

 private:
  static int64_t windows(int64_t size, const Window& w, int axis) {
    return (size + 2 * w.padding[axis] - w.size[axis]) / w.stride[axis] + 1;
  }
};

// layers: flat ones last; the last is linear, without anything after it. records: [., ...] of all
// clients, contiguous, in torch's layout.
//
// A step is u <- momentum u - lr g, w <- w + u, with g the gradient of the batch's mean loss.
struct Network {
  const NetLayer* layers;
  int64_t depth, parameters, batch_size;
  double lr, momentum;
};

// A client with `count` records. rows, labels: [count], in the epoch's order. masks: levels of
// every layer with dropout, [count, features] with channels last, uint8 or uint16 by `levels`.
// before, after: [parameters]; may be the same. start: if not null, it is taken from `after`.
// velocity: u [parameters], read unless `first`, and written; null without momentum.
template <class T>
struct NetClient {
  int64_t count;
  const int64_t *rows, *labels;
  const void* const* masks;
  const T* before;
  T* after;
  const T* start;
  T* velocity;
  bool first;
};

// How many bytes of workspace network_epoch needs, aligned to 64.
template <class T>
int64_t network_workspace(int64_t count, const Network& network, const Executor& executor);

// Takes every client's steps on the mean cross-entropy of its batches.
template <class T>
void network_epoch(const NetClient<T>* clients, int64_t count, const Network& network,
                   const T* records, void* workspace, const Executor& executor);

}  // namespace dpk
