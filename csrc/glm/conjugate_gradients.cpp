#include "glm/conjugate_gradients.h"

#include <algorithm>
#include <cmath>

#include "common/element.h"
#include "common/gemm.h"
#include "glm/thin_product.h"
#define DPK_KERNELS "glm/conjugate_gradients.inl"
#include "common/for_each_isa.h"

namespace dpk {

template <class T>
ConjugateGradients<T>::ConjugateGradients(int64_t classes, int64_t features, int64_t most_records)
    : classes_(classes),
      features_(features),
      scores_(new T[classes * most_records]),
      remainder_(new T[classes * features]),
      direction_(new T[classes * features]),
      image_(new T[classes * features]),
      gemm_(new char[gemm_workspace_bytes<T>()]) {}

template <class T>
void ConjugateGradients<T>::apply(const HessianOperator<T>& hessian, const T* v, T* out) {
  few_rows_product<T>(classes_, hessian.count, features_, v, features_, hessian.xt, hessian.xt_ld,
                      /*padded=*/true, scores_.get(), hessian.count, gemm_.get());
  DPK_FOR_ISA(active_isa(), curve_scores<T>)
  (hessian.table, classes_, hessian.count, scores_.get());
  few_rows_product<T>(classes_, features_, hessian.count, scores_.get(), hessian.count, hessian.x,
                      hessian.row_stride, /*padded=*/false, out, features_, gemm_.get());
  DPK_FOR_ISA(active_isa(), add_scaled<T>)(out, T(hessian.gamma), v, classes_ * features_);
}

template <class T>
int64_t ConjugateGradients<T>::solve(const HessianOperator<T>& hessian, const T* v,
                                     const CgLimits& limits, T* y) {
  const Isa isa = active_isa();
  const auto dot_of = DPK_FOR_ISA(isa, dot<T>);
  const auto add = DPK_FOR_ISA(isa, add_scaled<T>);
  const int64_t n = classes_ * features_;
  T *const r = remainder_.get(), *const p = direction_.get(), *const image = image_.get();
  std::fill(y, y + n, T(0));
  std::copy(v, v + n, r);
  std::copy(v, v + n, p);
  const double start = dot_of(v, v, n);
  const double wanted = limits.tolerance * limits.tolerance * start;
  double square = start;
  int64_t iteration = 0;
  for (; iteration < limits.iterations && square > wanted; ++iteration) {
    apply(hessian, p, image);
    const double curvature = dot_of(p, image, n);
    // Not positive: rounding has used up the direction, or gamma is too small.
    if (!(curvature > 0)) break;
    const double step = square / curvature;
    add(y, T(step), p, n);
    add(r, T(-step), image, n);
    const double before = square;
    square = dot_of(r, r, n);
    DPK_FOR_ISA(isa, scale_and_add<T>)(p, T(square / before), r, n);
  }
  apply(hessian, y, image);
  DPK_FOR_ISA(isa, scale_and_add<T>)(image, T(-1), v, n);
  residual_ = start == 0 ? 0 : std::sqrt(dot_of(image, image, n) / start);
  return iteration;
}

template class ConjugateGradients<float>;
template class ConjugateGradients<double>;

}  // namespace dpk
