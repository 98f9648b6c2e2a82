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

// The weights of a client as doubles.
template <class T>
const double* wide_weights(const ClientRecords<T>& records, const T* theta,
                           RecordScratch<T>& scratch) {
  if constexpr (std::is_same_v<T, double>) {
    return theta;
  } else {
    if (scratch.widened != theta) {
      DPK_FOR_ISA(active_isa(), widen_rows)
      (theta, records.features, records.classes, records.features, scratch.theta.get());
      scratch.widened = theta;
    }
    return scratch.theta.get();
  }
}

// The logits of a block, [classes, kRecordBlock], into scratch.p, and |x|^2 into scratch.sq_norms.
// Returns whether all of those are finite.
template <class T>
bool block_logits(const ClientRecords<T>& records, const T* theta, const T* x, int64_t count,
                  const RecordTable<T>& table, RecordScratch<T>& scratch) {
  const int64_t features = records.features, padded = padded_records(count);
  const bool kept = table.xt != nullptr;
  T* const xt = kept ? table.xt : scratch.xt.get();
  const int64_t ld = kept ? table.xt_ld : kRecordBlock;
  transpose(x, records.row_stride, count, features, xt, ld);
  const double* const weights = wide_weights(records, theta, scratch);
  DPK_FOR_ISA(active_isa(), logits_and_squares<T>)
  (records.classes, padded, features, weights, xt, ld, scratch.p.get(), scratch.sq_norms.get());
  // Zero times what is not finite is not zero.
  double none = 0;
  for (int64_t i = 0; i < count; ++i) none += 0.0 * scratch.sq_norms[i];
  return none == 0;
}

template <class T>
bool tabulate_block(const ClientRecords<T>& records, int64_t client, int64_t begin, int64_t count,
                    ClipBounds bounds, const RecordTable<T>& table, RecordScratch<T>& scratch) {
  const Isa isa = active_isa();
  const T* x = records.x + begin * records.row_stride;
  const int64_t* labels = records.labels == nullptr ? nullptr : records.labels + begin;
  const int64_t classes = records.classes;
  const T* const theta = records.theta + client * records.theta_stride;
  bool wide_gradients = true;
  if constexpr (std::is_same_v<T, float>) {
    // On the portable path the float residuals of a record were found to depend, in their last
    // bit, on its place among the others, for a reason not known yet: there they stay double.
    if (table.residuals != nullptr && isa != Isa::portable) {
      const bool finite = scratch.narrow->clip(
          {x, records.row_stride, count, records.features, classes, theta, labels, bounds.gradient,
           table.residuals, table.ld, table.gradient_sq_norms});
      if (table.hessian_sq_norms == nullptr) return finite;
      wide_gradients = false;
    }
  }
  double *const p = scratch.p.get(), *const q = scratch.q.get();
  const double* const squares = scratch.sq_norms.get();
  const bool finite = block_logits(records, theta, x, count, table, scratch);
  DPK_FOR_ISA(isa, softmax_block)
  (classes, count, labels, p, q, scratch.gradient.get(), scratch.hessian.get());
  T* const factors = scratch.factors.get();
  const auto norms = DPK_FOR_ISA(isa, multiply_norms);
  const auto clip = DPK_FOR_ISA(isa, factors_of_norms<T>);
  if (wide_gradients && table.gradient_sq_norms != nullptr) {
    norms(count, scratch.gradient.get(), squares, /*twice=*/false, table.gradient_sq_norms);
    if (table.residuals != nullptr) {
      clip(count, table.gradient_sq_norms, bounds.gradient, factors);
      DPK_FOR_ISA(isa, store_residuals<T>)
      (classes, count, p, q, labels, factors, table.residuals, table.ld);
    }
  }
  if (table.hessian_sq_norms == nullptr) return finite;
  norms(count, scratch.hessian.get(), squares, /*twice=*/true, table.hessian_sq_norms);
  if (table.p == nullptr) return finite;
  clip(count, table.hessian_sq_norms, bounds.hessian, table.hessian_factors);
  DPK_FOR_ISA(isa, store_table<T>)(classes, count, p, table.hessian_factors, table.p, table.ld);
  DPK_FOR_ISA(isa, store_table<T>)(classes, count, q, table.hessian_factors, table.q, table.ld);
  return finite;
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
      theta(new double[std::is_same_v<T, double> ? 0 : classes * features]),
      sq_norms(new double[kRecordBlock]),
      gradient(new double[kRecordBlock]),
      hessian(new double[kRecordBlock]),
      factors(new T[kRecordBlock]),
      xt(new T[kRecordBlock * features]),
      narrow(std::is_same_v<T, float> ? new FloatResiduals(classes, features) : nullptr) {}

template <class T>
bool tabulate_records(const ClientRecords<T>& records, int64_t client, int64_t begin, int64_t end,
                      ClipBounds bounds, const RecordTable<T>& table, RecordScratch<T>& scratch) {
  bool finite = true;
  for (int64_t row = begin; row < end; row += kRecordBlock) {
    finite &= tabulate_block(records, client, row, std::min(kRecordBlock, end - row), bounds,
                             table.from(row - begin), scratch);
  }
  return finite;
}

template <class T>
FiniteRows<T>::FiniteRows(const ClientRecords<T>& records, int64_t begin, int64_t end)
    : FiniteRows(records, begin, end, false) {}

template <class T>
FiniteRows<T>::FiniteRows(const ClientRecords<T>& records, int64_t begin, int64_t end, bool known)
    : data(records.x + begin * records.row_stride),
      row_stride(records.row_stride),
      count(end - begin) {
  if (known) return;
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

template <class T>
void transpose(const T* x, int64_t row_stride, int64_t count, int64_t features, T* xt, int64_t ld) {
  DPK_FOR_ISA(active_isa(), transpose_rows<T>)(x, row_stride, count, features, xt, ld);
}

#define DPK_INSTANTIATE(T)                                                              \
  template class RecordScratch<T>;                                                      \
  template class FiniteRows<T>;                                                         \
  template T clip_factor_of<T>(double, double);                                         \
  template void transpose<T>(const T*, int64_t, int64_t, int64_t, T*, int64_t);         \
  template void row_squares<T>(const T*, int64_t, int64_t, int64_t, double*);           \
  template bool tabulate_records<T>(const ClientRecords<T>&, int64_t, int64_t, int64_t, \
                                    ClipBounds, const RecordTable<T>&, RecordScratch<T>&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
