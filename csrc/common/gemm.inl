// The product of gemm.h for one instruction set. Included by kernels inside for_each_isa.h.
//
// Operands are packed into panels that the micro-kernel reads in order: a block of A that stays in
// the second-level cache, a block of B that stays in the last-level one, and one panel of B in the
// first-level cache at a time.

// Rows of a tile: with two vectors of columns, its sums take 12 of 16 registers (28 of 32).
constexpr int kTileRows = DPK_VECTOR_BYTES == 64 ? 14 : 6;

template <class T>
struct GemmSizes {
  typedef T V __attribute__((vector_size(DPK_VECTOR_BYTES)));
  static constexpr int kLanesOfV = DPK_VECTOR_BYTES / sizeof(T);
  static constexpr int kTileCols = 2 * kLanesOfV;
};

// tile [kTileRows, kTileCols] = a b for packed panels a [k, kTileRows] and b [k, kTileCols].
template <class T>
DPK_INLINE void multiply_panels(int64_t k, const T* a, const T* b,
                                typename GemmSizes<T>::V (&tile)[kTileRows][2]) {
  using V = typename GemmSizes<T>::V;
  constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
#pragma GCC unroll 14
  for (int r = 0; r < kTileRows; ++r) tile[r][0] = tile[r][1] = V{};
  for (int64_t p = 0; p < k; ++p) {
    const V b0 = load_as<V>(b), b1 = load_as<V>(b + kLanesOfV);
#pragma GCC unroll 14
    for (int r = 0; r < kTileRows; ++r) {
      tile[r][0] += a[r] * b0;
      tile[r][1] += a[r] * b1;
    }
    a += kTileRows;
    b += 2 * kLanesOfV;
  }
}

// Panels of `Width` rows of x, [rows, k] as strided, each stored as [k, Width]; the last one is
// filled up with zeros.
template <int Width, class T>
inline void pack_panels(int64_t rows, int64_t k, const T* x, int64_t row_stride, int64_t k_stride,
                        T* packed) {
  for (int64_t i = 0; i < rows; i += Width, packed += Width * k) {
    const T* from = x + i * row_stride;
    if (rows - i >= Width) {
      if (row_stride == 1) {
        for (int64_t p = 0; p < k; ++p) {
          __builtin_memcpy(packed + p * Width, from + p * k_stride, Width * sizeof(T));
        }
      } else {
        for (int64_t p = 0; p < k; ++p) {
#pragma GCC unroll 32
          for (int r = 0; r < Width; ++r) {
            packed[p * Width + r] = from[r * row_stride + p * k_stride];
          }
        }
      }
      continue;
    }
    const int left = static_cast<int>(rows - i);
    for (int64_t p = 0; p < k; ++p) {
      for (int r = 0; r < Width; ++r) {
        packed[p * Width + r] = r < left ? from[r * row_stride + p * k_stride] : T(0);
      }
    }
  }
}

template <class T>
DPK_INLINE void store_tile(const typename GemmSizes<T>::V (&tile)[kTileRows][2], T* c, int64_t ldc,
                           int64_t rows, int64_t cols, bool accumulate) {
  using V = typename GemmSizes<T>::V;
  constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
  if (rows >= kTileRows && cols >= 2 * kLanesOfV) {
#pragma GCC unroll 14
    for (int r = 0; r < kTileRows; ++r) {
      for (int half = 0; half < 2; ++half) {
        T* const to = c + r * ldc + half * kLanesOfV;
        store(to, accumulate ? load_as<V>(to) + tile[r][half] : tile[r][half]);
      }
    }
    return;
  }
  T copy[kTileRows][2 * kLanesOfV];
  __builtin_memcpy(copy, tile, sizeof(copy));
  for (int r = 0; r < rows && r < kTileRows; ++r) {
    for (int j = 0; j < cols && j < 2 * kLanesOfV; ++j) {
      c[r * ldc + j] = accumulate ? c[r * ldc + j] + copy[r][j] : copy[r][j];
    }
  }
}

// c (+)= a b in one thread; only tiles that reach the diagonal or lie above it if `upper`.
template <class T>
void gemm_blocks(int64_t m, int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c,
                 int64_t ldc, bool accumulate, bool upper, void* workspace) {
  constexpr int kTileCols = GemmSizes<T>::kTileCols;
  T* const packed_a = static_cast<T*>(workspace);
  T* const packed_b = packed_a + GemmBlocks<T>::kPackedA;
  if (k == 0 && !accumulate) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = upper ? i : 0; j < n; ++j) c[i * ldc + j] = T(0);
    }
  }
  typename GemmSizes<T>::V tile[kTileRows][2];
  for (int64_t jc = 0; jc < n; jc += GemmBlocks<T>::kCols) {
    const int64_t cols = n - jc < GemmBlocks<T>::kCols ? n - jc : GemmBlocks<T>::kCols;
    for (int64_t pc = 0; pc < k; pc += GemmBlocks<T>::kDepth) {
      const int64_t depth = k - pc < GemmBlocks<T>::kDepth ? k - pc : GemmBlocks<T>::kDepth;
      const bool add = accumulate || pc > 0;
      pack_panels<kTileCols>(cols, depth, b.data + pc * b.row_stride + jc * b.col_stride,
                             b.col_stride, b.row_stride, packed_b);
      for (int64_t ic = 0; ic < m; ic += GemmBlocks<T>::kRows) {
        if (upper && jc + cols <= ic) break;
        const int64_t rows = m - ic < GemmBlocks<T>::kRows ? m - ic : GemmBlocks<T>::kRows;
        pack_panels<kTileRows>(rows, depth, a.data + ic * a.row_stride + pc * a.col_stride,
                               a.row_stride, a.col_stride, packed_a);
        for (int64_t j = 0; j < cols; j += kTileCols) {
          for (int64_t i = 0; i < rows; i += kTileRows) {
            if (upper && jc + j + kTileCols <= ic + i) break;
            multiply_panels<T>(depth, packed_a + i * depth, packed_b + j * depth, tile);
            store_tile<T>(tile, c + (ic + i) * ldc + jc + j, ldc, rows - i, cols - j, add);
          }
        }
      }
    }
  }
}
