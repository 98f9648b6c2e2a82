#include <algorithm>
#include <vector>

#include "common/gemm.h"
#include "kron_sum/kron_sum.h"

namespace dpk {
namespace {

// Rows of the result that are shared out together: the rows of gemm's tile on AVX2, so that none of
// its tiles is cut by a border between tasks.
constexpr int64_t kRowGrain = 6;
// Multiply-adds that make a second thread worth its start: 6.6 us of them at the 80 GFLOP/s that
// gemm was measured at, where starting one takes about 3 us (noise/cpu.cpp: 25.3 us became 15.6).
constexpr int64_t kWorkPerTask = 1 << 18;

template <class T>
int64_t work_of_row(const KronSumLayer<T>& layer) {
  return layer.clients * layer.cols * (layer.rows + layer.cols);
}

// Where the share of each task begins, in groups of kRowGrain rows of all layers in one row: equal
// work for each. A row of the result is a row of every g_i times the rest, so tasks share nothing.
struct Share {
  int64_t layer, row;
};

template <class T>
std::vector<Share> shares(const KronSumLayer<T>* layers, int64_t count, const Executor& executor) {
  int64_t work = 0;
  for (int64_t l = 0; l < count; ++l) work += layers[l].rows * work_of_row(layers[l]);
  const int64_t tasks = std::clamp<int64_t>(work / kWorkPerTask, 1, executor.threads);
  std::vector<Share> begins{{0, 0}};
  int64_t done = 0;
  for (int64_t l = 0; l < count; ++l) {
    for (int64_t row = 0; row < layers[l].rows; row += kRowGrain) {
      const int64_t next = static_cast<int64_t>(begins.size());
      if (next < tasks && done >= work / tasks * next) begins.push_back({l, row});
      done += std::min(kRowGrain, layers[l].rows - row) * work_of_row(layers[l]);
    }
  }
  begins.push_back({count, 0});
  return begins;
}

// Elements that a task needs for one layer: all g_i x side by side, and one x - center.
template <class T>
int64_t scratch_elements(const KronSumLayer<T>* layers, int64_t count) {
  int64_t most = 0;
  for (int64_t l = 0; l < count; ++l) {
    const int64_t differences = layers[l].centers == nullptr ? 0 : 1;
    most = std::max(most, (layers[l].clients + differences) * layers[l].rows * layers[l].cols);
  }
  return most;
}

// Rows [begin, end) of one layer: [g_1 x, .., g_n x] times [a_1; ..; a_n] is one long product,
// which adds up the clients on the way.
template <class T>
void sum_rows(const KronSumLayer<T>& layer, int64_t begin, int64_t end, bool accumulate,
              T* scratch) {
  const int64_t rows = layer.rows, cols = layer.cols, width = layer.clients * cols;
  T* const difference = scratch + rows * width;
  for (int64_t i = 0; i < layer.clients; ++i) {
    const T* factor = layer.x;
    if (layer.centers != nullptr) {
      const T* const center = layer.centers + i * rows * cols;
      for (int64_t k = 0; k < rows * cols; ++k) difference[k] = layer.x[k] - center[k];
      factor = difference;
    }
    gemm<T>(end - begin, cols, rows, {layer.g + (i * rows + begin) * rows, rows, 1},
            {factor, cols, 1}, scratch + i * cols, width, false);
  }
  gemm<T>(end - begin, cols, width, {scratch, width, 1}, {layer.a, cols, 1},
          layer.out + begin * cols, cols, accumulate);
}

template <class T>
int64_t task_bytes(int64_t scratch) {
  return scratch * static_cast<int64_t>(sizeof(T));
}

}  // namespace

template <class T>
int64_t kron_sum_workspace_bytes(const KronSumLayer<T>* layers, int64_t count,
                                 const Executor& executor) {
  return executor.threads * task_bytes<T>(scratch_elements(layers, count));
}

template <class T>
void kron_sum(const KronSumLayer<T>* layers, int64_t count, bool accumulate, void* workspace,
              const Executor& executor) {
  const std::vector<Share> begins = shares(layers, count, executor);
  const int64_t scratch = scratch_elements(layers, count);
  for_each_task(executor, static_cast<int>(begins.size()) - 1, [&](int task) {
    T* const space = static_cast<T*>(workspace) + task * scratch;
    const Share from = begins[task], to = begins[task + 1];
    for (int64_t l = from.layer; l < count && l <= to.layer; ++l) {
      const int64_t begin = l == from.layer ? from.row : 0;
      const int64_t end = l == to.layer ? to.row : layers[l].rows;
      if (begin < end) sum_rows(layers[l], begin, end, accumulate, space);
    }
  });
}

#define DPK_INSTANTIATE(T)                                                                        \
  template int64_t kron_sum_workspace_bytes<T>(const KronSumLayer<T>*, int64_t, const Executor&); \
  template void kron_sum<T>(const KronSumLayer<T>*, int64_t, bool, void*, const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
