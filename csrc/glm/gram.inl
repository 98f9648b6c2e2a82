// The Gram kernels of one instruction set: see common/for_each_isa.h.

// A[a, b] of record i, without cancellation on the diagonal.
template <class T>
DPK_INLINE T curvature_entry(const ClassPair<T>& pair, int64_t a, int64_t b, int64_t i) {
  const T pa = pair.p[a * pair.ld + i];
  return a == b ? pa * pair.q[a * pair.ld + i] : -(pa * pair.p[b * pair.ld + i]);
}

template <class T>
void pair_weights(const ClassPair<T>& pair, int64_t begin, int64_t end, T* weights) {
  for (int64_t i = begin; i < end; ++i) {
    weights[i - begin] = pair.factors[i] * curvature_entry(pair, pair.a, pair.b, i);
  }
}

template <class T>
void reduced_pair_weights(const ClassPair<T>& pair, int64_t last, T t, int64_t begin, int64_t end,
                          T* weights) {
  for (int64_t i = begin; i < end; ++i) {
    const T border =
        curvature_entry(pair, pair.a, last, i) + curvature_entry(pair, pair.b, last, i);
    const T entry = curvature_entry(pair, pair.a, pair.b, i) +
                    t * (border + t * curvature_entry(pair, last, last, i));
    weights[i - begin] = pair.factors[i] * entry;
  }
}

template <class T>
void scale(const T* x, int64_t row_stride, int64_t count, int64_t features, const T* weights,
           T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const T w = weights[i];
    for (int64_t j = 0; j < features; ++j) out[i * features + j] = w * x[i * row_stride + j];
  }
}

// Tiles, so that a line that is fetched for one row is there for the next ones. Measured on a
// 512 x 512 block with rows 20 KiB apart: tiles of 8 / 16 / 32 / 64 take 0.07 / 0.20 / 0.33 /
// 0.41 ms.
constexpr int64_t kMirrorTile = 8;

template <class T>
void mirror(T* block, int64_t ld, int64_t n) {
  for (int64_t i0 = 0; i0 < n; i0 += kMirrorTile) {
    const int64_t i1 = n - i0 < kMirrorTile ? n : i0 + kMirrorTile;
    for (int64_t j0 = i0; j0 < n; j0 += kMirrorTile) {
      const int64_t j1 = n - j0 < kMirrorTile ? n : j0 + kMirrorTile;
      for (int64_t j = j0; j < j1; ++j) {
        for (int64_t i = i0; i < i1 && i < j; ++i) block[j * ld + i] = block[i * ld + j];
      }
    }
  }
}
