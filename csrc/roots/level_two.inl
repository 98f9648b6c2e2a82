// Products of a vector with rows of a matrix and with a symmetric matrix, for tridiagonal.h.

template <class T>
DPK_INLINE T sum_of_lanes(typename LanesOf<T>::V v) {
  T sum = 0;
  for (unsigned i = 0; i < sizeof(v) / sizeof(T); ++i) sum += v[i];
  return sum;
}

// y += the part of S x that rows [begin, end) of the upper triangle of the symmetric S (n x n)
// give: each element above the diagonal is read once and counts twice. Four rows at a time load
// and store y once for four.
template <class T>
void multiply_symmetric(const T* s, int64_t stride, int64_t n, int64_t begin, int64_t end,
                        const T* x, T* y) {
  using V = typename LanesOf<T>::V;
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  constexpr int kRows = 4;
  for (int64_t i = begin; i < end; i += kRows) {
    const int rows = end - i < kRows ? static_cast<int>(end - i) : kRows;
    for (int r = 0; r < rows; ++r) {
      const T* const row = s + (i + r) * stride;
      y[i + r] += row[i + r] * x[i + r];
      const int64_t stop = rows == kRows ? i + kRows : n;
      for (int64_t j = i + r + 1; j < stop; ++j) {
        y[i + r] += row[j] * x[j];
        y[j] += row[j] * x[i + r];
      }
    }
    if (rows < kRows) return;
    const T* row[kRows];
    V sum[kRows];
    T tail[kRows];
    for (int r = 0; r < kRows; ++r) {
      row[r] = s + (i + r) * stride;
      sum[r] = V{};
      tail[r] = 0;
    }
    int64_t j = i + kRows;
    for (; j + kWidth <= n; j += kWidth) {
      const V xj = load_as<V>(x + j);
      V yj = load_as<V>(y + j);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V element = load_as<V>(row[r] + j);
        sum[r] += element * xj;
        yj += element * x[i + r];
      }
      store(y + j, yj);
    }
    for (; j < n; ++j) {
      for (int r = 0; r < kRows; ++r) {
        tail[r] += row[r][j] * x[j];
        y[j] += row[r][j] * x[i + r];
      }
    }
    for (int r = 0; r < kRows; ++r) y[i + r] += sum_of_lanes<T>(sum[r]) + tail[r];
  }
}

// out[r] = rows[r] . x
template <class T>
void dot_rows(const T* rows, int64_t stride, int64_t count, const T* x, int64_t n, T* out) {
  using V = typename LanesOf<T>::V;
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  for (int64_t r = 0; r < count; ++r) {
    const T* const row = rows + r * stride;
    V sum[4] = {V{}, V{}, V{}, V{}};
    int64_t j = 0;
    for (; j + 4 * kWidth <= n; j += 4 * kWidth) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        sum[u] += load_as<V>(row + j + u * kWidth) * load_as<V>(x + j + u * kWidth);
      }
    }
    T tail = 0;
    for (; j < n; ++j) tail += row[j] * x[j];
    out[r] = sum_of_lanes<T>((sum[0] + sum[1]) + (sum[2] + sum[3])) + tail;
  }
}

// y += sum_r factors[r] rows[r]; `count` is even.
template <class T>
void add_rows(const T* rows, int64_t stride, int64_t count, const T* factors, int64_t n, T* y) {
  using V = typename LanesOf<T>::V;
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  for (int64_t r = 0; r + 1 < count; r += 2) {
    const T *const row0 = rows + r * stride, *const row1 = row0 + stride;
    const T f0 = factors[r], f1 = factors[r + 1];
    int64_t j = 0;
    for (; j + kWidth <= n; j += kWidth) {
      store(y + j, load_as<V>(y + j) + f0 * load_as<V>(row0 + j) + f1 * load_as<V>(row1 + j));
    }
    for (; j < n; ++j) y[j] += f0 * row0[j] + f1 * row1[j];
  }
}
