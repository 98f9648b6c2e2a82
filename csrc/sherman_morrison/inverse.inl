// The row passes of the rank-one update for one instruction set: see common/for_each_isa.h.

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(DPK_VECTOR_BYTES)));
};

// For kRows rows and the columns [begin, end): dots[r] += row_r . x;  y += sum_r factors[r] row_r.
// Both products of a matrix, with x and with its transpose, come from one read of it.
template <class T, int kRows>
DPK_INLINE void multiply_rows(const T* h, int64_t stride, int64_t begin, int64_t end, const T* x,
                              const T* factors, T* y, double* dots) {
  using V = typename VectorOf<T>::type;
  constexpr int kStep = sizeof(V) / sizeof(T);
  // Sums of so many columns in T, then in double: what they lose does not grow with the row.
  constexpr int64_t kRun = 64 * kStep;
  int64_t j = begin;
  while (j + kStep <= end) {
    const int64_t run_end = end - j < kRun ? end : j + kRun;
    V sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = V{};
    for (; j + kStep <= run_end; j += kStep) {
      const V at_x = load_as<V>(x + j);
      V at_y = load_as<V>(y + j);
      for (int r = 0; r < kRows; ++r) {
        const V row = load_as<V>(h + r * stride + j);
        sums[r] += row * at_x;
        at_y += factors[r] * row;
      }
      store(y + j, at_y);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int lane = 0; lane < kStep; ++lane) dots[r] += sums[r][lane];
    }
  }
  for (; j < end; ++j) {
    for (int r = 0; r < kRows; ++r) {
      dots[r] += double(h[r * stride + j]) * x[j];
      y[j] += factors[r] * h[r * stride + j];
    }
  }
}

// Rows taken together: y is loaded and stored once for all of them.
constexpr int kRowsTogether = 4;

// p[i] = row_i . u for the rows [begin, end) of H [n, n], and q = sum_i v[i] row_i over them.
template <class T>
void multiply_both_sides(const T* h, int64_t n, int64_t begin, int64_t end, const T* u, const T* v,
                         T* p, T* q) {
  for (int64_t j = 0; j < n; ++j) q[j] = T(0);
  int64_t i = begin;
  for (; i + kRowsTogether <= end; i += kRowsTogether) {
    double dots[kRowsTogether];
    for (int r = 0; r < kRowsTogether; ++r) dots[r] = 0.0;
    multiply_rows<T, kRowsTogether>(h + i * n, n, 0, n, u, v + i, q, dots);
    for (int r = 0; r < kRowsTogether; ++r) p[i + r] = T(dots[r]);
  }
  for (; i < end; ++i) {
    double dot = 0.0;
    multiply_rows<T, 1>(h + i * n, n, 0, n, u, v + i, q, &dot);
    p[i] = T(dot);
  }
}

// The same for a symmetric H and u = v, from the upper triangle: p + q, over all slices, is H u.
template <class T>
void multiply_symmetric(const T* h, int64_t n, int64_t begin, int64_t end, const T* u, const T*,
                        T* p, T* q) {
  for (int64_t j = 0; j < n; ++j) q[j] = T(0);
  constexpr int64_t kStep = DPK_VECTOR_BYTES / sizeof(T);
  for (int64_t i = begin; i < end; i += kRowsTogether) {
    const int rows = end - i < kRowsTogether ? int(end - i) : kRowsTogether;
    // The triangle, and the columns up to the next whole vector.
    const int64_t whole = (i + rows + kStep - 1) / kStep * kStep;
    const int64_t edge = whole < n ? whole : n;
    double dots[kRowsTogether];
    for (int r = 0; r < rows; ++r) {
      const T* row = h + (i + r) * n;
      dots[r] = double(row[i + r]) * u[i + r];
      for (int64_t j = i + r + 1; j < edge; ++j) {
        dots[r] += double(row[j]) * u[j];
        q[j] += row[j] * u[i + r];
      }
    }
    if (rows == kRowsTogether) {
      multiply_rows<T, kRowsTogether>(h + i * n, n, edge, n, u, u + i, q, dots);
    } else {
      for (int r = 0; r < rows; ++r) {
        multiply_rows<T, 1>(h + (i + r) * n, n, edge, n, u, u + i + r, q, dots + r);
      }
    }
    for (int r = 0; r < rows; ++r) p[i + r] = T(dots[r]);
  }
}

// row_i -= left[i] * right for the rows [begin, end).
template <class T>
void subtract_outer(T* h, int64_t n, int64_t begin, int64_t end, const T* left, const T* right) {
  for (int64_t i = begin; i < end; ++i) {
    const T factor = left[i];
    T* row = h + i * n;
    for (int64_t j = 0; j < n; ++j) row[j] -= factor * right[j];
  }
}
