// Sums and dot products that the kernels of this room share. See for_each_isa.h for why this is
// included and not linked.

template <class T>
struct VectorOf {
  using type = vf;
};
template <>
struct VectorOf<double> {
  using type = vd;
};

DPK_INLINE vf load_vector(const float* p) { return load_as<vf>(p); }
DPK_INLINE vd load_vector(const double* p) { return load_as<vd>(p); }

// Sum and sum of squares of n elements, in double.
template <class In>
DPK_INLINE void sum_and_squares(const In* x, int64_t n, double& sum, double& squares) {
  constexpr int kStep = kLanes / 2;
  // Four chains of each hide the latency of additions (4 cycles, two a cycle).
  constexpr int kChains = 4;
  vd sums[kChains], norms[kChains];
  for (int k = 0; k < kChains; ++k) sums[k] = norms[k] = vd{};
  int64_t j = 0;
  for (; j + kChains * kStep <= n; j += kChains * kStep) {
    for (int k = 0; k < kChains; ++k) {
      const vd v = load_double(x + j + k * kStep);
      sums[k] += v;
      norms[k] += v * v;
    }
  }
  for (int k = 1; k < kChains; ++k) {
    sums[0] += sums[k];
    norms[0] += norms[k];
  }
  double total = sum_of_lanes(sums[0]), total_squares = sum_of_lanes(norms[0]);
  for (; j < n; ++j) {
    const double v = to_float(x[j]);
    total += v;
    total_squares += v * v;
  }
  sum += total;
  squares += total_squares;
}

// totals[c] += the sum of the lanes of sums[c].
DPK_INLINE void add_lanes(const vd (&sums)[4], double* totals) {
  for (int c = 0; c < 4; ++c) totals[c] += sum_of_lanes(sums[c]);
}
DPK_INLINE void add_lanes(const vf (&sums)[4], double* totals) {
#if DPK_VECTOR_BYTES >= 32
  __m256 s[4];
  for (int c = 0; c < 4; ++c) {
#if DPK_VECTOR_BYTES == 64
    s[c] = _mm256_add_ps(_mm512_castps512_ps256((__m512)sums[c]),
                         _mm512_extractf32x8_ps((__m512)sums[c], 1));
#else
    s[c] = (__m256)sums[c];
#endif
  }
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
  _mm256_storeu_pd(totals, _mm256_add_pd(_mm256_loadu_pd(totals), _mm256_cvtps_pd(four)));
#else
  for (int c = 0; c < 4; ++c) {
    float total = 0.0f;
    for (int i = 0; i < kLanes; ++i) total += sums[c][i];
    totals[c] += total;
  }
#endif
}

// totals[r][c] = dot product of a[r] and b[c] over n elements, a multiple of kLanes. Three rows by
// four columns: twelve sums, three elements of a and one of b fill the sixteen registers of AVX2.
//
// A lane adds up 32 products in T before they go into a double: the bound of what rounding takes
// (kRoundings of conv.cpp) does not grow with n.
template <int kRows, class T>
DPK_INLINE void dot_tile(const T* const (&a)[kRows], const T* const (&b)[4], int64_t n,
                         double (&totals)[kRows][4]) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t kStep = sizeof(V) / sizeof(T);
  constexpr int64_t kChain = 32 * kStep;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 4; ++c) totals[r][c] = 0.0;
  }
  for (int64_t begin = 0; begin < n; begin += kChain) {
    const int64_t end = begin + kChain < n ? begin + kChain : n;
    V sums[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < 4; ++c) sums[r][c] = V{};
    }
    for (int64_t l = begin; l < end; l += kStep) {
      V left[kRows];
      for (int r = 0; r < kRows; ++r) left[r] = load_vector(a[r] + l);
      for (int c = 0; c < 4; ++c) {
        const V right = load_vector(b[c] + l);
        for (int r = 0; r < kRows; ++r) sums[r][c] += left[r] * right;
      }
    }
    for (int r = 0; r < kRows; ++r) add_lanes(sums[r], totals[r]);
  }
}
