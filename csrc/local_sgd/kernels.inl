// What two_layer_epoch does between its small products, for one instruction set: see
// common/for_each_isa.h.

template <class T>
struct SpanSizes {
  typedef T V __attribute__((vector_size(DPK_VECTOR_BYTES)));
  static constexpr int kLanesOfV = DPK_VECTOR_BYTES / sizeof(T);
};

// Sums of a tile: 6 x 4 of 32 registers with AVX-512, 6 x 2 of 16 without.
constexpr int kSpanRows = 6;
constexpr int kSpanVectors = DPK_VECTOR_BYTES == 64 ? 4 : 2;

// out[r] += rows[r] . c for a tile of kSpanRows x (Vectors vectors); c [n, ldc], out rows ldc
// apart. A tile of fewer rows repeats its last one.
template <int Vectors, class T>
DPK_INLINE void span_tile(const T* const (&rows)[kSpanRows], int64_t n, const T* c, int64_t ldc,
                          T* const (&out)[kSpanRows]) {
  using V = typename SpanSizes<T>::V;
  constexpr int kLanesOfV = SpanSizes<T>::kLanesOfV;
  V sums[kSpanRows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < kSpanRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = load_as<V>(out[r] + v * kLanesOfV);
  }
  for (int64_t p = 0; p < n; ++p, c += ldc) {
    V column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = load_as<V>(c + v * kLanesOfV);
#pragma GCC unroll 6
    for (int r = 0; r < kSpanRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] += rows[r][p] * column[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kSpanRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out[r] + v * kLanesOfV, sums[r][v]);
  }
}

// out [size, width] += K_B c for the rows `order` of K = gram [n, n]; c [n, width].
//
// Rows of K are read where they are, and nothing is packed: c is the same for the whole batch and
// has few columns. With rows gathered and gemm instead, 30 epochs of 500 records were 1.8 times as
// fast as the loop of benchmarks/federated/local_loop.py, and 2.8 times with this (busy machine).
template <class T>
void span_product(const T* gram, int64_t n, const int64_t* order, int64_t size, const T* c,
                  int64_t width, T* out) {
  constexpr int kLanesOfV = SpanSizes<T>::kLanesOfV;
  for (int64_t b = 0; b < size; b += kSpanRows) {
    const T* rows[kSpanRows];
    T* to[kSpanRows];
    for (int r = 0; r < kSpanRows; ++r) {
      const int64_t at = b + r < size ? b + r : size - 1;
      rows[r] = gram + order[at] * n;
      to[r] = out + at * width;
    }
    int64_t j = 0;
    const auto advance = [&](int64_t columns) {
      j += columns;
      for (int r = 0; r < kSpanRows; ++r) to[r] += columns;
    };
    for (; j + kSpanVectors * kLanesOfV <= width; advance(kSpanVectors * kLanesOfV)) {
      span_tile<kSpanVectors>(rows, n, c + j, width, to);
    }
    for (; j + kLanesOfV <= width; advance(kLanesOfV)) span_tile<1>(rows, n, c + j, width, to);
    for (int r = 0; r < kSpanRows && b + r < size; ++r) {
      for (int64_t column = j; column < width; ++column) {
        T total = out[(b + r) * width + column];
        for (int64_t p = 0; p < n; ++p) total += rows[r][p] * c[p * width + column];
        out[(b + r) * width + column] = total;
      }
    }
  }
}

// z = relu(z) * mask; a mask of null is all ones. NaN stays NaN, as in torch.
template <class T>
void relu_and_mask(const T* mask, int64_t count, T* z) {
  for (int64_t j = 0; j < count; ++j) z[j] = z[j] < T(0) ? T(0) : z[j];
  if (mask == nullptr) return;
  for (int64_t j = 0; j < count; ++j) z[j] *= mask[j];
}

// back = back * mask where z, the output of relu_and_mask, is not zero, and 0 elsewhere.
template <class T>
void back_through(const T* z, const T* mask, int64_t count, T* back) {
  for (int64_t j = 0; j < count; ++j) back[j] = z[j] <= T(0) ? T(0) : back[j];
  if (mask == nullptr) return;
  for (int64_t j = 0; j < count; ++j) back[j] *= mask[j];
}

template <class T>
void add_row(const T* row, int64_t count, T* sum) {
  for (int64_t j = 0; j < count; ++j) sum[j] += row[j];
}
