// Jacobi's eigenvalue method in parallel order, for host and device.
//
// Each round of a sweep rotates n / 2 disjoint pairs of rows at once (a round-robin tournament:
// every pair meets once in a sweep). A round is three phases with a barrier after each. A phase is
// written for worker `start` of `step` workers: a thread of a CUDA block, or 0 of 1 on the host.
#pragma once

#include <cmath>

#include "common/philox.h"

namespace dpk {

// Sweeps until all elements off the diagonal are negligible: convergence is quadratic, so this many
// are never needed, and a matrix that does need them is reported.
constexpr int kJacobiSweeps = 30;

// A symmetric matrix with elements up to 1, and its eigenvectors as rows. Rows are `stride` apart.
template <class T>
struct JacobiProblem {
  T* a;
  T* vectors;
  T* sine;  // [pairs]
  T* tau;   // [pairs]: tangent of half the angle
  int n;
  int stride;

  DPK_HOST_DEVICE int pairs() const { return (n + 1) / 2; }
  DPK_HOST_DEVICE int rounds() const { return 2 * pairs() - 1; }
};

struct JacobiPair {
  int p, q;
};

// Who meets in a round (circle method): the last player stays, the others move around it. With odd
// n the last one is missing and its opponent rests: q is n then.
DPK_HOST_DEVICE JacobiPair jacobi_pair(int round, int index, int pairs) {
  const int others = 2 * pairs - 1;
  const int first = (round + index) % others;
  const int second = index == 0 ? others : (round + others - index) % others;
  return first < second ? JacobiPair{first, second} : JacobiPair{second, first};
}

// An eighth of an ulp of 1, which no element exceeds: a smaller one off the diagonal is not worth a
// rotation. Rayleigh's quotient takes back what that costs the eigenvalues.
template <class T>
DPK_HOST_DEVICE T jacobi_negligible() {
  return sizeof(T) == 4 ? T(0x1p-26) : T(0x1p-55);
}

// The rotations of a round, and what they make of the 2 x 2 blocks on the diagonal. Returns whether
// this worker found one that is not the identity.
template <class T>
DPK_HOST_DEVICE bool jacobi_find_rotations(const JacobiProblem<T>& x, int round, int start,
                                           int step) {
  bool rotated = false;
  for (int i = start; i < x.pairs(); i += step) {
    const JacobiPair pair = jacobi_pair(round, i, x.pairs());
    x.sine[i] = x.tau[i] = T(0);
    if (pair.q >= x.n) continue;
    T& app = x.a[pair.p * x.stride + pair.p];
    T& aqq = x.a[pair.q * x.stride + pair.q];
    T& apq = x.a[pair.p * x.stride + pair.q];
    if (std::fabs(apq) > jacobi_negligible<T>()) {
      const T theta = (aqq - app) / (2 * apq);
      const T magnitude = 1 / (std::fabs(theta) + std::sqrt(theta * theta + 1));
      const T t = theta < 0 ? -magnitude : magnitude;
      const T c = 1 / std::sqrt(t * t + 1);
      x.sine[i] = t * c;
      x.tau[i] = t * c / (1 + c);
      app -= t * apq;
      aqq += t * apq;
      rotated = true;
    }
    apq = x.a[pair.q * x.stride + pair.p] = T(0);
  }
  return rotated;
}

// (p, q) <- (c p - s q, s p + c q) with tau = s / (1 + c): written as a change, the rounding error
// is one of the change, and goes to zero with the angles (Rutishauser 1966).
template <class T>
DPK_HOST_DEVICE void jacobi_rotate(T s, T tau, T& p, T& q) {
  const T before = p;
  p -= s * (q + tau * p);
  q += s * (before - tau * q);
}

// Rows p and q of the matrix and of the vectors.
template <class T>
DPK_HOST_DEVICE void jacobi_rotate_rows(const JacobiProblem<T>& x, int round, int start, int step) {
  for (int item = start; item < x.pairs() * x.n; item += step) {
    const int i = item / x.n, k = item % x.n;
    const JacobiPair pair = jacobi_pair(round, i, x.pairs());
    if (pair.q >= x.n || x.sine[i] == 0) continue;
    const int p = pair.p * x.stride + k, q = pair.q * x.stride + k;
    jacobi_rotate(x.sine[i], x.tau[i], x.vectors[p], x.vectors[q]);
    if (k != pair.p && k != pair.q) jacobi_rotate(x.sine[i], x.tau[i], x.a[p], x.a[q]);
  }
}

// Columns p and q of the matrix.
template <class T>
DPK_HOST_DEVICE void jacobi_rotate_columns(const JacobiProblem<T>& x, int round, int start,
                                           int step) {
  for (int item = start; item < x.pairs() * x.n; item += step) {
    const int i = item % x.pairs(), k = item / x.pairs();
    const JacobiPair pair = jacobi_pair(round, i, x.pairs());
    if (pair.q >= x.n || x.sine[i] == 0 || k == pair.p || k == pair.q) continue;
    T* const row = x.a + k * x.stride;
    jacobi_rotate(x.sine[i], x.tau[i], row[pair.p], row[pair.q]);
  }
}

// v^T (A v - d v) and v^T v, for eigenvector j and its value d.
struct JacobiQuotient {
  double change;
  double square;
};

// Adds this worker's part. `matrix` is the one that was given, [n, n]: change / square is what is
// missing from d to Rayleigh's quotient, and takes back the rounding errors of all rotations.
template <class T>
DPK_HOST_DEVICE void jacobi_add_quotient(const JacobiProblem<T>& x, const T* matrix, double scale,
                                         int j, int start, int step, JacobiQuotient& quotient) {
  const T* const v = x.vectors + j * x.stride;
  const double d = x.a[j * x.stride + j];
  for (int i = start; i < x.n; i += step) {
    double sum = 0.0;
    for (int k = 0; k < x.n; ++k) {
      sum += (double(matrix[i * x.n + k]) + double(matrix[k * x.n + i])) * double(v[k]);
    }
    quotient.change += v[i] * (0.5 * scale * sum - d * v[i]);
    quotient.square += double(v[i]) * v[i];
  }
}

// The place of eigenvalue j among all, ascending; equal ones keep their order.
template <class T>
DPK_HOST_DEVICE int jacobi_rank(const JacobiProblem<T>& x, int j) {
  const T value = x.a[j * x.stride + j];
  int rank = 0;
  for (int i = 0; i < x.n; ++i) {
    const T other = x.a[i * x.stride + i];
    rank += other < value || (other == value && i < j);
  }
  return rank;
}

}  // namespace dpk
