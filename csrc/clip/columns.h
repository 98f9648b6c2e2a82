// The columns of a list of tensors, laid end to end, and how they are shared out to tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "clip/clip.h"

namespace dpk {

// Task boundaries fall on whole cache lines of float sums.
constexpr int64_t kColumnAlignment = 16;

inline int64_t total_columns(const Rows& rows) {
  int64_t total = 0;
  for (int64_t l = 0; l < rows.count; ++l) total += rows.tensors[l].cols;
  return total;
}

inline const char* row_address(const RowTensor& tensor, int64_t row, int64_t column,
                               int64_t element_bytes) {
  return static_cast<const char*>(tensor.data) + (row * tensor.row_stride + column) * element_bytes;
}

struct ColumnSpan {
  int64_t begin, end;
};

inline ColumnSpan columns_of_task(int64_t columns, int task, int tasks) {
  const int64_t lines = (columns + kColumnAlignment - 1) / kColumnAlignment;
  return {std::min(columns, lines * task / tasks * kColumnAlignment),
          std::min(columns, lines * (task + 1) / tasks * kColumnAlignment)};
}

// Calls body(l, begin, end, first) for the columns [begin, end) of tensor l that lie in the span;
// `first` is where the columns of that tensor begin.
template <class Body>
void for_each_piece(const Rows& rows, ColumnSpan span, Body&& body) {
  int64_t first = 0;
  for (int64_t l = 0; l < rows.count; ++l) {
    const int64_t begin = std::max<int64_t>(span.begin - first, 0);
    const int64_t end = std::min(span.end - first, rows.tensors[l].cols);
    if (begin < end) body(l, begin, end, first);
    first += rows.tensors[l].cols;
  }
}

}  // namespace dpk
