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
  explicit Cholesky(int64_t n);

  // What to fill before factorise(): the upper triangle of the matrix, row-major, [n, n]. The rest
  // is never read as part of it, but may be overwritten.
  T* matrix() { return matrix_.get(); }

  // Replaces the upper triangle of H = matrix() by U with U^T U = H + gamma I. Returns 0, or one
  // more than the row whose pivot is not positive.
  int64_t factorise(double gamma);

  // Replaces x [n] by (U^T U)^-1 x.
  void solve(T* x) const;

 private:
  int64_t n_;
  std::unique_ptr<T[]> matrix_, negated_;
  std::unique_ptr<char[]> gemm_;
};

}  // namespace dpk
