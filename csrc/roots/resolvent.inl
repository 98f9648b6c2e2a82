// Sums of inverses of shifted tridiagonal matrices, for tridiagonal.h.

// Columns of F that are worked on at once: their running values for two poles are 8 registers.
template <class T>
constexpr int64_t resolvent_columns = 4 * sizeof(typename LanesOf<T>::V) / sizeof(T);

// Adds the elements above row `top` (rows top - 1 down to 0) of a block of columns, for two poles.
// On entry g has row `top` of both; step p goes from row i + 1 to row i: G_ij = ratio_i G_(i+1)j.
template <class T>
DPK_INLINE void add_rows_above(const T* ratio0, const T* ratio1, int64_t top, const T* g0,
                               const T* g1, T cut, T* f, int64_t stride) {
  using V = typename LanesOf<T>::V;
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  constexpr int64_t kCheckEvery = 16;
  V v0[4], v1[4];
  for (int u = 0; u < 4; ++u) {
    v0[u] = load_as<V>(g0 + u * kWidth);
    v1[u] = load_as<V>(g1 + u * kWidth);
  }
  for (int64_t i = top - 1; i >= 0; --i) {
    const T r0 = ratio0[i], r1 = ratio1[i];
    T* const row = f + i * stride;
    V largest{};
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      v0[u] *= r0;
      v1[u] *= r1;
      store(row + u * kWidth, load_as<V>(row + u * kWidth) + (v0[u] + v1[u]));
    }
    if (i % kCheckEvery) continue;
    // What is this small stays so; going on would end in subnormal numbers, which are slow.
    for (int u = 0; u < 4; ++u) largest += lane_abs(v0[u]) + lane_abs(v1[u]);
    if (sum_of_lanes<T>(largest) < cut) return;
  }
}

// Columns [begin, begin + count) of F += sum over two poles, rows 0 to the diagonal.
//
// ratio[p][i], diagonal[p][i]: G_ij = ratio_i G_(i+1)j above the diagonal, and G_ii, weighted.
// count <= resolvent_columns. Elements of F below the diagonal may be written.
template <class T>
void add_resolvents(const T* const* ratio, const T* const* diagonal, int64_t begin, int64_t count,
                    T* f, int64_t stride) {
  T g[2][resolvent_columns<T>];
  for (int p = 0; p < 2; ++p) {
    for (int64_t j = 0; j < resolvent_columns<T>; ++j) g[p][j] = 0;
  }
  T largest = 0;
  for (int64_t i = begin + count - 1; i >= begin; --i) {
    for (int p = 0; p < 2; ++p) {
      for (int64_t j = i + 1; j < begin + count; ++j) g[p][j - begin] *= ratio[p][i];
      g[p][i - begin] = diagonal[p][i];
      largest += diagonal[p][i];
    }
    for (int64_t j = i; j < begin + count; ++j) {
      f[i * stride + j] += g[0][j - begin] + g[1][j - begin];
    }
  }
  // Far below the last digit of anything that it is added to.
  const T cut = largest * T(1e-20);
  if (count == resolvent_columns<T>) {
    add_rows_above<T>(ratio[0], ratio[1], begin, g[0], g[1], cut, f + begin, stride);
    return;
  }
  for (int64_t i = begin - 1; i >= 0; --i) {
    T left = 0;
    for (int64_t j = 0; j < count; ++j) {
      for (int p = 0; p < 2; ++p) g[p][j] *= ratio[p][i];
      f[i * stride + begin + j] += g[0][j] + g[1][j];
      left += (g[0][j] < 0 ? -g[0][j] : g[0][j]) + (g[1][j] < 0 ? -g[1][j] : g[1][j]);
    }
    if (left < cut) return;
  }
}
