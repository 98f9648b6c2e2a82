#include <algorithm>
#include <cstdint>
#include <vector>

#include "sherman_morrison/sherman_morrison.h"

namespace dpk {
// The tiles of products that window.inl keeps in registers.
constexpr int64_t kGramTileLeft = 4;
constexpr int64_t kGramTileRight = 3;
}  // namespace dpk

#define DPK_KERNELS "sherman_morrison/window.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Columns are cut into slices, each with partial products of its own. Their number depends on the
// sizes alone, so that the sums do not depend on the threads. Measured: two threads break even at
// two slices of a few rows (4 x 16,384: 3.9 us on one thread, 4.8 on two; 4 x 65,536: 19.9
// and 14.6).
constexpr int64_t kColumnsPerSlice = 8192;
constexpr int64_t kMostSlices = 32;
// Columns of g that stay in the cache while all rows pass by. Measured: 1,024 / 4,096 / 16,384 take
// 2.47 / 2.20 / 2.09 ms for 16 x 1,000,000 and 6.60 / 6.12 / 5.64 ms for 64 x 500,000: longer
// pieces of rows let the prefetchers catch up.
constexpr int64_t kProjectColumns = 16384;
// Columns whose sums stay in the first-level cache, in double. Measured: 256 / 1,024 / 4,096 take
// 3.31 / 2.78 / 2.52 ms and 6.60 / 6.01 / 5.91 ms for the same windows.
constexpr int64_t kCombineColumns = 4096;
// Doubles of a block of the window that are multiplied at a time, in whole vectors of 8 columns.
// Measured: 4,096 / 8,192 / 24,576 take 13.8 / 12.1 / 12.5 ms and 54.5 / 54.7 / 50.8 ms.
constexpr int64_t kGramBlock = 24576;

int64_t slices_of(int64_t d) { return std::clamp<int64_t>(d / kColumnsPerSlice, 1, kMostSlices); }

int tasks_for(int64_t pieces, const Executor& executor) {
  return static_cast<int>(std::min<int64_t>(pieces, executor.threads));
}

// Calls body(task, slice, begin, end) for the columns [begin, end) of every slice.
template <class Body>
void for_each_slice(int64_t d, int tasks, const Executor& executor, Body&& body) {
  const int64_t slices = slices_of(d);
  for_each_task(executor, tasks, [&](int task) {
    const int64_t last = slices * (task + 1) / tasks;
    for (int64_t s = slices * task / tasks; s < last; ++s) {
      body(task, s, d * s / slices, d * (s + 1) / slices);
    }
  });
}

}  // namespace

template <class T>
void window_project(const Window<T>& w, const T* g, double* products, const Executor& executor) {
  auto* const project = DPK_FOR_ISA(active_isa(), project_block<T>);
  const int64_t slices = slices_of(w.d);
  std::vector<double> partial(slices * w.k);
  for_each_slice(w.d, tasks_for(slices, executor), executor,
                 [&](int, int64_t slice, int64_t begin, int64_t end) {
                   for (int64_t j = begin; j < end; j += kProjectColumns) {
                     project(w.data + j, w.row_stride, w.k, std::min(kProjectColumns, end - j),
                             g + j, partial.data() + slice * w.k);
                   }
                 });
  for (int64_t i = 0; i < w.k; ++i) {
    products[i] = 0.0;
    for (int64_t s = 0; s < slices; ++s) products[i] += partial[s * w.k + i];
  }
}

template <class T>
void window_combine(const Window<T>& w, const T* g, const double* weights, double scale, T* out,
                    const Executor& executor) {
  auto* const combine = DPK_FOR_ISA(active_isa(), combine_block<T>);
  for_each_slice(w.d, tasks_for(slices_of(w.d), executor), executor,
                 [&](int, int64_t, int64_t begin, int64_t end) {
                   double sums[kCombineColumns];
                   for (int64_t j = begin; j < end; j += kCombineColumns) {
                     combine(w.data + j, w.row_stride, w.k, std::min(kCombineColumns, end - j),
                             g + j, weights, scale, sums, out + j);
                   }
                 });
}

namespace {

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// How window_gram lays out its workspace, in doubles: for each slice its products, [k, k + 1], and
// for each task a block of both sides and the tiles of their products. The left side is v (or u),
// the right side u and below it g. Rows that fill up a tile are zero.
struct GramPlan {
  int64_t k, left, right, columns, slices, left_block, right_block, tiles;
  int tasks;

  GramPlan(int64_t k, int64_t d, bool symmetric, int64_t tile_doubles, const Executor& executor)
      : k(k),
        left(round_up(k, kGramTileLeft)),
        right(round_up(k + 1, kGramTileRight)),
        columns(std::clamp<int64_t>(kGramBlock / (k + 1), 128, 1024) / 8 * 8),
        slices(slices_of(d)),
        left_block(symmetric ? 0 : left * columns),
        right_block(std::max(left, right) * columns),
        tiles(left / kGramTileLeft * (right / kGramTileRight) * tile_doubles),
        tasks(tasks_for(slices, executor)) {}

  int64_t task_doubles() const { return left_block + right_block + tiles; }
  int64_t doubles() const { return slices * k * (k + 1) + tasks * task_doubles(); }
};

// n <= columns elements of k rows as doubles; what is left of a block's row is zero.
template <class T, class Widen>
void widen_rows(Widen widen, const T* rows, int64_t stride, int64_t k, int64_t n, int64_t columns,
                double* block) {
  for (int64_t i = 0; i < k; ++i) {
    widen(rows + i * stride, n, block + i * columns);
    std::fill(block + i * columns + n, block + (i + 1) * columns, 0.0);
  }
}

// products [k, k + 1] from the tiles, whose lanes are added up; below the diagonal of a symmetric
// matrix is what is above.
void collect_products(const GramPlan& plan, const double* tiles, int64_t tile_doubles,
                      bool symmetric, double* products) {
  const int64_t lanes = tile_doubles / (kGramTileLeft * kGramTileRight);
  for (int64_t i = 0; i < plan.k; ++i) {
    for (int64_t j = 0; j <= plan.k; ++j) {
      const bool mirrored = symmetric && j < i;
      const int64_t row = mirrored ? j : i, column = mirrored ? i : j;
      const int64_t tile =
          row / kGramTileLeft * (plan.right / kGramTileRight) + column / kGramTileRight;
      const int64_t within = row % kGramTileLeft * kGramTileRight + column % kGramTileRight;
      double total = 0.0;
      for (int64_t lane = 0; lane < lanes; ++lane) {
        total += tiles[tile * tile_doubles + within * lanes + lane];
      }
      products[i * (plan.k + 1) + j] = total;
    }
  }
}

}  // namespace

int64_t window_gram_workspace(int64_t k, int64_t d, bool symmetric, const Executor& executor) {
  return GramPlan(k, d, symmetric, DPK_FOR_ISA(active_isa(), tile_doubles)(), executor).doubles();
}

template <class T>
void window_gram(const Window<T>& u, const T* v, int64_t v_row_stride, const T* g, double* products,
                 double* workspace, const Executor& executor) {
  const Isa isa = active_isa();
  auto* const widen = DPK_FOR_ISA(isa, widen_row<T>);
  auto* const multiply = DPK_FOR_ISA(isa, multiply_tiles);
  const int64_t tile_doubles = DPK_FOR_ISA(isa, tile_doubles)();
  const bool symmetric = v == nullptr;
  const GramPlan plan(u.k, u.d, symmetric, tile_doubles, executor);
  const int64_t k = u.k, count = k * (k + 1), columns = plan.columns;
  const auto multiply_slice = [&](int task, int64_t slice, int64_t begin, int64_t end) {
    double* const right = workspace + plan.slices * count + task * plan.task_doubles();
    double* const left = symmetric ? right : right + plan.right_block;
    double* const tiles = right + plan.right_block + plan.left_block;
    std::fill(right, right + plan.task_doubles(), 0.0);
    for (int64_t j = begin; j < end; j += columns) {
      const int64_t n = std::min(columns, end - j);
      widen_rows(widen, u.data + j, u.row_stride, k, n, columns, right);
      widen_rows(widen, g + j, 0, 1, n, columns, right + k * columns);
      if (!symmetric) widen_rows(widen, v + j, v_row_stride, k, n, columns, left);
      multiply(left, plan.left, right, plan.right, columns, symmetric, tiles);
    }
    collect_products(plan, tiles, tile_doubles, symmetric, workspace + slice * count);
  };
  for_each_slice(u.d, plan.tasks, executor, multiply_slice);
  for (int64_t i = 0; i < count; ++i) {
    products[i] = 0.0;
    for (int64_t s = 0; s < plan.slices; ++s) products[i] += workspace[s * count + i];
  }
}

#define DPK_INSTANTIATE(T)                                                                      \
  template void window_project<T>(const Window<T>&, const T*, double*, const Executor&);        \
  template void window_combine<T>(const Window<T>&, const T*, const double*, double, T*,        \
                                  const Executor&);                                             \
  template void window_gram<T>(const Window<T>&, const T*, int64_t, const T*, double*, double*, \
                               const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)

}  // namespace dpk
