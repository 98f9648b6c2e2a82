// What the kernels of one layer take, and how a layer is laid out for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "network_sgd/network_sgd.h"

namespace dpk {

// A patch: `runs` runs of `length` numbers, their beginnings `apart`.
struct PatchRuns {
  int64_t runs, length, apart;
};

// Numbers that came back to outputs of a convolution and are not zero: list q, of position at[q] in
// the frame, has entries [begin[q], begin[q + 1]); entry_at: the position of each entry.
template <class T>
struct CameBack {
  int64_t lists;
  const int32_t *at, *begin, *output, *entry_at;
  const T* value;
};

// The same by output: those of output o are [o most, end[o]) of at and value.
template <class T>
struct ByOutput {
  int64_t outputs, most;
  const int32_t *at, *end;
  const T* value;
};

// Inputs of a linear layer that are multiplied at a time: those of 10 records take 20 of 32 KiB of
// the first-level cache. By size, not tuned.
constexpr int64_t kDotDepth = 512;

// Vectors of a patch that go back at a time: with 64 outputs, their weights take 24 of 32 KiB of
// the first-level cache. By size, not tuned.
constexpr int64_t kMostPieces = 6;

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A layer of images. Its inputs lie in a frame [height + 2 padding, width + 2 padding, channels].
struct ImageLayer {
  NetLayer layer;
  int64_t frame;  // how many numbers
  PatchRuns patch;
  int64_t lanes, chunks, pieces;  // a patch is chunks x pieces vectors
  int64_t packed;                 // numbers of the weights as the backward pass takes them
  int64_t columns, panels;        // and as the forward pass does, in panels of so many outputs
  std::vector<int32_t> at;        // where the patch of each position begins
  std::vector<int32_t> piece_at;  // where each piece begins in the patch
  std::vector<int32_t> slots;     // where each weight of a patch lies among an output's packed ones
  // The positions under each pooling window, those outside left out: [begin, begin + 1) of each.
  std::vector<int32_t> under_begin, under;
  std::vector<uint8_t> names;    // which place in the window each is
  std::vector<int32_t> list_at;  // [pooled, window]: the patch of each place

  // lanes: of the vectors that a run of the patch is taken in. columns: of a panel.
  ImageLayer(const NetLayer& layer, int64_t lanes, int64_t columns);
};

inline ImageLayer::ImageLayer(const NetLayer& given, int64_t lanes_of_runs, int64_t panel_columns)
    : layer(given), lanes(lanes_of_runs), columns(panel_columns) {
  const Window& kernel = layer.kernel;
  const int64_t width = layer.width + 2 * kernel.padding[1], channels = layer.channels;
  frame = (layer.height + 2 * kernel.padding[0]) * width * channels;
  patch = {kernel.size[0], kernel.size[1] * channels, width * channels};
  const int64_t vectors = round_up(patch.length, lanes) / lanes, all = patch.runs * vectors;
  chunks = (all + kMostPieces - 1) / kMostPieces;
  pieces = (all + chunks - 1) / chunks;
  packed = chunks * pieces * lanes * layer.outputs;
  panels = patch.runs * patch.length * round_up(layer.outputs, columns);
  for (int64_t y = 0; y < layer.conv_size(0); ++y) {
    for (int64_t x = 0; x < layer.conv_size(1); ++x) {
      const int64_t begin = y * kernel.stride[0] * width + x * kernel.stride[1];
      at.push_back(static_cast<int32_t>(begin * channels));
    }
  }
  // Pieces that only fill up the last chunk have weights of zero and repeat the first.
  piece_at.assign(chunks * pieces, 0);
  for (int64_t i = 0; i < all; ++i) {
    piece_at[i] = static_cast<int32_t>(i / vectors * patch.apart + i % vectors * lanes);
  }
  for (int64_t run = 0; run < patch.runs; ++run) {
    for (int64_t i = 0; i < patch.length; ++i) {
      const int64_t piece = run * vectors + i / lanes;
      const int64_t chunk = piece / pieces * pieces * lanes * layer.outputs;
      slots.push_back(static_cast<int32_t>(chunk + piece % pieces * lanes + i % lanes));
    }
  }
  const Window& pool = layer.pool;
  under_begin.push_back(0);
  for (int64_t y = 0; y < layer.pool_size(0); ++y) {
    for (int64_t x = 0; x < layer.pool_size(1); ++x) {
      for (int64_t i = 0; i < layer.window(); ++i) {
        const int64_t row = y * pool.stride[0] - pool.padding[0] + i / pool.size[1];
        const int64_t column = x * pool.stride[1] - pool.padding[1] + i % pool.size[1];
        const bool inside =
            row >= 0 && row < layer.conv_size(0) && column >= 0 && column < layer.conv_size(1);
        const int64_t position = inside ? row * layer.conv_size(1) + column : 0;
        list_at.push_back(at[position]);
        if (!inside) continue;
        under.push_back(static_cast<int32_t>(position * layer.outputs));
        names.push_back(static_cast<uint8_t>(i));
      }
      under_begin.push_back(static_cast<int32_t>(under.size()));
    }
  }
}

}  // namespace dpk
