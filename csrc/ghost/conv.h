// Per-sample norms and gradients of a convolution, from its input and its output's errors.
//
// A sample's input is copied once into planes with a zero fringe, one plane for each residue that
// the taps have modulo the stride. There the values that one tap of the kernel meets at all output
// positions are a contiguous window, so that every element of the gradient is a plain dot product
// of an error plane (its rows spread to the same pitch) and a window: no patch matrix is built.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

// One spatial axis; absent axes have size 1, kernel 1 and no padding.
struct ConvAxis {
  int64_t in, out, kernel, stride, padding, dilation;
};

struct ConvShape {
  int64_t batch, channels, out_channels, groups;  // channels of all groups
  ConvAxis axes[3];

  int64_t taps() const { return axes[0].kernel * axes[1].kernel * axes[2].kernel; }
  int64_t pixels() const { return axes[0].in * axes[1].in * axes[2].in; }
  int64_t positions() const { return axes[0].out * axes[1].out * axes[2].out; }
  int64_t columns() const { return channels / groups * taps(); }
  int64_t rows() const { return out_channels / groups; }
};

// Elements are read as one type and computed with as another.
template <class From_, class To_>
struct Conversion {
  using From = From_;
  using To = To_;
};

// Elements [begin, end) along an axis of a plane are the input's at i * stride + shift.
struct ConvPhase {
  int64_t shift, begin, end;
};

// The planes as the kernels see them: plain numbers and pointers.
struct ConvPlanes {
  int64_t extent[3], in[3], out[3], stride[3];
  int64_t phase_count[3];
  const ConvPhase* phases[3];
  int64_t channels, out_channels, pixels, positions;
  int64_t plane, channel;  // elements of a plane, and of all planes of a channel
};

struct ConvProblem {
  ConvShape shape;
  const void* activations;  // [batch, channels, ...], contiguous
  const void* errors;       // [batch, out_channels, ...], contiguous
  Dtype dtype;
  bool bias;
  bool gram;            // norms from products of positions; else from the gradient itself
  const double* scale;  // [columns + 1] factors of the gradient's columns, bias last; or null
};

// grads [batch, out_channels, columns] and bias_grads [batch, out_channels] (float, double for f64)
// may be null; they are not scaled. Not with `gram`.
struct ConvOutputs {
  double* sq_norms;
  void* grads;
  void* bias_grads;
};

// No norm is low: each has the bound of its rounding error added (ghost/rounding.h), and a float
// sample that this would raise too far is computed again in double. A sample with a value that is
// not finite gets a norm that is not.
void conv_norms(const ConvProblem& problem, const ConvOutputs& outputs, const Executor& executor);

}  // namespace dpk
