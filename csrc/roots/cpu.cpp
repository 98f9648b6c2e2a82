#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <vector>

#include "common/element.h"
#include "common/gemm.h"
#include "roots/jacobi.h"
#include "roots/reflectors.h"
#include "roots/roots.h"
#include "roots/tridiagonal.h"
#define DPK_KERNELS "roots/kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Square pieces in which a matrix meets its transpose: two of them stay in the first-level cache.
// Measured on 1569 x 1569: 12.6 ms without pieces, 6.2 / 5.0 / 4.6 / 4.9 with 16 / 32 / 64 / 128.
constexpr int64_t kPiece = 64;

// Calls body(i, j) for all i <= j, piece by piece.
template <class Body>
void for_each_above(int64_t n, Body&& body) {
  for (int64_t top = 0; top < n; top += kPiece) {
    for (int64_t left = top; left < n; left += kPiece) {
      for (int64_t i = top; i < std::min(top + kPiece, n); ++i) {
        for (int64_t j = std::max(left, i); j < std::min(left + kPiece, n); ++j) body(i, j);
      }
    }
  }
}

// Vectors of the widest instruction set are aligned so.
constexpr std::align_val_t kAlignment{64};

struct FreeAligned {
  void operator()(void* p) const { ::operator delete(p, kAlignment); }
};
using AlignedMemory = std::unique_ptr<void, FreeAligned>;

AlignedMemory allocate_aligned(int64_t bytes) {
  return AlignedMemory(::operator new(static_cast<size_t>(bytes), kAlignment));
}

// float32 matrices up to this size are reduced in float64. Second moments of rank n / 3 with
// damping 1e-5, before tridiagonal.h took out the mean diagonal: the float32 reduction erred up
// to 3.7 times as much as LAPACK's on 65 x 65, 1.0 times on 100 x 100 and 1.5 times on 145 x 145.
constexpr int64_t kWideUpTo = 128;

template <class T>
LevelTwo<T> level_two() {
  const Isa isa = active_isa();
  return {DPK_FOR_ISA(isa, multiply_symmetric<T>), DPK_FOR_ISA(isa, dot_rows<T>),
          DPK_FOR_ISA(isa, add_rows<T>), DPK_FOR_ISA(isa, add_resolvents<T>),
          DPK_FOR_ISA(isa, resolvent_columns<T>)};
}

// Both triangles of factor (x + centre I) from the upper one of x.
template <class T>
void mirror(T* x, int64_t n, double factor, double centre) {
  for_each_above(n, [&](int64_t i, int64_t j) {
    const double element = double(x[i * n + j]) + (i == j ? centre : 0.0);
    x[i * n + j] = x[j * n + i] = static_cast<T>(factor * element);
  });
}

// Rounded rotations are not quite orthogonal: many of them change the length of a vector by more
// than they change its direction. Measured on 64 x 64, float32: |V^T V - I| goes from 3.3e-6 to
// 0.9e-6.
template <class T>
void normalise(T* vector, int64_t n) {
  double square = 0.0;
  for (int64_t i = 0; i < n; ++i) square += double(vector[i]) * double(vector[i]);
  const double factor = 1.0 / std::sqrt(square);
  for (int64_t i = 0; i < n; ++i) vector[i] = static_cast<T>(vector[i] * factor);
}

// inverse_root_by_tridiagonal for a matrix whose elements have the relative error `rounding`.
template <class T>
bool root_by_tridiagonal(const T* a, double largest, int64_t n, double power, double damping,
                         double rounding, T* out, const Executor& executor) {
  // (A + damping)^power = scale^(-power) (scale A + scale damping)^power
  const double scale = power_of_two_scale(std::max(largest, damping));
  std::vector<T> reflectors(n * n);
  symmetrise(a, n, scale, reflectors.data());
  Tridiagonal<T> reduced(reflectors.data(), n, level_two<T>(), executor);
  double centre;
  if (!reduced.power(-power, scale * damping, rounding, out, centre)) return false;
  reduced.transform(out);
  mirror(out, n, std::pow(scale, -power), centre);
  return true;
}

}  // namespace

template <class T>
MatrixFacts inspect_matrix(const T* a, int64_t n) {
  T largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < n * n; ++i) {
    const T magnitude = std::fabs(a[i]);
    finite &= magnitude <= std::numeric_limits<T>::max();
    largest = magnitude > largest ? magnitude : largest;
  }
  double asymmetry = 0.0;
  if (finite) {
    for_each_above(n, [&](int64_t i, int64_t j) {
      asymmetry = std::max(asymmetry, std::fabs(double(a[i * n + j]) - double(a[j * n + i])));
    });
  }
  return {finite, double(largest), asymmetry};
}

template <class T>
void symmetrise(const T* a, int64_t n, double scale, T* to) {
  for_each_above(n, [&](int64_t i, int64_t j) {
    const double mean = 0.5 * (double(a[i * n + j]) + double(a[j * n + i]));
    to[i * n + j] = to[j * n + i] = static_cast<T>(mean * scale);
  });
}

template <class T>
int eigh_lanes() {
  const Isa isa = active_isa();
  const int bytes = isa == Isa::avx512 ? 64 : isa == Isa::avx2 ? 32 : 16;
  return bytes / static_cast<int>(sizeof(T));
}

template <class T>
bool eigh_in_lanes(const EighProblem<T>* problems, int count, int64_t n) {
  const int64_t lanes = eigh_lanes<T>(), size = n * n;
  const AlignedMemory memory = allocate_aligned((3 * size + 7 * n) * lanes * sizeof(T));
  T* const a = static_cast<T*>(memory.get());
  T* const q = a + 2 * size * lanes;
  T* const diagonal = q + size * lanes;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    // Lanes without a matrix get a diagonal one: they are done at once.
    const T* const from = lane < count ? problems[lane].matrix : nullptr;
    const double half = lane < count ? 0.5 * problems[lane].scale : 0.0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        const double sum = from ? double(from[i * n + j]) + double(from[j * n + i]) : 0.0;
        a[(i * n + j) * lanes + lane] = a[(j * n + i) * lanes + lane] = static_cast<T>(sum * half);
      }
    }
  }
  if (!DPK_FOR_ISA(active_isa(), eigh_lanes_kernel<T>)(memory.get(), n)) return false;
  std::vector<int64_t> order(n);
  for (int64_t lane = 0; lane < count; ++lane) {
    const EighProblem<T>& to = problems[lane];
    const auto value = [&](int64_t j) { return diagonal[j * lanes + lane]; };
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int64_t i, int64_t j) { return value(i) < value(j); });
    for (int64_t j = 0; j < n; ++j) {
      const T* const column = q + order[j] * lanes + lane;
      to.values[j] = static_cast<T>(value(order[j]) / to.scale);
      for (int64_t i = 0; i < n; ++i) to.vectors[j * n + i] = column[i * n * lanes];
      normalise(to.vectors + j * n, n);
    }
  }
  return true;
}

template <class T>
bool eigh_by_jacobi(const EighProblem<T>& problem, int64_t n) {
  std::vector<T> memory(2 * n * n + 2 * (n + 1));
  JacobiProblem<T> x;
  x.a = memory.data();
  x.vectors = x.a + n * n;
  x.sine = x.vectors + n * n;
  x.tau = x.sine + (n + 1) / 2;
  x.n = x.stride = static_cast<int>(n);
  symmetrise(problem.matrix, n, problem.scale, x.a);
  for (int64_t i = 0; i < n; ++i) x.vectors[i * n + i] = T(1);
  bool rotated = true;
  for (int sweep = 0; rotated; ++sweep) {
    if (sweep == kJacobiSweeps) return false;
    rotated = false;
    for (int round = 0; round < x.rounds(); ++round) {
      if (!jacobi_find_rotations(x, round, 0, 1)) continue;
      rotated = true;
      jacobi_rotate_rows(x, round, 0, 1);
      jacobi_rotate_columns(x, round, 0, 1);
    }
  }
  for (int j = 0; j < x.n; ++j) {
    JacobiQuotient quotient{0.0, 0.0};
    jacobi_add_quotient(x, problem.matrix, problem.scale, j, 0, 1, quotient);
    x.a[j * n + j] += static_cast<T>(quotient.change / quotient.square);
  }
  for (int j = 0; j < x.n; ++j) {
    const int64_t rank = jacobi_rank(x, j);
    problem.values[rank] = static_cast<T>(x.a[j * n + j] / problem.scale);
    std::copy(x.vectors + j * n, x.vectors + (j + 1) * n, problem.vectors + rank * n);
    normalise(problem.vectors + rank * n, n);
  }
  return true;
}

template <class T>
void sum_of_projections(const T* vectors, const double* factors, int64_t n, T* out) {
  const AlignedMemory workspace = allocate_aligned(gemm_workspace_bytes<T>());
  std::vector<T> scaled(n * n);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      scaled[j * n + i] = static_cast<T>(factors[j] * double(vectors[j * n + i]));
    }
  }
  gemm_upper<T>(n, n, {vectors, 1, n}, {scaled.data(), n, 1}, out, n, false, workspace.get());
  mirror(out, n, 1.0, 0.0);
}

template <class T>
bool inverse_root_by_tridiagonal(const T* a, double largest, int64_t n, double power,
                                 double damping, T* out, const Executor& executor) {
  constexpr double kRounding = std::numeric_limits<T>::epsilon();
  if (std::is_same_v<T, double> || n > kWideUpTo) {
    return root_by_tridiagonal(a, largest, n, power, damping, kRounding, out, executor);
  }
  const std::vector<double> wide(a, a + n * n);
  std::vector<double> root(n * n);
  if (!root_by_tridiagonal(wide.data(), largest, n, power, damping, kRounding, root.data(),
                           executor)) {
    return false;
  }
  for (int64_t i = 0; i < n * n; ++i) out[i] = static_cast<T>(root[i]);
  return true;
}

#define DPK_INSTANTIATE(T)                                                                    \
  template MatrixFacts inspect_matrix<T>(const T*, int64_t);                                  \
  template void symmetrise<T>(const T*, int64_t, double, T*);                                 \
  template int eigh_lanes<T>();                                                               \
  template bool eigh_in_lanes<T>(const EighProblem<T>*, int, int64_t);                        \
  template bool eigh_by_jacobi<T>(const EighProblem<T>&, int64_t);                            \
  template void sum_of_projections<T>(const T*, const double*, int64_t, T*);                  \
  template bool inverse_root_by_tridiagonal<T>(const T*, double, int64_t, double, double, T*, \
                                               const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
