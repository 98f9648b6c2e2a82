// The Cholesky kernels of one instruction set: see common/for_each_isa.h.

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(DPK_VECTOR_BYTES)));
};

// Replaces the upper triangle of a block [n, n] by U with U^T U = block. Returns 0, or one more
// than the row whose pivot is not positive (a NaN is not).
template <class T>
int64_t factorise_block(T* block, int64_t ld, int64_t n) {
  for (int64_t r = 0; r < n; ++r) {
    T* const pivot_row = block + r * ld;
    if (!(pivot_row[r] > T(0)) || pivot_row[r] - pivot_row[r] != T(0)) return r + 1;
    const T pivot = __builtin_sqrt(pivot_row[r]);
    pivot_row[r] = pivot;
    const T inverse = T(1) / pivot;
    for (int64_t j = r + 1; j < n; ++j) pivot_row[j] *= inverse;
    for (int64_t s = r + 1; s < n; ++s) {
      T* const row = block + s * ld;
      const T factor = pivot_row[s];
      for (int64_t j = s; j < n; ++j) row[j] -= factor * pivot_row[j];
    }
  }
  return 0;
}

// Rows of a strip that are substituted together: with two vectors of columns, their sums take
// eight registers and leave room for what they are multiplied by.
constexpr int kTogether = 4;

// strip [n, two vectors] = U^-T strip, for U [n, n] of factorise_block.
template <class T>
void substitute_strip(const T* u, int64_t ld, int64_t n, typename VectorOf<T>::type (*strip)[2]) {
  using V = typename VectorOf<T>::type;
  int64_t r = 0;
  for (; r + kTogether <= n; r += kTogether) {
    V sum[kTogether][2];
    for (int k = 0; k < kTogether; ++k) {
      sum[k][0] = strip[r + k][0];
      sum[k][1] = strip[r + k][1];
    }
    for (int64_t s = 0; s < r; ++s) {
      const V a = strip[s][0], b = strip[s][1];
      const T* const factors = u + s * ld + r;
#pragma GCC unroll 4
      for (int k = 0; k < kTogether; ++k) {
        sum[k][0] -= factors[k] * a;
        sum[k][1] -= factors[k] * b;
      }
    }
    for (int k = 0; k < kTogether; ++k) {
      for (int s = 0; s < k; ++s) {
        const T factor = u[(r + s) * ld + r + k];
        sum[k][0] -= factor * sum[s][0];
        sum[k][1] -= factor * sum[s][1];
      }
      const T pivot = u[(r + k) * ld + r + k];
      strip[r + k][0] = sum[k][0] /= pivot;
      strip[r + k][1] = sum[k][1] /= pivot;
    }
  }
  for (; r < n; ++r) {
    for (int64_t s = 0; s < r; ++s) {
      strip[r][0] -= u[s * ld + r] * strip[s][0];
      strip[r][1] -= u[s * ld + r] * strip[s][1];
    }
    strip[r][0] /= u[r * ld + r];
    strip[r][1] /= u[r * ld + r];
  }
}

// panel [n, cols], rows ld_panel apart = U^-T panel, for n <= kPanel. Columns go through a strip
// that stays in the first-level cache; the last one is filled up with zeros.
template <class T>
void substitute_panel(const T* u, int64_t ld, int64_t n, T* panel, int64_t ld_panel, int64_t cols) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t kWidth = 2 * sizeof(V) / sizeof(T);
  V strip[kPanel][2];
  for (int64_t j = 0; j < cols; j += kWidth) {
    const int64_t width = cols - j < kWidth ? cols - j : kWidth;
    for (int64_t r = 0; r < n; ++r) {
      if (width < kWidth) strip[r][0] = strip[r][1] = V{};
      __builtin_memcpy(strip[r], panel + r * ld_panel + j, width * sizeof(T));
    }
    substitute_strip<T>(u, ld, n, strip);
    for (int64_t r = 0; r < n; ++r) {
      __builtin_memcpy(panel + r * ld_panel + j, strip[r], width * sizeof(T));
    }
  }
}

template <class T>
void negate_columns(const T* matrix, int64_t ld, int64_t rows, int64_t cols, T* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < cols; ++j) out[r * cols + j] = -matrix[r * ld + j];
  }
}

// x [n] = U^-T x: rows of U are read in order, each subtracted from what is still to come.
template <class T>
void substitute_forwards(const T* u, int64_t n, T* x) {
  for (int64_t r = 0; r < n; ++r) {
    const T* const row = u + r * n;
    const T value = x[r] / row[r];
    x[r] = value;
    for (int64_t j = r + 1; j < n; ++j) x[j] -= value * row[j];
  }
}

// x [n] = U^-1 x: each row of U is a dot product with what is done.
template <class T>
void substitute_backwards(const T* u, int64_t n, T* x) {
  using V = typename VectorOf<T>::type;
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  for (int64_t r = n - 1; r >= 0; --r) {
    const T* const row = u + r * n;
    V sums = V{};
    int64_t j = r + 1;
    for (; j + kWidth <= n; j += kWidth) sums += load_as<V>(row + j) * load_as<V>(x + j);
    T total = 0;
    for (; j < n; ++j) total += row[j] * x[j];
    for (int64_t k = 0; k < kWidth; ++k) total += sums[k];
    x[r] = (x[r] - total) / row[r];
  }
}
