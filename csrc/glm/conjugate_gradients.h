// (H + gamma I)^-1 v by conjugate gradients in one thread, without H.
#pragma once

#include <cstdint>
#include <memory>

#include "glm/glm.h"
#include "glm/gram.h"

namespace dpk {

// V -> sum_i w_i (diag p_i - p_i p_i^T) V x_i x_i^T + gamma V for one client's records; of `table`
// only the columns are used.
template <class T>
struct HessianOperator {
  ClassPair<T> table;
  const T* x;
  int64_t row_stride;
  const T* xt;  // the transpose of x, [features, xt_ld], filled up with zeros
  int64_t xt_ld;
  int64_t count;
  double gamma;
};

template <class T>
class ConjugateGradients {
 public:
  ConjugateGradients(int64_t classes, int64_t features, int64_t most_records);

  // y = (H + gamma I)^-1 v, both [classes, features]; returns the iterations.
  int64_t solve(const HessianOperator<T>& hessian, const T* v, const CgLimits& limits, T* y);

  // |v - (H + gamma I) y| / |v| of the last solution, computed from it; 0 for v = 0.
  double residual() const { return residual_; }

  // out = (H + gamma I) v.
  void apply(const HessianOperator<T>& hessian, const T* v, T* out);

 private:
  int64_t classes_, features_;
  std::unique_ptr<T[]> scores_, remainder_, direction_, image_;
  std::unique_ptr<char[]> gemm_;
  double residual_ = 0;
};

}  // namespace dpk
