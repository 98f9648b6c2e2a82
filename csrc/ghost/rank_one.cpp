#include "ghost/rank_one.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/gemm.h"
#define DPK_KERNELS "ghost/linear_rows.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Columns that are shared out together: whole tiles of the product and whole cache lines.
constexpr int64_t kGrain = 16;
// Where a second thread begins to pay (see linear_norms.cpp): 25 us of work at 80 GFLOP/s.
constexpr double kFlopsPerTask = 2e6;
// A square in double, from memory, takes as long as so many multiply-adds of a product: 0.3 ns.
constexpr double kSquare = 12.0;

// Measures, and transforms where there is a matrix, rows with elements of E.
template <class E>
class RankOnePass {
 public:
  using T = typename SumOf<E>::type;

  RankOnePass(const RankOneSide& activations, const RankOneSide& errors, int64_t batch)
      : sides_{activations, errors}, batch_(batch) {}

  void run(bool bias, double* sq_norms, const Executor& executor) const {
    const double work = work_of(sides_[0]) + work_of(sides_[1]);
    const int tasks = static_cast<int>(
        std::clamp(2.0 * double(batch_) * work / kFlopsPerTask, 1.0, double(executor.threads)));
    // Squares of both sides' rows, as every task found them.
    std::vector<double> squares(2 * tasks * batch_, 0.0);
    // Both sides are one line of columns (rows, where the rank is low), cut into equal work: no
    // thread waits between them.
    for_each_task(executor, tasks, [&](int task) {
      double* const mine = squares.data() + 2 * task * batch_;
      const double begin = work * task / tasks, end = work * (task + 1) / tasks;
      measure(sides_[0], begin, end, mine);
      measure(sides_[1], begin - work_of(sides_[0]), end - work_of(sides_[0]), mine + batch_);
    });
    for (int64_t b = 0; b < batch_; ++b) {
      double a = bias ? 1.0 : 0.0, d = 0.0;
      for (int task = 0; task < tasks; ++task) {
        a += squares[2 * task * batch_ + b];
        d += squares[(2 * task + 1) * batch_ + b];
      }
      sq_norms[b] = a * d;
    }
  }

 private:
  static int64_t columns_of(const RankOneSide& side) {
    return side.form == RankOneForm::none ? side.width : side.size;
  }

  // Multiply-adds for each column of a row: those of the product, and those of its square.
  static double work_of_column(const RankOneSide& side) {
    if (side.form == RankOneForm::low_rank) return kSquare + 2.0 * double(side.rank);
    return side.form == RankOneForm::none ? kSquare : kSquare + double(side.width);
  }

  static double work_of(const RankOneSide& side) {
    return double(columns_of(side)) * work_of_column(side);
  }

  // The column at which so much of a side's work is done.
  static int64_t column_at(const RankOneSide& side, double work) {
    if (work <= 0.0) return 0;
    if (work >= work_of(side)) return columns_of(side);
    return static_cast<int64_t>(work / work_of_column(side)) / kGrain * kGrain;
  }

  // The row at which so much of a side's work is done, if it is done row by row.
  int64_t row_at(const RankOneSide& side, double work) const {
    if (work <= 0.0) return 0;
    if (work >= work_of(side)) return batch_;
    return static_cast<int64_t>(work / work_of(side) * double(batch_));
  }

  // Does the part of a side in which its work goes from `begin` to `end`.
  void measure(const RankOneSide& side, double begin, double end, double* squares) const {
    if constexpr (std::is_same_v<E, T>) {
      if (side.form == RankOneForm::low_rank) {
        return multiply_rows(side, row_at(side, begin), row_at(side, end), squares);
      }
    }
    const int64_t first = column_at(side, begin), count = column_at(side, end) - first;
    if (count <= 0) return;
    if constexpr (std::is_same_v<E, T>) {
      if (side.form == RankOneForm::full) {
        T* const transformed = static_cast<T*>(side.transformed) + first;
        multiply(side, first, count, transformed);
        return add_squares(transformed, side.size, count, squares);
      }
    }
    add_squares(static_cast<const E*>(side.rows) + first, side.row_stride, count, squares);
  }

  // Columns [first, first + count) of x U, or of [x, 1] U.
  void multiply(const RankOneSide& side, int64_t first, int64_t count, T* out) const {
    const T* const matrix = static_cast<const T*>(side.matrix) + first;
    const bool augment = side.size > side.width;
    if (augment) {
      const T* const last = matrix + side.width * side.matrix_stride;
      for (int64_t b = 0; b < batch_; ++b) std::copy(last, last + count, out + b * side.size);
    }
    gemm<T>(batch_, count, side.width, {static_cast<const T*>(side.rows), side.row_stride, 1},
            {matrix, side.matrix_stride, 1}, out, side.size, augment);
  }

  // Rows [first, last) of tail x + ((x V) gains) V^T, gains being values - tail.
  void multiply_rows(const RankOneSide& side, int64_t first, int64_t last, double* squares) const {
    const int64_t count = last - first, rank = side.rank, stride = side.matrix_stride;
    if (count <= 0) return;
    const T* const x = static_cast<const T*>(side.rows) + first * side.row_stride;
    const T* const vectors = static_cast<const T*>(side.matrix);
    const T* const values = static_cast<const T*>(side.values);
    const T tail = static_cast<T>(side.tail);
    T* const out = static_cast<T*>(side.transformed) + first * side.size;
    const bool augment = side.size > side.width;
    std::vector<T> inner(count * rank);
    if (augment) {
      const T* const behind = vectors + side.width * stride;
      for (int64_t b = 0; b < count; ++b) std::copy(behind, behind + rank, inner.data() + b * rank);
    }
    gemm<T>(count, rank, side.width, {x, side.row_stride, 1}, {vectors, stride, 1}, inner.data(),
            rank, augment);
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t r = 0; r < rank; ++r) inner[b * rank + r] *= values[r] - tail;
      const T* const from = x + b * side.row_stride;
      T* const to = out + b * side.size;
      for (int64_t j = 0; j < side.width; ++j) to[j] = tail * from[j];
      if (augment) to[side.width] = tail;
    }
    gemm<T>(count, side.size, rank, {inner.data(), rank, 1}, {vectors, 1, stride}, out, side.size,
            /*accumulate=*/true);
    const auto sq_norm = DPK_FOR_ISA(active_isa(), sq_norm<T>);
    for (int64_t b = 0; b < count; ++b) {
      squares[first + b] += sq_norm(out + b * side.size, side.size);
    }
  }

  template <class V>
  void add_squares(const V* rows, int64_t stride, int64_t count, double* squares) const {
    const auto sq_norm = DPK_FOR_ISA(active_isa(), sq_norm<V>);
    for (int64_t b = 0; b < batch_; ++b) squares[b] += sq_norm(rows + b * stride, count);
  }

  const RankOneSide sides_[2];
  const int64_t batch_;
};

}  // namespace

void rank_one_sq_norms(const RankOneSide& activations, const RankOneSide& errors, int64_t batch,
                       Dtype dtype, bool bias, double* sq_norms, const Executor& executor) {
  switch (dtype) {
    case Dtype::bf16:
      return RankOnePass<BFloat16>(activations, errors, batch).run(bias, sq_norms, executor);
    case Dtype::f16:
      return RankOnePass<Float16>(activations, errors, batch).run(bias, sq_norms, executor);
    case Dtype::f64:
      return RankOnePass<double>(activations, errors, batch).run(bias, sq_norms, executor);
    default:
      return RankOnePass<float>(activations, errors, batch).run(bias, sq_norms, executor);
  }
}

}  // namespace dpk
