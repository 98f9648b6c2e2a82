// Cholesky factorisation and solve in one thread.
#pragma once

#include <cstdint>
#include <memory>

namespace dpk {

// Factorises symmetric matrices of one size and solves with the factor.
//
// Left-looking by block rows: every block row is updated by one product with all the rows above,
// which is where the n^3 / 3 multiplications are, then finished by substitution.
template <class T>
class Cholesky {
 public:
  explicit Cholesky(int64_t n) { resize(n); }

  // From now on for matrices of n rows; what matrix() held is lost.
  void resize(int64_t n);

  int64_t size() const { return n_; }

  // What to fill before factorise(): the upper triangle of the matrix, row-major, [n, n]. The rest
  // is never read as part of it, but may be overwritten.
  T* matrix() { return matrix_.get(); }

  // Replaces the upper triangle of H = matrix() by U with U^T U = H + gamma I. Returns 0, or one
  // more than the row whose pivot is not positive.
  int64_t factorise(double gamma);

  // Replaces x [n] by U^-T x, by U^-1 x, or by both: (U^T U)^-1 x.
  void solve_left(T* x) const;
  void solve_right(T* x) const;
  void solve(T* x) const {
    solve_left(x);
    solve_right(x);
  }

  // Replaces panel [n, cols], rows ld apart, by U^-T panel.
  void solve_left(T* panel, int64_t ld, int64_t cols);

 private:
  // Rows k to k + rows of a panel less their products with U's and the panel's k rows above.
  void subtract_rows_above(int64_t k, int64_t rows, T* panel, int64_t ld, int64_t cols);

  int64_t n_ = 0, capacity_ = -1;
  std::unique_ptr<T[]> matrix_, negated_;
};

}  // namespace dpk
