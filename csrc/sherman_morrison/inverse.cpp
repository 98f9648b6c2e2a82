#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sherman_morrison/sherman_morrison.h"
#define DPK_KERNELS "sherman_morrison/inverse.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Where a second thread begins to pay, in elements of the matrix. Measured: n = 256 takes 36.5 us
// on one thread and 31.2 on two, n = 362 65.5 and 62.8.
constexpr int64_t kElementsPerTask = 32768;
// The first pass cuts the rows into slices, each with a sum of its own for H^T v. Their number
// depends on n alone, so that the sums do not depend on the threads. Every slice costs n more sums
// to be written and added up: 8 / 32 / 128 take 0.90 / 1.15 / 1.92 ms for n = 2,048 on two threads
// (symmetric: 1.14 / 1.31 / 2.04). 8 is also the most threads that the first pass can use.
constexpr int64_t kRowsPerSlice = 64;
constexpr int64_t kMostSlices = 8;

int64_t slices_of(int64_t n) { return std::clamp<int64_t>(n / kRowsPerSlice, 1, kMostSlices); }

int tasks_for(int64_t n, int64_t pieces, const Executor& executor) {
  const int64_t most = std::min<int64_t>(pieces, executor.threads);
  return static_cast<int>(std::clamp<int64_t>(n * n / kElementsPerTask, 1, most));
}

// The first row of a slice. Of a triangle, slices have about equal areas.
int64_t first_row(int64_t n, int64_t slice, int64_t slices, bool triangle) {
  if (!triangle) return n * slice / slices;
  const double rest = 1.0 - static_cast<double>(slice) / static_cast<double>(slices);
  return slice == slices ? n : n - static_cast<int64_t>(static_cast<double>(n) * std::sqrt(rest));
}

}  // namespace

int64_t rank_one_workspace(int64_t n) { return (slices_of(n) + 2) * n; }

template <class T>
RankOneResult rank_one_inverse_update(T* h, int64_t n, const T* u, const T* v, double tolerance,
                                      T* workspace, const Executor& executor) {
  const Isa isa = active_isa();
  const bool symmetric = v == nullptr;
  auto* const multiply = symmetric ? DPK_FOR_ISA(isa, multiply_symmetric<T>)
                                   : DPK_FOR_ISA(isa, multiply_both_sides<T>);
  auto* const subtract = DPK_FOR_ISA(isa, subtract_outer<T>);
  const int64_t slices = slices_of(n);
  T* const p = workspace;
  T* const q = workspace + n;
  T* const partial = workspace + 2 * n;
  const int multiplying = tasks_for(n, slices, executor);
  for_each_task(executor, multiplying, [&](int task) {
    const int64_t end = slices * (task + 1) / multiplying;
    for (int64_t s = slices * task / multiplying; s < end; ++s) {
      multiply(h, n, first_row(n, s, slices, symmetric), first_row(n, s + 1, slices, symmetric), u,
               v, p, partial + s * n);
    }
  });
  RankOneResult result{1.0, 1.0};
  for (int64_t j = 0; j < n; ++j) {
    double total = symmetric ? p[j] : 0.0;
    for (int64_t s = 0; s < slices; ++s) total += partial[s * n + j];
    q[j] = static_cast<T>(total);
    const double term = symmetric ? u[j] * total : static_cast<double>(v[j]) * p[j];
    result.denominator += term;
    result.magnitude += std::abs(term);
  }
  // False for NaN, too.
  const bool regular = std::abs(result.denominator) > tolerance * result.magnitude &&
                       std::isfinite(result.magnitude);
  if (!regular) return result;
  // In the symmetric case (H u)_i (H u)_j / |denominator| is split evenly between its two sides, so
  // that elements (i, j) and (j, i) are rounded alike and H stays symmetric to the bit.
  const double side = symmetric ? 1.0 / std::sqrt(std::abs(result.denominator)) : 1.0;
  for (int64_t j = 0; j < n; ++j) {
    if (symmetric) q[j] = static_cast<T>(q[j] * side);
    p[j] = symmetric ? (result.denominator < 0 ? -q[j] : q[j])
                     : static_cast<T>(p[j] / result.denominator);
  }
  const int subtracting = tasks_for(n, n, executor);
  for_each_task(executor, subtracting, [&](int task) {
    subtract(h, n, n * task / subtracting, n * (task + 1) / subtracting, p, q);
  });
  return result;
}

template RankOneResult rank_one_inverse_update<float>(float*, int64_t, const float*, const float*,
                                                      double, float*, const Executor&);
template RankOneResult rank_one_inverse_update<double>(double*, int64_t, const double*,
                                                       const double*, double, double*,
                                                       const Executor&);

}  // namespace dpk
