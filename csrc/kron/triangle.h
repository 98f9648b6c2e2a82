// Upper triangles that several tasks have summed, put together into one symmetric matrix.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/executor.h"

namespace dpk {

// `count` partial sums, `distance` elements apart, of a [size, size] matrix with rows `stride`
// elements apart: only elements on and above the diagonal count.
template <class T>
struct PartialTriangles {
  const T* data;
  int64_t count, distance, size, stride;
};

// Tile of the copy: its rows and, mirrored, its columns are then whole cache lines of the output.
constexpr int64_t kMirrorTile = 32;

// out[place[i], place[j]] = out[place[j], place[i]] = scale * sum of the partials (i, j). `place`
// is a permutation, or null for the identity; out may be the one partial itself then.
template <class T>
void mirror_tile(const PartialTriangles<T>& partials, const int64_t* place, T scale, T* out,
                 int64_t first_row, int64_t first_col) {
  const int64_t n = partials.size;
  const int64_t rows = std::min(kMirrorTile, n - first_row);
  const int64_t cols = std::min(kMirrorTile, n - first_col);
  T tile[kMirrorTile][kMirrorTile];
  for (int64_t i = 0; i < rows; ++i) {
    const T* const from = partials.data + (first_row + i) * partials.stride + first_col;
    for (int64_t j = 0; j < cols; ++j) tile[i][j] = from[j];
    for (int64_t p = 1; p < partials.count; ++p) {
      for (int64_t j = 0; j < cols; ++j) tile[i][j] += from[p * partials.distance + j];
    }
    for (int64_t j = 0; j < cols; ++j) tile[i][j] *= scale;
  }
  const auto at = [&](int64_t i) { return place == nullptr ? i : place[i]; };
  for (int64_t i = 0; i < rows; ++i) {
    T* const to = out + at(first_row + i) * n;
    for (int64_t j = std::max<int64_t>(0, first_row + i - first_col); j < cols; ++j) {
      to[at(first_col + j)] = tile[i][j];
    }
  }
  for (int64_t j = 0; j < cols; ++j) {
    T* const to = out + at(first_col + j) * n;
    for (int64_t i = 0; i < std::min(rows, first_col + j - first_row); ++i) {
      to[at(first_row + i)] = tile[i][j];
    }
  }
}

template <class T>
void mirror(const PartialTriangles<T>& partials, const int64_t* place, double scale, T* out,
            const Executor& executor) {
  const int64_t strips = (partials.size + kMirrorTile - 1) / kMirrorTile;
  // Four strips for a task, at least: fewer are copied before a second thread has started.
  const int tasks = static_cast<int>(std::clamp<int64_t>(strips / 4, 1, executor.threads));
  for_each_task(executor, tasks, [&](int task) {
    // Strips get shorter towards the end, so they are dealt out in turn.
    for (int64_t strip = task; strip < strips; strip += tasks) {
      for (int64_t other = strip; other < strips; ++other) {
        mirror_tile(partials, place, static_cast<T>(scale), out, strip * kMirrorTile,
                    other * kMirrorTile);
      }
    }
  });
}

}  // namespace dpk
