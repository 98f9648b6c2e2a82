#include "glm/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/element.h"
#include "common/gemm.h"
#include "glm/records.h"
#include "glm/thin_product.h"
#define DPK_KERNELS "glm/low_rank.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// How many times gamma an element of D's diagonal may be: D - Z^T Z rounds D, and H may be far
// smaller, where predictions are nearly certain. Largest error relative to float64 that was
// measured over weights of four scales, 64 x 10, 100 records, with this and with a Cholesky
// factorisation of H: at 8 times gamma 2.1e-7 and 5.6e-7, at 25 5.2e-7 and 5.6e-7, at 80 1.5e-6
// and 8.7e-7, at 250 5.4e-6 and 2.1e-6.
constexpr double kMostCurvature = 32;

// How many roundings of (H + gamma I) y may be left of v. Measured on the same systems, 720 of
// them, without the limit above: 0.3 in the middle, at most 1.4 in float32 and 1.2 in float64.
constexpr double kMostRoundings = 4;

}  // namespace

template <class T>
LowRankSystem<T>::LowRankSystem(int64_t classes, int64_t features)
    : classes_(classes),
      features_(features),
      capacitance_(0),
      gram_(features),
      operator_(classes, features, 0),
      remainder_(new T[classes * features]) {
  for (int64_t a = 0; a < classes; ++a) blocks_.emplace_back(features);
}

template <class T>
bool LowRankSystem<T>::pays(int64_t classes, int64_t features, int64_t records) {
  const double c = double(classes), d = double(features), b = double(records), n = (c - 1) * d;
  const double low_rank = c * (2 * b * d * d + d * d * d / 3 + b * b * d) + b * b * b / 3;
  const double whole = c * (c - 1) / 2 * b * d * d + n * n * n / 3;
  // Its products are smaller, so that fewer flops are not always less time. Measured, flops and
  // time of the one relative to the other: 10 x 64, 100 records 0.19 and 0.37; 200 records 0.45 and
  // 0.54; 10 x 16, 50 records 0.45 and 0.54; 10 x 200, 200 records 0.12 and 0.17; but 4 x 64, 50
  // records 0.74 and 1.28, 5 x 64, 100 records 0.83 and 1.15.
  return 2 * low_rank < whole;
}

template <class T>
bool LowRankSystem<T>::factorise(const HessianOperator<T>& hessian) {
  const Isa isa = active_isa();
  const ClassPair<T>& table = hessian.table;
  const int64_t count = hessian.count, rows = classes_ * features_;
  if (hessian.xt_ld > capacity_) {
    capacity_ = hessian.xt_ld;
    y_.reset(new T[rows * capacity_]);
    roots_.reset(new T[2 * capacity_]);
    sums_.reset(new T[capacity_]);
    operator_ = ConjugateGradients<T>(classes_, features_, capacity_);
  }
  ld_ = hessian.xt_ld;
  T *const roots = roots_.get(), *const weights = roots + ld_;
  DPK_FOR_ISA(isa, square_roots<T>)(table.factors, count, roots);
  largest_ = 0;
  for (int64_t a = 0; a < classes_; ++a) {
    const T* const p = table.p + a * table.ld;
    Cholesky<T>& block = blocks_[a];
    const auto weigh = [&](int64_t begin, int64_t end, T* to) {
      DPK_FOR_ISA(isa, multiply_weights<T>)(table.factors + begin, p + begin, end - begin, to);
    };
    gram_.sum(hessian.x, hessian.row_stride, count, weigh, block.matrix(), features_,
              /*mirror=*/false);
    for (int64_t j = 0; j < features_; ++j) {
      largest_ = std::max(largest_, double(block.matrix()[j * (features_ + 1)]));
    }
    if (!(largest_ <= kMostCurvature * hessian.gamma)) return false;
    if (block.factorise(hessian.gamma) != 0) return false;
    T* const y = y_.get() + a * features_ * ld_;
    DPK_FOR_ISA(isa, multiply_weights<T>)(roots, p, count, weights);
    DPK_FOR_ISA(isa, scale_columns<T>)(hessian.xt, ld_, features_, count, weights, y);
    block.solve_left(y, ld_, count);
  }
  capacitance_.resize(count);
  gemm_upper<T>(count, rows, {y_.get(), 1, ld_}, {y_.get(), ld_, 1}, capacitance_.matrix(), count,
                /*accumulate=*/false);
  DPK_FOR_ISA(isa, negate_upper<T>)(capacitance_.matrix(), count);
  return capacitance_.factorise(1.0) == 0;
}

template <class T>
void LowRankSystem<T>::apply_inverse(T* x) {
  const int64_t rows = classes_ * features_, count = capacitance_.size();
  for (int64_t a = 0; a < classes_; ++a) blocks_[a].solve_left(x + a * features_);
  few_rows_product<T>(1, count, rows, x, rows, y_.get(), ld_, /*padded=*/false, sums_.get(), count,
                      /*workspace=*/nullptr);
  capacitance_.solve(sums_.get());
  DPK_FOR_ISA(active_isa(), add_products<T>)(y_.get(), ld_, rows, count, sums_.get(), x);
  for (int64_t a = 0; a < classes_; ++a) blocks_[a].solve_right(x + a * features_);
}

template <class T>
bool LowRankSystem<T>::solve(const HessianOperator<T>& hessian, const T* v, T* y) {
  const Isa isa = active_isa();
  const int64_t n = classes_ * features_;
  T* const remainder = remainder_.get();
  std::copy(v, v + n, y);
  apply_inverse(y);
  operator_.apply(hessian, y, remainder);
  DPK_FOR_ISA(isa, difference<T>)(v, remainder, n, remainder);
  apply_inverse(remainder);
  const double square = DPK_FOR_ISA(isa, add_vector<T>)(y, remainder, n);
  operator_.apply(hessian, y, remainder);
  const double left = DPK_FOR_ISA(isa, difference<T>)(v, remainder, n, remainder);
  const double scale = largest_ + hessian.gamma;
  const double eps = double(std::numeric_limits<T>::epsilon());
  return std::sqrt(left) <= kMostRoundings * eps * scale * std::sqrt(square);
}

template class LowRankSystem<float>;
template class LowRankSystem<double>;

}  // namespace dpk
