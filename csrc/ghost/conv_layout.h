// Where a convolution finds what its taps meet: planes of pixels for gradients, a table of pixels
// for products of positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ghost/conv.h"

namespace dpk {

// Rows end on whole vectors of any instruction set, and windows may run this far over the end.
constexpr int64_t kPadding = 16;

inline int64_t padded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

inline int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// One axis: which planes its taps need, and where in them each tap begins.
struct AxisLayout {
  int64_t extent;
  std::vector<ConvPhase> phases;
  std::vector<int64_t> tap_phase, tap_offset;
  int64_t meetings = 1;  // how many taps meet the same pixel, at most

  explicit AxisLayout(const ConvAxis& axis) {
    std::vector<int64_t> residues;
    int64_t furthest = 0;
    for (int64_t k = 0; k < axis.kernel; ++k) {
      const int64_t at = k * axis.dilation, residue = at % axis.stride;
      auto found = std::find(residues.begin(), residues.end(), residue);
      if (found == residues.end()) found = residues.insert(found, residue);
      tap_phase.push_back(found - residues.begin());
      tap_offset.push_back(at / axis.stride);
      furthest = std::max(furthest, at / axis.stride);
    }
    extent = axis.out + furthest;
    // Those of one phase, each at another position.
    for (const int64_t phase : tap_phase) {
      meetings = std::max(meetings, std::count(tap_phase.begin(), tap_phase.end(), phase));
    }
    meetings = std::min(meetings, axis.out);
    for (const int64_t residue : residues) {
      const int64_t shift = residue - axis.padding;
      const int64_t begin = std::max<int64_t>(0, -floor_divide(shift, axis.stride));
      const int64_t end = floor_divide(axis.in - 1 - shift, axis.stride) + 1;
      phases.push_back({shift, begin, std::max(begin, std::min(end, extent))});
    }
  }
};

struct Layout {
  AxisLayout axes[3];
  ConvPlanes planes;
  int64_t window;                // from the first to the last position of an error plane, padded
  std::vector<int64_t> offsets;  // [columns]: where the window of a column of the gradient begins

  explicit Layout(const ConvShape& shape)
      : axes{AxisLayout(shape.axes[0]), AxisLayout(shape.axes[1]), AxisLayout(shape.axes[2])} {
    planes.plane = planes.channel = 1;
    int64_t last = 0;
    for (int a = 0; a < 3; ++a) {
      const ConvAxis& axis = shape.axes[a];
      planes.extent[a] = axes[a].extent;
      planes.in[a] = axis.in;
      planes.out[a] = axis.out;
      planes.stride[a] = axis.stride;
      planes.phase_count[a] = static_cast<int64_t>(axes[a].phases.size());
      planes.phases[a] = axes[a].phases.data();
      planes.plane *= axes[a].extent;
      planes.channel *= planes.phase_count[a];
      last = last * axes[a].extent + axis.out - 1;
    }
    planes.channel *= planes.plane;
    planes.channels = shape.channels;
    planes.out_channels = shape.out_channels;
    planes.pixels = shape.pixels();
    planes.positions = shape.positions();
    window = padded(last + 1);
    add_offsets(shape);
  }
  Layout(const Layout&) = delete;

  int64_t plane_elements() const { return planes.channels * planes.channel + kPadding; }

 private:
  void add_offsets(const ConvShape& shape) {
    for (int64_t c = 0; c < shape.channels / shape.groups; ++c) {
      for (int64_t z = 0; z < shape.axes[0].kernel; ++z) {
        for (int64_t y = 0; y < shape.axes[1].kernel; ++y) {
          for (int64_t x = 0; x < shape.axes[2].kernel; ++x) {
            const int64_t taps[3] = {z, y, x};
            int64_t phase = 0, offset = 0;
            for (int a = 0; a < 3; ++a) {
              phase = phase * planes.phase_count[a] + axes[a].tap_phase[taps[a]];
              offset = offset * planes.extent[a] + axes[a].tap_offset[taps[a]];
            }
            offsets.push_back(c * planes.channel + phase * planes.plane + offset);
          }
        }
      }
    }
  }
};

// [taps, positions]: the pixel under a tap at a position, or `pixels` where that is padding.
inline std::vector<int32_t> pixels_met(const ConvShape& shape) {
  const auto place = [&shape](int a, int64_t tap, int64_t position) {
    const ConvAxis& axis = shape.axes[a];
    const int64_t at = position * axis.stride + tap * axis.dilation - axis.padding;
    return at < axis.in ? at : -1;
  };
  std::vector<int32_t> met;
  const ConvAxis* axes = shape.axes;
  for (int64_t tap = 0; tap < shape.taps(); ++tap) {
    const int64_t kx = tap % axes[2].kernel, ky = tap / axes[2].kernel % axes[1].kernel;
    const int64_t kz = tap / axes[2].kernel / axes[1].kernel;
    for (int64_t p = 0; p < shape.positions(); ++p) {
      const int64_t x = place(2, kx, p % axes[2].out);
      const int64_t y = place(1, ky, p / axes[2].out % axes[1].out);
      const int64_t z = place(0, kz, p / axes[2].out / axes[1].out);
      const bool inside = x >= 0 && y >= 0 && z >= 0;
      met.push_back(
          static_cast<int32_t>(inside ? (z * axes[1].in + y) * axes[2].in + x : shape.pixels()));
    }
  }
  return met;
}

}  // namespace dpk
