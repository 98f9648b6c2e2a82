// f <- Q f Q^T for the reflectors that Tridiagonal left in its matrix. Included by cpu.cpp.
#pragma once

#include "roots/tridiagonal.h"

namespace dpk {
namespace {

// s of H_0 H_1 ... = I - V^T s V for reflectors in the rows of v [count, n]: upper triangular
// (LAPACK's larft).
template <class T>
void triangle_of_reflectors(const LevelTwo<T>& kernels, const T* v, const T* tau, int64_t count,
                            int64_t n, T* s) {
  std::vector<T> dots(count);
  std::fill(s, s + count * count, T(0));
  for (int64_t j = 0; j < count; ++j) {
    kernels.dot_rows(v, n, j, v + j * n, n, dots.data());
    for (int64_t i = 0; i < j; ++i) {
      T sum = 0;
      for (int64_t l = i; l < j; ++l) sum += s[i * count + l] * dots[l];
      s[i * count + j] = -tau[j] * sum;
    }
    s[j * count + j] = tau[j];
  }
}

// With H = I - V^T S V on rows behind `begin`, Y^T = S V F and Z^T = Y^T - (S V Y) V / 2:
//   H F H^T = F - V^T Z^T - Z V   behind `begin`, and   F - Y V   in the rows before.
template <class T>
void Tridiagonal<T>::transform_block(int64_t begin, int64_t end, T* f, std::vector<T>& memory) {
  const int64_t count = end - begin, first = begin + 1, m = n_ - first;
  T* const left = memory.data();            // V, then Z^T: [2 count, n]
  T* const right = left + 2 * kBlock * n_;  // -Z^T, then -V
  T* const x = right + 2 * kBlock * n_;     // V F: [count, n]
  T* const mirrored = x + kBlock * n_;      // one block of the diagonal for each task
  T* const small = mirrored + tasks_ * kStrip * kStrip;
  T *const s = small, *const vy = s + kBlock * kBlock, *const svy = vy + kBlock * kBlock;
  T *const v = left, *const z = left + count * n_, *const y = z;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t start = begin + r + 1;
    std::fill(v + r * n_, v + r * n_ + start, T(0));
    std::copy(a_ + (begin + r) * n_ + start, a_ + (begin + r + 1) * n_, v + r * n_ + start);
    for (int64_t j = first; j < n_; ++j) right[(count + r) * n_ + j] = -v[r * n_ + j];
  }
  triangle_of_reflectors(kernels_, v, tau_.data() + begin, count, n_, s);
  for_each_strip(0, [&](int task, int64_t from, int64_t to) {
    char* const workspace = gemm_workspace(task);
    const int64_t middle = std::clamp(first, from, to), width = to - middle;
    if (from < middle) {
      gemm<T>(count, middle - from, m, {v + first, n_, 1}, {f + from * n_ + first, 1, n_}, x + from,
              n_, false, workspace);
    }
    if (width > 0) {
      T* const square = mirrored + task * kStrip * kStrip;
      for (int64_t i = 0; i < width; ++i) {
        for (int64_t j = i; j < width; ++j) {
          square[i * kStrip + j] = square[j * kStrip + i] = f[(middle + i) * n_ + middle + j];
        }
      }
      gemm<T>(count, width, width, {v + middle, n_, 1}, {square, kStrip, 1}, x + middle, n_, false,
              workspace);
      gemm<T>(count, width, middle - first, {v + first, n_, 1}, {f + first * n_ + middle, n_, 1},
              x + middle, n_, true, workspace);
      gemm<T>(count, width, n_ - to, {v + to, n_, 1}, {f + middle * n_ + to, 1, n_}, x + middle, n_,
              true, workspace);
    }
    gemm<T>(count, to - from, count, {s, count, 1}, {x + from, n_, 1}, y + from, n_, false,
            workspace);
    if (from < middle) {
      gemm<T>(middle - from, m, count, {y + from, 1, n_}, {right + count * n_ + first, n_, 1},
              f + from * n_ + first, n_, true, workspace);
    }
  });
  gemm<T>(count, count, m, {v + first, n_, 1}, {y + first, 1, n_}, vy, count, false,
          gemm_workspace(0));
  gemm<T>(count, count, count, {s, count, 1}, {vy, count, 1}, svy, count, false, gemm_workspace(0));
  for (int64_t i = 0; i < count * count; ++i) svy[i] /= -2;
  for_each_strip(first, [&](int task, int64_t from, int64_t to) {
    gemm<T>(count, to - from, count, {svy, count, 1}, {v + from, n_, 1}, z + from, n_, true,
            gemm_workspace(task));
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = from; j < to; ++j) right[r * n_ + j] = -z[r * n_ + j];
    }
  });
  update_symmetric(f, first, left, right, 2 * count);
}

template <class T>
void Tridiagonal<T>::transform(T* f) {
  std::vector<T> memory(5 * kBlock * n_ + tasks_ * kStrip * kStrip + 3 * kBlock * kBlock);
  const int64_t reflectors = std::max<int64_t>(n_ - 2, 0);
  for (int64_t begin = (reflectors - 1) / kBlock * kBlock; begin >= 0 && reflectors > 0;
       begin -= kBlock) {
    transform_block(begin, std::min(begin + kBlock, reflectors), f, memory);
  }
}

}  // namespace
}  // namespace dpk
