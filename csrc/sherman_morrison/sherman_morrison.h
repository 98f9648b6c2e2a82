// Inverses of a matrix plus rank-one terms, applied without forming the matrix.
//
// Dot products are accumulated in double (those of sofim_step in float for runs of 8 products where
// nothing overflows or underflows), over blocks that depend on the sizes alone: the result is the
// same for any number of threads.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/executor.h"

namespace dpk {

// One parameter of a list: n elements of theta, momentum M and gradient G. T is float or double,
// G elements of `Step::grad_dtype`.
template <class T>
struct StepTensor {
  T* theta;
  T* momentum;
  const void* grad;
  int64_t n;
};

struct Step {
  double beta, rho, lr;
  Dtype grad_dtype;
};

struct StepResult {
  double momentum_dot_grad;
  double momentum_sq_norm;
  bool applied;
};

// M <- beta M + (1 - beta) G;  theta <- theta - lr (G / rho - M (M.G) / (rho^2 + rho |M|^2)),
// with one M.G and one |M|^2 over the whole list. Both are known before anything is written: if
// they, or the step's coefficients, are not finite numbers of T, nothing is (applied = false).
template <class T>
StepResult sofim_step(const StepTensor<T>* tensors, int64_t count, const Step& step,
                      const Executor& executor);

struct RankOneResult {
  double denominator;  // 1 + v^T H u
  double magnitude;    // 1 + sum_i |v_i (H u)_i|: what the denominator is a difference of
};

// H <- H - (H u)(H^T v)^T / (1 + v^T H u) for H [n, n], row-major, if |denominator| > tolerance *
// magnitude and both are finite; else H is left as it is. v null: v = u and H is symmetric; then
// H u takes half of a read of H, and H stays symmetric to the bit.
template <class T>
RankOneResult rank_one_inverse_update(T* h, int64_t n, const T* u, const T* v, double tolerance,
                                      T* workspace, const Executor& executor);

// How many elements of workspace rank_one_inverse_update needs.
int64_t rank_one_workspace(int64_t n);

// k rows of d elements, `row_stride` apart.
template <class T>
struct Window {
  const T* data;
  int64_t row_stride;
  int64_t k, d;
};

// products[i, j] = v_i . u_j for j < k, and products[i, k] = v_i . g: [k, k + 1] doubles, in one
// pass over the windows. v null: v = u; the products are symmetric.
template <class T>
void window_gram(const Window<T>& u, const T* v, int64_t v_row_stride, const T* g, double* products,
                 double* workspace, const Executor& executor);

// How many doubles of workspace window_gram needs.
int64_t window_gram_workspace(int64_t k, int64_t d, bool symmetric, const Executor& executor);

// products[i] = w_i . g.
template <class T>
void window_project(const Window<T>& w, const T* g, double* products, const Executor& executor);

// out = scale * (g - sum_i weights[i] w_i), summed in double.
template <class T>
void window_combine(const Window<T>& w, const T* g, const double* weights, double scale, T* out,
                    const Executor& executor);

}  // namespace dpk
