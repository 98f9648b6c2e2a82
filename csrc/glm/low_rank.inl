// The kernels of low-rank systems of one instruction set: see common/for_each_isa.h.

// weights [count] = factors * p.
template <class T>
void multiply_weights(const T* factors, const T* p, int64_t count, T* weights) {
  for (int64_t i = 0; i < count; ++i) weights[i] = factors[i] * p[i];
}

// roots [count] of the factors.
template <class T>
void square_roots(const T* factors, int64_t count, T* roots) {
  for (int64_t i = 0; i < count; ++i) roots[i] = T(__builtin_sqrt(factors[i]));
}

// out [rows, cols] = columns of xt times weights; both rows ld apart.
template <class T>
void scale_columns(const T* xt, int64_t ld, int64_t rows, int64_t cols, const T* weights, T* out) {
  for (int64_t j = 0; j < rows; ++j) {
    for (int64_t i = 0; i < cols; ++i) out[j * ld + i] = weights[i] * xt[j * ld + i];
  }
}

template <class T>
void negate_upper(T* matrix, int64_t n) {
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t j = r; j < n; ++j) matrix[r * n + j] = -matrix[r * n + j];
  }
}

// t [rows] += y [rows, cols] h, rows of y ld apart.
template <class T>
void add_products(const T* y, int64_t ld, int64_t rows, int64_t cols, const T* h, T* t) {
  typedef T V __attribute__((vector_size(DPK_VECTOR_BYTES)));
  constexpr int64_t kWidth = DPK_VECTOR_BYTES / sizeof(T);
  for (int64_t r = 0; r < rows; ++r) {
    V sums = V{};
    int64_t i = 0;
    for (; i + kWidth <= cols; i += kWidth) sums += load_as<V>(y + r * ld + i) * load_as<V>(h + i);
    T total = 0;
    for (; i < cols; ++i) total += y[r * ld + i] * h[i];
    for (int64_t k = 0; k < kWidth; ++k) total += sums[k];
    t[r] += total;
  }
}

// out [n] = a - b, and its squared norm.
template <class T>
double difference(const T* a, const T* b, int64_t n, T* out) {
  double square = 0;
  for (int64_t j = 0; j < n; ++j) {
    out[j] = a[j] - b[j];
    square += double(out[j]) * double(out[j]);
  }
  return square;
}

// y += x; the squared norm of the sum.
template <class T>
double add_vector(T* y, const T* x, int64_t n) {
  double square = 0;
  for (int64_t j = 0; j < n; ++j) {
    y[j] += x[j];
    square += double(y[j]) * double(y[j]);
  }
  return square;
}
