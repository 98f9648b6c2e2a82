// (A + damping I)^power of one matrix without eigenvectors. Included by cpu.cpp.
//
//   A = Q T Q^T        blocked Householder reduction (LAPACK's sytrd), 4/3 n^3 flops
//   F = (T + damping)^power = sum_p w_p (T + shift_p)^(-1)        (poles.h), 2 n^2 flops a pole
//   out = Q F Q^T      block reflectors from both sides, using symmetry, 2 n^3 flops
//
// The inverse of a tridiagonal matrix has a closed form: each element is a multiple of the one
// below it. That replaces the tridiagonal eigenproblem, and its eigenvectors are never applied.
// Both transformations act on a matrix less a multiple of I, its mean diagonal element, which they
// leave as it is: smaller elements have smaller rounding errors. (Measured on float32 second
// moments of 2 n samples, n = 200, damping 1e-3: with it the inverse square root errs 0.3 times as
// much as the form by eigenvectors, without it 1.6 times.) Only upper triangles are read; what is
// below the diagonal is unspecified until the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/executor.h"
#include "common/gemm.h"
#include "roots/poles.h"

namespace dpk {
namespace {

// Kernels of the active instruction set.
template <class T>
struct LevelTwo {
  void (*multiply_symmetric)(const T*, int64_t, int64_t, int64_t, int64_t, const T*, T*);
  void (*dot_rows)(const T*, int64_t, int64_t, const T*, int64_t, T*);
  void (*add_rows)(const T*, int64_t, int64_t, const T*, int64_t, T*);
  void (*add_resolvents)(const T* const*, const T* const*, int64_t, int64_t, T*, int64_t);
  int64_t resolvent_columns;
};

template <class T>
class Tridiagonal {
 public:
  // Reduces the matrix in the upper triangle of `a` (n x n), which is overwritten by reflectors.
  Tridiagonal(T* a, int64_t n, const LevelTwo<T>& kernels, const Executor& executor)
      : a_(a), n_(n), kernels_(kernels), executor_(executor), diagonal_(n), off_(n), tau_(n) {
    tasks_ = n < kSplit ? 1 : executor.threads;
    gemm_bytes_ = gemm_workspace_bytes<T>();
    workspace_.resize(tasks_ * gemm_bytes_);
    reduce();
  }

  // f + centre I = (T + damping I)^(-alpha), upper triangle, for damping > 0; false if T has a
  // negative eigenvalue that errors of `rounding`, relative to its elements, do not explain.
  bool power(double alpha, double damping, double rounding, T* f, double& centre) const;

  // f <- Q f Q^T, upper triangles.
  void transform(T* f);

 private:
  // Where a second thread pays for one matrix. Measured on one and two threads: 320 x 320 6.2 and
  // 6.5 ms, 512 x 512 13.9 and 11.2, 1024 x 1024 89 and 68.
  static constexpr int64_t kSplit = 384;
  // Milliseconds below are of one thread and vary by a tenth from run to run.
  //
  // Reflectors that are gathered before the trailing matrix is updated. Measured with 16 / 32 / 64:
  // 1569 x 1569 takes 299 / 316 / 335, 785 x 785 53 / 52 / 47, 257 x 257 3.4 / 2.6 / 3.2.
  static constexpr int64_t kPanel = 32;
  // Reflectors that are applied to F at once: the rank of an update is twice that. Measured with
  // 32 / 64 / 128: 1569 x 1569 takes 296 / 306 / 314, 257 x 257 2.4 / 2.5 / 4.1.
  static constexpr int64_t kBlock = 64;
  // Rows or columns of F that one task takes at a time: its square on the diagonal, 144 KiB of
  // float32, stays in the second-level cache beside the packed operands. Measured with 96 / 192 /
  // 384: 1569 x 1569 takes 335 / 316 / 382.
  static constexpr int64_t kStrip = 192;

  void reduce();
  void reduce_panel(int64_t begin, int64_t end, T* panel, std::vector<T>& partial);
  void multiply_trailing(int64_t k, const T* v, T* w, std::vector<T>& partial);
  void transform_block(int64_t begin, int64_t end, T* f, std::vector<T>& memory);
  void update_symmetric(T* c, int64_t first, const T* left, const T* right, int64_t count);
  bool factorise(double shift, std::vector<double>& pivot) const;

  char* gemm_workspace(int task) { return workspace_.data() + task * gemm_bytes_; }

  // Calls body(task, begin, end) for strips of [first, n).
  template <class Body>
  void for_each_strip(int64_t first, Body&& body) {
    const int64_t strips = (n_ - first + kStrip - 1) / kStrip;
    const int tasks = static_cast<int>(std::min<int64_t>(strips, tasks_));
    if (tasks == 0) return;
    for_each_task(executor_, tasks, [&](int task) {
      for (int64_t s = task; s < strips; s += tasks) {
        body(task, first + s * kStrip, std::min(first + (s + 1) * kStrip, n_));
      }
    });
  }

  T* a_;
  int64_t n_;
  LevelTwo<T> kernels_;
  Executor executor_;
  std::vector<double> diagonal_, off_;
  std::vector<T> tau_;
  int tasks_;
  int64_t gemm_bytes_;
  std::vector<char> workspace_;
};

// w[k + 1:] = S v for the trailing matrix S behind row k.
template <class T>
void Tridiagonal<T>::multiply_trailing(int64_t k, const T* v, T* w, std::vector<T>& partial) {
  const int64_t m = n_ - k - 1;
  const T* const s = a_ + (k + 1) * n_ + k + 1;
  const int tasks = m < kSplit ? 1 : tasks_;
  for_each_task(executor_, tasks, [&](int task) {
    // Rows are shorter further down: equal areas, not equal numbers.
    const auto row = [&](int t) {
      return t == tasks ? m : static_cast<int64_t>(m * (1.0 - std::sqrt(1.0 - double(t) / tasks)));
    };
    T* const sum = partial.data() + task * n_;
    std::fill(sum, sum + m, T(0));
    kernels_.multiply_symmetric(s, n_, m, row(task), row(task + 1), v + k + 1, sum);
  });
  for (int64_t i = 0; i < m; ++i) {
    T sum = partial[i];
    for (int t = 1; t < tasks; ++t) sum += partial[t * n_ + i];
    w[k + 1 + i] = sum;
  }
}

// Rows [begin, end) become reflectors. Row 2 r of the panel is v_r, row 2 r + 1 is w_r, such that
// the trailing matrix is to be changed by -sum_r (v_r^T w_r + w_r^T v_r).
template <class T>
void Tridiagonal<T>::reduce_panel(int64_t begin, int64_t end, T* panel, std::vector<T>& partial) {
  T factors[2 * kPanel], dots[2 * kPanel];
  for (int64_t k = begin; k < end; ++k) {
    const int64_t count = 2 * (k - begin), m = n_ - k - 1;
    T* const row = a_ + k * n_;
    T *const v = panel + count * n_, *const w = v + n_;
    for (int64_t r = 0; r < count; ++r) factors[r] = -panel[(r ^ 1) * n_ + k];
    kernels_.add_rows(panel + k, n_, count, factors, n_ - k, row + k);
    diagonal_[k] = row[k];
    const double alpha = row[k + 1];
    double sigma = 0.0;
    for (int64_t j = k + 2; j < n_; ++j) sigma += double(row[j]) * double(row[j]);
    const double norm = std::sqrt(alpha * alpha + sigma);
    const double beta = sigma == 0.0 ? alpha : std::copysign(norm, -alpha);
    const T tau = static_cast<T>(sigma == 0.0 ? 0.0 : (beta - alpha) / beta);
    const T scale = static_cast<T>(sigma == 0.0 ? 0.0 : 1.0 / (alpha - beta));
    off_[k] = beta;
    tau_[k] = tau;
    std::fill(v, v + k + 1, T(0));
    std::fill(w, w + k + 1, T(0));
    v[k + 1] = row[k + 1] = T(1);
    for (int64_t j = k + 2; j < n_; ++j) v[j] = row[j] = row[j] * scale;
    multiply_trailing(k, v, w, partial);
    kernels_.dot_rows(panel + k + 1, n_, count, v + k + 1, m, dots);
    for (int64_t r = 0; r < count; ++r) factors[r] = -dots[r ^ 1];
    kernels_.add_rows(panel + k + 1, n_, count, factors, m, w + k + 1);
    T dot;
    kernels_.dot_rows(w + k + 1, n_, 1, v + k + 1, m, &dot);
    const T half = tau * tau * dot / 2;
    for (int64_t j = k + 1; j < n_; ++j) w[j] = tau * w[j] - half * v[j];
  }
}

// Upper triangle of c behind `first` += left^T right, both [count, n].
template <class T>
void Tridiagonal<T>::update_symmetric(T* c, int64_t first, const T* left, const T* right,
                                      int64_t count) {
  for_each_strip(first, [&](int task, int64_t begin, int64_t end) {
    const MatrixView<T> a{left + begin, 1, n_};
    T* const to = c + begin * n_ + begin;
    gemm_upper<T>(end - begin, count, a, {right + begin, n_, 1}, to, n_, true,
                  gemm_workspace(task));
    if (end == n_) return;
    gemm<T>(end - begin, n_ - end, count, a, {right + end, n_, 1}, to + (end - begin), n_, true,
            gemm_workspace(task));
  });
}

template <class T>
void Tridiagonal<T>::reduce() {
  std::vector<T> panel(2 * kPanel * n_), swapped(2 * kPanel * n_), partial(tasks_ * n_);
  double centre = 0.0;
  for (int64_t i = 0; i < n_; ++i) centre += double(a_[i * n_ + i]) / n_;
  for (int64_t i = 0; i < n_; ++i) a_[i * n_ + i] = static_cast<T>(a_[i * n_ + i] - centre);
  for (int64_t begin = 0; begin + 2 < n_; begin += kPanel) {
    const int64_t end = std::min(begin + kPanel, n_ - 2), count = 2 * (end - begin);
    reduce_panel(begin, end, panel.data(), partial);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = end; j < n_; ++j) swapped[r * n_ + j] = -panel[(r ^ 1) * n_ + j];
    }
    update_symmetric(a_, end, panel.data(), swapped.data(), count);
  }
  for (int64_t k = std::max<int64_t>(n_ - 2, 0); k < n_; ++k) diagonal_[k] = a_[k * n_ + k];
  if (n_ >= 2) off_[n_ - 2] = a_[(n_ - 2) * n_ + n_ - 1];
  for (double& element : diagonal_) element += centre;
}

// T + shift I = L D L^T, D in `pivot`; false if that is not positive definite.
template <class T>
bool Tridiagonal<T>::factorise(double shift, std::vector<double>& pivot) const {
  for (int64_t i = 0; i < n_; ++i) {
    const double taken = i > 0 ? off_[i - 1] * off_[i - 1] / pivot[i - 1] : 0.0;
    pivot[i] = diagonal_[i] + shift - taken;
    if (!(pivot[i] > 0.0)) return false;
  }
  return true;
}

template <class T>
bool Tridiagonal<T>::power(double alpha, double damping, double rounding, T* f,
                           double& centre) const {
  if (!(damping > 0.0)) return false;
  double norm = 0.0;
  for (int64_t i = 0; i < n_; ++i) {
    const double left = i > 0 ? std::fabs(off_[i - 1]) : 0.0;
    const double right = i + 1 < n_ ? std::fabs(off_[i]) : 0.0;
    norm = std::max(norm, std::fabs(diagonal_[i]) + left + right);
  }
  // A negative eigenvalue within the errors of A, whose norm grows like the root of n, is no more
  // wrong than 0 is. An eighth of the damping at most, so that the root is never much larger than
  // damping^(-alpha), its bound.
  const double error = std::sqrt(double(n_)) * rounding * norm;
  std::vector<double> pivot(n_), sum(n_);
  if (norm > 0.0 && !factorise(std::min(error, damping / 8), pivot)) return false;
  const double accuracy = std::is_same_v<T, float> ? 1e-8 : 1e-17;
  std::vector<Pole> poles = poles_of_power(alpha, damping, damping + norm, accuracy);
  if (poles.size() % 2) poles.push_back({0.0, poles[0].shift});
  const int64_t count = static_cast<int64_t>(poles.size());
  // T + shift = L D L^T gives G_nn = 1 / d_n, G_ii = 1 / d_i + l_i^2 G_(i+1)(i+1), and
  // G_ij = -l_i G_(i+1)j for i < j: sums of positive terms only.
  std::vector<T> ratio(count * n_), inverse_diagonal(count * n_);
  for (int64_t p = 0; p < count; ++p) {
    if (!factorise(damping + poles[p].shift, pivot)) return false;
    double g = 0.0;
    for (int64_t i = n_ - 1; i >= 0; --i) {
      const double l = i + 1 < n_ ? off_[i] / pivot[i] : 0.0;
      g = 1.0 / pivot[i] + l * l * g;
      sum[i] += poles[p].weight * g;
      ratio[p * n_ + i] = static_cast<T>(-l);
      inverse_diagonal[p * n_ + i] = static_cast<T>(poles[p].weight * g);
    }
  }
  std::memset(f, 0, n_ * n_ * sizeof(T));
  const int64_t columns = kernels_.resolvent_columns, blocks = (n_ + columns - 1) / columns;
  for_each_task(executor_, tasks_, [&](int task) {
    for (int64_t b = task; b < blocks; b += tasks_) {
      for (int64_t p = 0; p < count; p += 2) {
        const T* const ratios[] = {&ratio[p * n_], &ratio[(p + 1) * n_]};
        const T* const diagonals[] = {&inverse_diagonal[p * n_], &inverse_diagonal[(p + 1) * n_]};
        kernels_.add_resolvents(ratios, diagonals, b * columns, std::min(columns, n_ - b * columns),
                                f, n_);
      }
    }
  });
  centre = std::accumulate(sum.begin(), sum.end(), 0.0) / n_;
  for (int64_t i = 0; i < n_; ++i) f[i * n_ + i] = static_cast<T>(sum[i] - centre);
  return true;
}

}  // namespace
}  // namespace dpk
