// Products with few rows on the left, for one instruction set: see common/for_each_isa.h.
//
// c [m, n] = a [m, k] b [k, n], where m is a number of classes. Every element of b is used once for
// each row of a, so packing b (common/gemm.h) costs as much as the product: here b is read where it
// lies. A tile has exactly as many rows as there are, up to kThinRows.

// Rows of a tile: with two vectors of columns and one more row for the squares, the sums take 26 of
// 32 registers (14 of 16, and two for what is multiplied).
constexpr int kThinRows = DPK_VECTOR_BYTES == 64 ? 12 : 6;
// Products are added up in chains of so many: the same as in common/gemm.inl, for the same reason.
constexpr int64_t kThinChain = 64;
// Rows of b that are multiplied before the next columns' turn comes: as deep as common/gemm.h.
constexpr int64_t kThinDepth = 320;

template <class T>
struct ThinVector {
  typedef T V __attribute__((vector_size(DPK_VECTOR_BYTES)));
  static constexpr int kLanesOfV = DPK_VECTOR_BYTES / sizeof(T);
};

// A vector of T from elements of T, or from floats that are widened.
DPK_INLINE void load_vector(vf& v, const float* p) { v = load_as<vf>(p); }
DPK_INLINE void load_vector(vd& v, const double* p) { v = load_as<vd>(p); }
DPK_INLINE void load_vector(vd& v, const float* p) { v = load_double(p); }

// sums [Rows (+ 1), Vectors] = a b for k <= kThinChain rows of b; the additional row, if Squares,
// is the sum of the squares of each column of b. A tile of fewer rows repeats the last one.
template <int Rows, int Vectors, bool Squares, class T, class B>
DPK_INLINE void thin_chain(int64_t k, const T* const (&a)[Rows], const B* b, int64_t ldb,
                           typename ThinVector<T>::V (&sums)[Rows + Squares][Vectors]) {
  using V = typename ThinVector<T>::V;
#pragma GCC unroll 13
  for (int r = 0; r < Rows + Squares; ++r) {
    for (int w = 0; w < Vectors; ++w) sums[r][w] = V{};
  }
  for (int64_t p = 0; p < k; ++p, b += ldb) {
    V right[Vectors];
    for (int w = 0; w < Vectors; ++w) load_vector(right[w], b + w * ThinVector<T>::kLanesOfV);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const T left = a[r][p];
      for (int w = 0; w < Vectors; ++w) sums[r][w] += left * right[w];
    }
    if constexpr (Squares) {
      for (int w = 0; w < Vectors; ++w) sums[Rows][w] += right[w] * right[w];
    }
  }
}

template <class T>
DPK_INLINE void store_columns(typename ThinVector<T>::V v, T* to, int64_t cols, bool accumulate) {
  using V = typename ThinVector<T>::V;
  if (cols >= ThinVector<T>::kLanesOfV) {
    store(to, accumulate ? load_as<V>(to) + v : v);
    return;
  }
  for (int64_t j = 0; j < cols; ++j) to[j] = accumulate ? to[j] + v[j] : v[j];
}

// What a tile is of: `rows` of a, `cols` of b and c, and where the squares go, if anywhere.
template <class T, class B>
struct ThinTile {
  int64_t rows, cols, k;
  const T* a;
  int64_t lda;
  const B* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  T* squares;
  bool accumulate;
};

template <int Rows, int Vectors, bool Squares, class T, class B>
void thin_tile(const ThinTile<T, B>& of) {
  using V = typename ThinVector<T>::V;
  constexpr int kLanesOfV = ThinVector<T>::kLanesOfV;
  const T* a[Rows];
  for (int r = 0; r < Rows; ++r) a[r] = of.a + (r < of.rows ? r : of.rows - 1) * of.lda;
  V sums[Rows + Squares][Vectors];
  for (int64_t p = 0; p == 0 || p < of.k; p += kThinChain) {
    V next[Rows + Squares][Vectors];
    thin_chain<Rows, Vectors, Squares>(of.k - p < kThinChain ? of.k - p : kThinChain, a,
                                       of.b + p * of.ldb, of.ldb, next);
    for (int r = 0; r < Rows; ++r) a[r] += kThinChain;
#pragma GCC unroll 13
    for (int r = 0; r < Rows + Squares; ++r) {
      for (int w = 0; w < Vectors; ++w) sums[r][w] = p == 0 ? next[r][w] : sums[r][w] + next[r][w];
    }
    // Keeps the sums of all chains in memory: in registers they would push out those of this one,
    // which every product goes to. Measured in one thread, two iterations of conjugate gradients
    // for each of 500 clients with 100 records, 64 x 10: 5.2 ms without this, 4.1 with it.
    asm volatile("" : : "r"(&sums[0][0]) : "memory");
  }
#pragma GCC unroll 13
  for (int r = 0; r < Rows + Squares; ++r) {
    if (r < Rows && r >= of.rows) continue;
    T* const to = r < Rows ? of.c + r * of.ldc : of.squares;
    for (int w = 0; w < Vectors; ++w) {
      store_columns<T>(sums[r][w], to + w * kLanesOfV, of.cols - w * kLanesOfV, of.accumulate);
    }
  }
}

// Tiles have an even number of rows: half the code, and an odd number of classes pays for one more.
template <int Rows, int Vectors, class T, class B>
void thin_tile_of_rows(const ThinTile<T, B>& of) {
  if constexpr (Rows > 2) {
    if (of.rows <= Rows - 2) return thin_tile_of_rows<Rows - 2, Vectors>(of);
  }
  if (of.squares != nullptr) return thin_tile<Rows, Vectors, true>(of);
  return thin_tile<Rows, Vectors, false>(of);
}

// c = a b and, unless it is null, squares [n] = sum over rows of b squared. Columns of b from n to
// the next multiple of a vector are read if `padded`.
template <class T, class B>
void thin_product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const B* b, int64_t ldb,
                  bool padded, T* c, int64_t ldc, T* squares) {
  constexpr int kLanesOfV = ThinVector<T>::kLanesOfV;
  const int64_t parts = (m + kThinRows - 1) / kThinRows, part = (m + parts - 1) / parts;
  for (int64_t p = 0; p == 0 || p < k; p += kThinDepth) {
    const int64_t depth = k - p < kThinDepth ? k - p : kThinDepth;
    for (int64_t j = 0; j < n;) {
      const int64_t cols = n - j;
      const bool two = padded ? cols > kLanesOfV : cols >= 2 * kLanesOfV;
      ThinTile<T, B> tile{0,   cols,    depth, nullptr, lda,  b + p * ldb + j,
                          ldb, nullptr, ldc,   nullptr, p > 0};
      B last[kThinDepth * kLanesOfV];
      if (!padded && cols < kLanesOfV) {
        for (int64_t q = 0; q < depth; ++q) {
          for (int64_t i = 0; i < kLanesOfV; ++i) {
            last[q * kLanesOfV + i] = i < cols ? tile.b[q * ldb + i] : B(0);
          }
        }
        tile.b = last;
        tile.ldb = kLanesOfV;
      }
      for (int64_t i = 0; i < m; i += part) {
        tile.rows = m - i < part ? m - i : part;
        tile.a = a + i * lda + p;
        tile.c = c + i * ldc + j;
        tile.squares = i == 0 && squares != nullptr ? squares + j : nullptr;
        if (two) {
          thin_tile_of_rows<kThinRows, 2>(tile);
        } else {
          thin_tile_of_rows<kThinRows, 1>(tile);
        }
      }
      j += two ? 2 * kLanesOfV : kLanesOfV;
    }
  }
}

template <class T>
void thin_product_of(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b,
                     int64_t ldb, bool padded, T* c, int64_t ldc) {
  thin_product<T, T>(m, n, k, a, lda, b, ldb, padded, c, ldc, nullptr);
}
