#include "glm/records.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "clip/clip.h"
#include "common/element.h"
#define DPK_KERNELS "glm/records.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// The logits of a block, [classes, kRecordBlock], into scratch.p.
template <class T>
void block_logits(const ClientRecords<T>& records, const T* theta, const T* x, int64_t count,
                  RecordScratch<T>& scratch) {
  const int64_t features = records.features;
  const double* wide_theta;
  MatrixView<double> wide_x;
  if constexpr (std::is_same_v<T, float>) {
    const auto widen = DPK_FOR_ISA(active_isa(), widen_rows);
    widen(theta, features, records.classes, features, scratch.theta.get());
    widen(x, records.row_stride, count, features, scratch.x.get());
    wide_theta = scratch.theta.get();
    wide_x = {scratch.x.get(), features, 1};
  } else {
    wide_theta = theta;
    wide_x = {x, records.row_stride, 1};
  }
  // The lanes of the last vector that hold no record.
  DPK_FOR_ISA(active_isa(), fill_columns)(records.classes, count, kRecordBlock, scratch.p.get());
  gemm<double>(records.classes, count, features, {wide_theta, features, 1}, wide_x.transposed(),
               scratch.p.get(), kRecordBlock, /*accumulate=*/false, scratch.gemm.get());
}

template <class T>
void tabulate_block(const ClientRecords<T>& records, int64_t client, int64_t begin, int64_t count,
                    ClipBounds bounds, const RecordTable<T>& table, RecordScratch<T>& scratch) {
  const Isa isa = active_isa();
  const T* x = records.x + begin * records.row_stride;
  const int64_t* labels = records.labels == nullptr ? nullptr : records.labels + begin;
  const int64_t classes = records.classes;
  double *const p = scratch.p.get(), *const q = scratch.q.get();
  block_logits(records, records.theta + client * records.theta_stride, x, count, scratch);
  DPK_FOR_ISA(isa, softmax_block)
  (classes, count, labels, p, q, scratch.gradient.get(), scratch.hessian.get());
  row_squares(x, records.row_stride, count, records.features, scratch.sq_norms.get());
  T* const factors = scratch.factors.get();
  if (table.gradient_sq_norms != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const double sq_norm = (scratch.gradient[i] + kLostSquares) * scratch.sq_norms[i];
      table.gradient_sq_norms[i] = sq_norm;
      factors[i] = clip_factor_of<T>(sq_norm, bounds.gradient);
    }
    if (table.residuals != nullptr) {
      DPK_FOR_ISA(isa, store_residuals<T>)
      (classes, count, p, q, labels, factors, table.residuals, table.ld);
    }
  }
  if (table.hessian_sq_norms == nullptr) return;
  for (int64_t i = 0; i < count; ++i) {
    const double square = scratch.sq_norms[i];
    table.hessian_sq_norms[i] = (scratch.hessian[i] + kLostSquares) * square * square;
    factors[i] = clip_factor_of<T>(table.hessian_sq_norms[i], bounds.hessian);
    if (table.hessian_factors != nullptr) table.hessian_factors[i] = factors[i];
  }
  if (table.p == nullptr) return;
  DPK_FOR_ISA(isa, store_table<T>)(classes, count, p, factors, table.p, table.ld);
  DPK_FOR_ISA(isa, store_table<T>)(classes, count, q, factors, table.q, table.ld);
}

}  // namespace

template <class T>
T clip_factor_of(double sq_norm, double bound) {
  if (!(std::isfinite(sq_norm) && sq_norm >= 0.0)) return T(0);
  const double factor = clip_factor(sq_norm, bound, /*normalise=*/false, 0.0);
  if constexpr (std::is_same_v<T, float>) return round_factor_down(factor);
  return T(factor);
}

template <class T>
RecordScratch<T>::RecordScratch(int64_t classes, int64_t features)
    : p(new double[classes * kRecordBlock]),
      q(new double[classes * kRecordBlock]),
      sq_norms(new double[kRecordBlock]),
      gradient(new double[kRecordBlock]),
      hessian(new double[kRecordBlock]),
      factors(new T[kRecordBlock]),
      gemm(new char[gemm_workspace_bytes<double>()]) {
  if constexpr (std::is_same_v<T, float>) {
    theta.reset(new double[classes * features]);
    x.reset(new double[kRecordBlock * features]);
  }
}

template <class T>
void tabulate_records(const ClientRecords<T>& records, int64_t client, int64_t begin, int64_t end,
                      ClipBounds bounds, const RecordTable<T>& table, RecordScratch<T>& scratch) {
  for (int64_t row = begin; row < end; row += kRecordBlock) {
    tabulate_block(records, client, row, std::min(kRecordBlock, end - row), bounds,
                   table.from(row - begin), scratch);
  }
}

template <class T>
FiniteRows<T>::FiniteRows(const ClientRecords<T>& records, int64_t begin, int64_t end)
    : data(records.x + begin * records.row_stride),
      row_stride(records.row_stride),
      count(end - begin) {
  const int64_t features = records.features;
  std::vector<double> squares(count);
  row_squares(data, row_stride, count, features, squares.data());
  const auto finite = [](double square) { return std::isfinite(square); };
  if (std::all_of(squares.begin(), squares.end(), finite)) return;
  copy_.assign(count * features, T(0));
  for (int64_t i = 0; i < count; ++i) {
    const T* const row = data + i * row_stride;
    if (finite(squares[i])) std::copy(row, row + features, copy_.begin() + i * features);
  }
  data = copy_.data();
  row_stride = features;
}

template <class T>
void row_squares(const T* x, int64_t row_stride, int64_t count, int64_t features, double* squares) {
  DPK_FOR_ISA(active_isa(), squares_of_rows<T>)(x, row_stride, count, features, squares);
}

#define DPK_INSTANTIATE(T)                                                              \
  template class RecordScratch<T>;                                                      \
  template class FiniteRows<T>;                                                         \
  template T clip_factor_of<T>(double, double);                                         \
  template void row_squares<T>(const T*, int64_t, int64_t, int64_t, double*);           \
  template void tabulate_records<T>(const ClientRecords<T>&, int64_t, int64_t, int64_t, \
                                    ClipBounds, const RecordTable<T>&, RecordScratch<T>&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
