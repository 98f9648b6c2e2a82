// Householder reduction of several matrices of one size to tridiagonal form, one in each lane of V.

DPK_INLINE vf lane_sqrt(vf x) { return VectorLanes::square_root(x); }
DPK_INLINE vd lane_sqrt(vd x) {
#if DPK_VECTOR_BYTES == 64
  return (vd)_mm512_sqrt_pd((__m512d)x);
#elif DPK_VECTOR_BYTES == 32
  return (vd)_mm256_sqrt_pd((__m256d)x);
#else
  return vd{__builtin_sqrt(x[0]), __builtin_sqrt(x[1])};
#endif
}

template <class T>
struct LanesOf;
template <>
struct LanesOf<float> {
  using V = vf;
  static constexpr float kEps = 0x1p-24f;
  // Squares below this have lost digits; what they came from is far below one ulp of the matrix.
  static constexpr float kTinySquare = 1e-30f;
};
template <>
struct LanesOf<double> {
  using V = vd;
  static constexpr double kEps = 0x1p-53;
  static constexpr double kTinySquare = 1e-280;
};

template <class V>
DPK_INLINE V lane_abs(V x) {
  return x < 0 ? -x : x;
}

// What a group of matrices needs; all arrays are of V.
template <class V>
struct LaneWorkspace {
  V* original;            // [n, n], the matrix
  V* a;                   // [n, n], lower triangle; column k below the diagonal becomes reflector k
  V* q;                   // [n, n]
  V* diagonal;            // [n]
  V* off;                 // [n]
  V* tau;                 // [n]
  V *v, *w, *next_v, *p;  // [n] each
};

// The reflector that maps x[1:] (rows `first` + 1 on of column k) to 0: x becomes v with v_0 = 1.
template <class T, class V>
DPK_INLINE void make_reflector(V* a, int64_t n, int64_t k, V* v, V& tau, V& beta) {
  const V alpha = a[(k + 1) * n + k];
  V sums[4] = {V{}, V{}, V{}, V{}};
  for (int64_t i = k + 2; i < n; ++i) sums[i % 4] += a[i * n + k] * a[i * n + k];
  const V sigma = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const auto none = sigma < LanesOf<T>::kTinySquare;
  const V norm = lane_sqrt(alpha * alpha + sigma);
  beta = none ? alpha : (alpha > 0 ? -norm : norm);
  tau = none ? V{} : (beta - alpha) / beta;
  const V factor = none ? V{} : 1 / (alpha - beta);
  v[k + 1] = V{} + 1;
  for (int64_t i = k + 2; i < n; ++i) v[i] = a[i * n + k] = a[i * n + k] * factor;
}

// A <- H A H for all reflectors. Each pass over the trailing triangle applies the last rank-two
// update and multiplies by the next reflector at once, so that the triangle is read half as often.
template <class T, class V>
inline void tridiagonalise(const LaneWorkspace<V>& ws, int64_t n) {
  V *const a = ws.a, *const p = ws.p;
  V *v = ws.v, *w = ws.w, *next_v = ws.next_v;
  for (int64_t i = 0; i < n; ++i) v[i] = w[i] = V{};
  for (int64_t k = 0; k + 2 < n; ++k) {
    for (int64_t i = k; i < n; ++i) a[i * n + k] -= v[i] * w[k] + w[i] * v[k];
    make_reflector<T>(a, n, k, next_v, ws.tau[k], ws.off[k]);
    ws.diagonal[k] = a[k * n + k];
    for (int64_t i = k + 1; i < n; ++i) {
      V* const row = a + i * n;
      const V vi = v[i], wi = w[i], xi = next_v[i];
      // Four sums: one would wait for itself, and add up rounding errors of one sign.
      V sums[4] = {V{}, V{}, V{}, V{}};
      const auto update = [&](int64_t j, V& sum) {
        const V element = row[j] - vi * w[j] - wi * v[j];
        row[j] = element;
        sum += element * next_v[j];
        p[j] += element * xi;
      };
      int64_t j = k + 1;
      for (; j + 4 <= i; j += 4) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) update(j + u, sums[u]);
      }
      for (; j < i; ++j) update(j, sums[0]);
      row[i] -= 2 * vi * wi;
      p[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]) + row[i] * xi;
    }
    V dots[4] = {V{}, V{}, V{}, V{}};
    for (int64_t i = k + 1; i < n; ++i) dots[i % 4] += p[i] * next_v[i];
    const V dot = (dots[0] + dots[1]) + (dots[2] + dots[3]);
    const V tau = ws.tau[k], half = tau * tau * dot / 2;
    for (int64_t i = k + 1; i < n; ++i) w[i] = tau * p[i] - half * next_v[i];
    V* const spare = v;
    v = next_v;
    next_v = spare;
  }
  for (int64_t i = n < 2 ? 0 : n - 2; i < n; ++i) {
    for (int64_t j = n < 2 ? 0 : n - 2; j <= i; ++j) a[i * n + j] -= v[i] * w[j] + w[i] * v[j];
    ws.diagonal[i] = a[i * n + i];
  }
  if (n >= 2) ws.off[n - 2] = a[(n - 1) * n + n - 2];
}

// Q = H_0 H_1 ..., from the last reflector, so that each only meets rows and columns behind it.
template <class V>
inline void form_q(const LaneWorkspace<V>& ws, int64_t n) {
  V *const q = ws.q, *const p = ws.p;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) q[i * n + j] = i == j ? V{} + 1 : V{};
  }
  for (int64_t k = n - 3; k >= 0; --k) {
    const auto v = [&](int64_t i) { return i == k + 1 ? V{} + 1 : ws.a[i * n + k]; };
    for (int64_t j = k + 1; j < n; ++j) p[j] = q[(k + 1) * n + j];
    int64_t r = k + 2;
    for (; r + 4 <= n; r += 4) {
      const V v0 = v(r), v1 = v(r + 1), v2 = v(r + 2), v3 = v(r + 3);
      const V *const q0 = q + r * n, *const q1 = q0 + n, *const q2 = q1 + n, *const q3 = q2 + n;
      for (int64_t j = k + 1; j < n; ++j) {
        p[j] += (v0 * q0[j] + v1 * q1[j]) + (v2 * q2[j] + v3 * q3[j]);
      }
    }
    for (; r < n; ++r) {
      for (int64_t j = k + 1; j < n; ++j) p[j] += v(r) * q[r * n + j];
    }
    for (int64_t i = k + 1; i < n; ++i) {
      const V factor = ws.tau[k] * v(i);
      for (int64_t j = k + 1; j < n; ++j) q[i * n + j] -= factor * p[j];
    }
  }
}
