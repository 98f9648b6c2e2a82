// Rows that are added to sums while the rows after them are measured.
#pragma once

#include <cstdint>
#include <cstring>

#include "clip/clip.h"
#include "clip/columns.h"

namespace dpk {

// Rows that add_rows takes at a time, alone and together with as many that it measures.
constexpr int kMaxRows = 8;
constexpr int64_t kMaxGroup = 4;

// How far ahead of the norms memory is asked for, in elements. The prefetchers have hardly caught
// up with a short row when it ends, so there it is the next group. Measured from memory: 4096 x
// 1,000 takes 0.90 ms with the next group, 1.00 without, 1.05 with 256; 1024 x 20,000 3.8, 3.8
// and 3.6 ms; 256 x 200,000 10.9, 9.9 and 9.3 ms.
constexpr int64_t kShortRow = 2048;
constexpr int64_t kAhead = 256;

inline int64_t ahead_of(const RowTensor& tensor, int64_t group) {
  return tensor.cols < kShortRow ? group * tensor.row_stride : kAhead;
}

// The inner loops for a dtype on the instruction set in use.
struct Kernels {
  double (*sq_norm)(const void* row, int64_t n);
  void (*add_rows)(void* sum, const void* const* rows, const void* factors, int count, int64_t n,
                   bool overwrite, const void* const* next, int64_t ahead, double* sq_norms);
  int64_t element_bytes;
  int64_t sum_bytes;
};

struct Group {
  int64_t row, count;
};

// Adds rows, times their factors, to sums, and measures the rows that come next. Rows with factor
// zero are not looked at.
class RowAdder {
 public:
  RowAdder(const Rows& rows, const Kernels& kernels, const void* factors, int64_t factor_rows)
      : kernels(kernels), rows_(rows), factors_(factors), factor_rows_(factor_rows) {}

  // sum[begin, end) (+)= rows `now` of tensor l, columns [begin, end).
  void add(char* sum, int64_t l, int64_t begin, int64_t end, Group now, bool overwrite) const {
    const void* addresses[kMaxRows];
    alignas(8) char weights[kMaxRows * sizeof(double)];
    int filled = 0;
    for (int64_t r = now.row; r < now.row + now.count; ++r) {
      if (take(l, r, begin, filled, addresses, weights)) ++filled;
      if (filled == kMaxRows || (r + 1 == now.row + now.count && filled > 0)) {
        kernels.add_rows(sum + begin * kernels.sum_bytes, addresses, weights, filled, end - begin,
                         overwrite, nullptr, 0, nullptr);
        overwrite = false;
        filled = 0;
      }
    }
    if (overwrite) {
      std::memset(sum + begin * kernels.sum_bytes, 0, (end - begin) * kernels.sum_bytes);
    }
  }

  // The same, and sq_norms[i] += the squared norm of the columns of row i of `next`.
  void add_and_measure(char* sum, int64_t l, int64_t begin, int64_t end, Group now, bool overwrite,
                       Group next, double* sq_norms) const {
    const void* addresses[kMaxGroup];
    const void* next_addresses[kMaxGroup];
    alignas(8) char weights[kMaxGroup * sizeof(double)];
    int filled = 0;
    for (int64_t i = 0; i < next.count; ++i) {
      next_addresses[i] = row_address(rows_.tensors[l], next.row + i, begin, kernels.element_bytes);
    }
    for (int64_t r = now.row; r < now.row + now.count; ++r) {
      if (take(l, r, begin, filled, addresses, weights)) ++filled;
    }
    if (filled == next.count && (filled == 1 || filled == 2 || filled == 4)) {
      kernels.add_rows(sum + begin * kernels.sum_bytes, addresses, weights, filled, end - begin,
                       overwrite, next_addresses, ahead_of(rows_.tensors[l], next.count), sq_norms);
      return;
    }
    if (now.count > 0) add(sum, l, begin, end, now, overwrite);
    for (int64_t i = 0; i < next.count; ++i) {
      sq_norms[i] += kernels.sq_norm(next_addresses[i], end - begin);
    }
  }

  const Kernels kernels;

 private:
  // Puts row r and its factor at place `at`, unless the factor is zero.
  bool take(int64_t l, int64_t r, int64_t begin, int at, const void** addresses,
            char* weights) const {
    const int64_t index = (factor_rows_ > 1 ? l * rows_.batch : 0) + r;
    if (kernels.sum_bytes == sizeof(double)) {
      const double factor = static_cast<const double*>(factors_)[index];
      reinterpret_cast<double*>(weights)[at] = factor;
      if (factor == 0) return false;
    } else {
      const float factor = static_cast<const float*>(factors_)[index];
      reinterpret_cast<float*>(weights)[at] = factor;
      if (factor == 0) return false;
    }
    addresses[at] = row_address(rows_.tensors[l], r, begin, kernels.element_bytes);
    return true;
  }

  const Rows& rows_;
  const void* factors_;
  int64_t factor_rows_;
};

}  // namespace dpk
