#include "glm/cholesky.h"

#include <algorithm>

#include "common/element.h"
#include "common/gemm.h"

namespace dpk {

// Rows of a block row. Measured in one thread: 32 / 48 / 64 / 96 / 128 take 0.030 / 0.041 / 0.032 /
// 0.033 / 0.040 ms for a matrix of 123 rows and 1.23 / 1.19 / 1.21 / 1.23 / 1.31 ms for 576.
constexpr int64_t kPanel = 64;

}  // namespace dpk

#define DPK_KERNELS "glm/cholesky.inl"
#include "common/for_each_isa.h"

namespace dpk {

template <class T>
void Cholesky<T>::resize(int64_t n) {
  n_ = n;
  if (n * n <= capacity_) return;
  capacity_ = n * n;
  matrix_.reset(new T[n * n]);
  negated_.reset(new T[n * kPanel]);
}

template <class T>
int64_t Cholesky<T>::factorise(double gamma) {
  const Isa isa = active_isa();
  T* const u = matrix_.get();
  for (int64_t i = 0; i < n_; ++i) u[i * n_ + i] = T(double(u[i * n_ + i]) + gamma);
  for (int64_t k = 0; k < n_; k += kPanel) {
    const int64_t rows = std::min(kPanel, n_ - k);
    T* const diagonal = u + k * n_ + k;
    if (k > 0) subtract_rows_above(k, rows, u + k, n_, n_ - k);
    const int64_t failed = DPK_FOR_ISA(isa, factorise_block<T>)(diagonal, n_, rows);
    if (failed != 0) return k + failed;
    DPK_FOR_ISA(isa, substitute_panel<T>)
    (diagonal, n_, rows, diagonal + rows, n_, n_ - k - rows);
  }
  return 0;
}

template <class T>
void Cholesky<T>::subtract_rows_above(int64_t k, int64_t rows, T* panel, int64_t ld, int64_t cols) {
  DPK_FOR_ISA(active_isa(), negate_columns<T>)(matrix_.get() + k, n_, k, rows, negated_.get());
  gemm<T>(rows, cols, k, {negated_.get(), 1, rows}, {panel, ld, 1}, panel + k * ld, ld,
          /*accumulate=*/true);
}

template <class T>
void Cholesky<T>::solve_left(T* panel, int64_t ld, int64_t cols) {
  for (int64_t k = 0; k < n_; k += kPanel) {
    const int64_t rows = std::min(kPanel, n_ - k);
    if (k > 0) subtract_rows_above(k, rows, panel, ld, cols);
    DPK_FOR_ISA(active_isa(), substitute_panel<T>)
    (matrix_.get() + k * n_ + k, n_, rows, panel + k * ld, ld, cols);
  }
}

template <class T>
void Cholesky<T>::solve_left(T* x) const {
  DPK_FOR_ISA(active_isa(), substitute_forwards<T>)(matrix_.get(), n_, x);
}

template <class T>
void Cholesky<T>::solve_right(T* x) const {
  DPK_FOR_ISA(active_isa(), substitute_backwards<T>)(matrix_.get(), n_, x);
}

template class Cholesky<float>;
template class Cholesky<double>;

}  // namespace dpk
