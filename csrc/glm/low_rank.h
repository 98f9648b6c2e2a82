// (H + gamma I)^-1 v of a client with few records, in one thread, without H.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "glm/cholesky.h"
#include "glm/conjugate_gradients.h"
#include "glm/gram.h"

namespace dpk {

// H = sum_i c_i (diag p_i - p_i p_i^T) (x) x_i x_i^T has one block for each class and, all over,
// one column for each record:
//   H + gamma I = D - Z^T Z,  D_a = sum_i c_i p_ia x_i x_i^T + gamma I,  Z_i = sqrt(c_i) p_i (x)
//   x_i.
// With D_a = U_a^T U_a and Y = U^-T Z^T (Woodbury's identity, symmetric),
//   (H + gamma I)^-1 = U^-1 (I + Y S^-1 Y^T) U^-T,  S = I - Y^T Y  [records, records].
template <class T>
class LowRankSystem {
 public:
  LowRankSystem(int64_t classes, int64_t features);

  // Whether this takes fewer flops than H and its Cholesky factorisation.
  static bool pays(int64_t classes, int64_t features, int64_t records);

  // Factorises the client's system. False if its curvature outweighs gamma so much that the
  // difference D - Z^T Z costs digits, or if rounding leaves no positive pivot.
  bool factorise(const HessianOperator<T>& hessian);

  // y = (H + gamma I)^-1 v, both [classes, features], refined once. False if what is left of v
  // says that a Cholesky factorisation of H would have done better.
  bool solve(const HessianOperator<T>& hessian, const T* v, T* y);

 private:
  // Replaces x by (H + gamma I)^-1 x.
  void apply_inverse(T* x);

  int64_t classes_, features_, ld_ = 0, capacity_ = 0;
  double largest_ = 0;  // element of D's diagonal
  std::vector<Cholesky<T>> blocks_;
  Cholesky<T> capacitance_;
  WeightedGram<T> gram_;
  ConjugateGradients<T> operator_;
  std::unique_ptr<T[]> y_, roots_, sums_, remainder_;
};

}  // namespace dpk
