// The product of gemm.h for one instruction set. Included by kernels inside for_each_isa.h.
//
// Operands are packed into panels that the micro-kernel reads in order: a block of A that stays in
// the second-level cache, a block of B that stays in the last-level one, and one panel of B in the
// first-level cache at a time.

// Rows of a tile: with two vectors of columns, its sums take 12 of 16 registers (28 of 32).
constexpr int kTileRows = DPK_VECTOR_BYTES == 64 ? 14 : 6;

// Products are added up in chains of so many, and the chains one after the other: what rounding
// takes of a long sum grows with the chain (ghost/rounding.h), not with the sum.
constexpr int64_t kGemmChain = 64;

template <class T>
struct GemmSizes {
  typedef T V __attribute__((vector_size(DPK_VECTOR_BYTES)));
  static constexpr int kLanesOfV = DPK_VECTOR_BYTES / sizeof(T);
  static constexpr int kTileCols = 2 * kLanesOfV;
};

// Rows of a tile's left operand: as they are, `stride` apart (Step 1), or in a packed panel
// [k, kTileRows] (Step kTileRows, stride 1). A tile of fewer rows repeats the last one.
template <int Rows, int Step, class T>
struct TileRows {
  const T* at[Rows];
  DPK_INLINE TileRows(const T* a, int64_t stride, int64_t rows) {
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) at[r] = a + (Step > 1 || r < rows ? r : rows - 1) * stride;
  }
  DPK_INLINE void skip(int64_t k) {
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) at[r] += k * Step;
  }
};

// tile [Rows, kTileCols] = a b for rows of a and a packed panel b [k, kTileCols].
template <int Rows, int Step, class T>
DPK_INLINE void multiply_panels(int64_t k, const TileRows<Rows, Step, T>& a, const T* b,
                                typename GemmSizes<T>::V (&tile)[kTileRows][2]) {
  using V = typename GemmSizes<T>::V;
  constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
#pragma GCC unroll 14
  for (int r = 0; r < Rows; ++r) tile[r][0] = tile[r][1] = V{};
  // Unrolled, the loop is 20 instructions a step, not 24. Measured for 256 x 784 x 784 on two
  // cores of a shared machine: 1.79 ms and 1.80 in its fast spells, 2.13 instead of 2.46 in its
  // slow ones. Eight times gains nothing over four.
#pragma GCC unroll 4
  for (int64_t p = 0; p < k; ++p) {
    const V b0 = load_as<V>(b), b1 = load_as<V>(b + kLanesOfV);
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) {
      tile[r][0] += a.at[r][p * Step] * b0;
      tile[r][1] += a.at[r][p * Step] * b1;
    }
    b += 2 * kLanesOfV;
  }
}

// Four rows of four become four columns of four.
template <class V4>
DPK_INLINE void transpose(V4& a, V4& b, V4& c, V4& d) {
  const V4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const V4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const V4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const V4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

// Four neighbouring rows of a panel, each contiguous along k.
template <int Width, class T>
DPK_INLINE void pack_four_rows(int64_t k, const T* x, int64_t row_stride, T* packed) {
  // Never passed by value: four doubles are more than a register of the portable path.
  typedef T V4 __attribute__((vector_size(4 * sizeof(T))));
  int64_t p = 0;
  for (; p + 4 <= k; p += 4) {
    V4 rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) __builtin_memcpy(&rows[r], x + r * row_stride + p, sizeof(V4));
    transpose(rows[0], rows[1], rows[2], rows[3]);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) __builtin_memcpy(packed + (p + q) * Width, &rows[q], sizeof(V4));
  }
  for (; p < k; ++p) {
    for (int r = 0; r < 4; ++r) packed[p * Width + r] = x[r * row_stride + p];
  }
}

// One panel, [k, Width], of up to Width rows of x, the rest filled up with zeros.
template <int Width, class T>
DPK_INLINE void pack_panel(int64_t rows, int64_t k, const T* x, int64_t row_stride,
                           int64_t k_stride, T* packed) {
  if (rows >= Width && row_stride == 1) {
    for (int64_t p = 0; p < k; ++p) {
      __builtin_memcpy(packed + p * Width, x + p * k_stride, Width * sizeof(T));
    }
    return;
  }
  int r = 0;
  if (k_stride == 1) {
    for (; r + 4 <= Width && r + 4 <= rows; r += 4) {
      pack_four_rows<Width>(k, x + r * row_stride, row_stride, packed + r);
    }
  }
  for (; r < Width; ++r) {
    const T* const row = x + r * row_stride;
    if (r < rows) {
      for (int64_t p = 0; p < k; ++p) packed[p * Width + r] = row[p * k_stride];
    } else {
      for (int64_t p = 0; p < k; ++p) packed[p * Width + r] = T(0);
    }
  }
}

// All panels of x, [rows, k] with these strides, one after the other.
template <int Width, class T>
inline void pack_panels(int64_t rows, int64_t k, const T* x, int64_t row_stride, int64_t k_stride,
                        T* packed) {
  for (int64_t i = 0; i < rows; i += Width) {
    pack_panel<Width>(rows - i, k, x + i * row_stride, row_stride, k_stride, packed + i * k);
  }
}

template <int Rows, class T>
DPK_INLINE void store_tile(const typename GemmSizes<T>::V (&tile)[kTileRows][2], T* c, int64_t ldc,
                           int64_t rows, int64_t cols, bool accumulate) {
  using V = typename GemmSizes<T>::V;
  constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
  if (rows >= Rows && cols >= 2 * kLanesOfV) {
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) {
      for (int half = 0; half < 2; ++half) {
        T* const to = c + r * ldc + half * kLanesOfV;
        store(to, accumulate ? load_as<V>(to) + tile[r][half] : tile[r][half]);
      }
    }
    return;
  }
  T copy[kTileRows][2 * kLanesOfV];
  __builtin_memcpy(copy, tile, Rows * sizeof(copy[0]));
  for (int r = 0; r < rows && r < Rows; ++r) {
    for (int j = 0; j < cols && j < 2 * kLanesOfV; ++j) {
      c[r * ldc + j] = accumulate ? c[r * ldc + j] + copy[r][j] : copy[r][j];
    }
  }
}

template <int Rows, int Step, class T>
inline void multiply_tile(int64_t k, const T* a, int64_t a_stride, const T* b, T* c, int64_t ldc,
                          int64_t rows, int64_t cols, bool accumulate) {
  typename GemmSizes<T>::V tile[kTileRows][2];
  // Measured for the three products of 256 x 784 -> 512: 4.67 ms without, 4.53 with it, if c is in
  // no cache; 4.49 and 4.45 if it is.
  if (rows >= Rows) {
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) __builtin_prefetch(c + r * ldc, 1);
  }
  TileRows<Rows, Step, T> left(a, a_stride, rows);
  multiply_panels<Rows, Step, T>(k < kGemmChain ? k : kGemmChain, left, b, tile);
  for (int64_t p = kGemmChain; p < k; p += kGemmChain) {
    typename GemmSizes<T>::V next[kTileRows][2];
    left.skip(kGemmChain);
    b += kGemmChain * GemmSizes<T>::kTileCols;
    multiply_panels<Rows, Step, T>(k - p < kGemmChain ? k - p : kGemmChain, left, b, next);
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) {
      tile[r][0] += next[r][0];
      tile[r][1] += next[r][1];
    }
  }
  store_tile<Rows, T>(tile, c, ldc, rows, cols, accumulate);
}

// The last few rows of a block do not pay for a whole tile. Measured: 32 x 196 x 144 (five tiles of
// six rows, and two rows) runs at 76 GFLOP/s with this and at 73 with a sixth whole tile.
template <int Step, class T>
inline void multiply_last_tile(int64_t k, const T* a, int64_t a_stride, const T* b, T* c,
                               int64_t ldc, int64_t rows, int64_t cols, bool accumulate) {
  if (rows <= 2) {
    multiply_tile<2, Step>(k, a, a_stride, b, c, ldc, rows, cols, accumulate);
  } else if (rows <= 4) {
    multiply_tile<4, Step>(k, a, a_stride, b, c, ldc, rows, cols, accumulate);
  } else {
    multiply_tile<kTileRows, Step>(k, a, a_stride, b, c, ldc, rows, cols, accumulate);
  }
}

// Where the panels of a block of b come from, or null if they are packed already.
template <class T>
struct PanelSource {
  const T* data;
  int64_t col_stride, row_stride;
};

// Brings lines [first, last) of a panel that is packed next into the cache.
template <class T>
DPK_INLINE void fetch_lines(const PanelSource<T>& source, int64_t column, int64_t first,
                            int64_t last) {
  const T* line = source.data + column + first * source.row_stride;
  for (int64_t p = first; p < last; ++p, line += source.row_stride) __builtin_prefetch(line);
}

// A block of c from packed blocks of a and b; `above` is by how much its first column lies to the
// right of its first row. Tiles that lie wholly below the diagonal are left out if `upper`.
//
// Panels of b are packed when their turn comes, and the lines of the next one are fetched between
// this one's tiles: they are far apart, and no prefetcher follows them. Measured for 256 x 784 x
// 784 on two cores: 2.40 ms with all of b packed first, 2.32 like this; 256 x 512 x 512 1.10
// and 1.04.
template <int Step, class T>
inline void multiply_blocks(int64_t rows, int64_t cols, int64_t depth, const T* a, int64_t a_stride,
                            const PanelSource<T>& source, T* b, T* c, int64_t ldc, bool accumulate,
                            bool upper, int64_t above) {
  constexpr int kTileCols = GemmSizes<T>::kTileCols;
  const int64_t lines_per_tile = depth / (rows / kTileRows + 1) + 1;
  for (int64_t j = 0; j < cols; j += kTileCols) {
    if (source.data != nullptr) {
      pack_panel<kTileCols>(cols - j, depth, source.data + j * source.col_stride, source.col_stride,
                            source.row_stride, b + j * depth);
    }
    const bool fetch =
        source.data != nullptr && source.col_stride == 1 && j + 2 * kTileCols <= cols;
    int64_t line = fetch ? 0 : depth;
    for (int64_t i = 0; i < rows; i += kTileRows) {
      if (upper && above + j + kTileCols <= i) break;
      if (line < depth) {
        const int64_t next = depth - line < lines_per_tile ? depth : line + lines_per_tile;
        fetch_lines(source, j + kTileCols, line, next);
        line = next;
      }
      auto* const multiply =
          rows - i < kTileRows ? multiply_last_tile<Step, T> : multiply_tile<kTileRows, Step, T>;
      multiply(depth, a + i * (Step > 1 ? depth : a_stride), a_stride, b + j * depth,
               c + i * ldc + j, ldc, rows - i, cols - j, accumulate);
    }
  }
}

// Equal parts of at most `most`, so that no part is too thin to pay for its pass over c.
inline int64_t part_of(int64_t n, int64_t most) {
  const int64_t parts = (n + most - 1) / most;
  return parts == 0 ? 1 : (n + parts - 1) / parts;
}

// Up to so many columns, packing rows of a costs more than it saves. Measured on one core, GFLOP/s
// packed and as they are: 512 x 10 x 256 37 and 56, 64 x 64 x 64 79 and 87, 256 x 96 x 256 88 and
// 94, 120 x 128 x 257 86 and 91; 256 x 192 x 784 87 and 87, 256 x 384 x 784 90 and 89.
constexpr int64_t kUnpackedCols = 128;

// c (+)= a b in one thread; only tiles that reach the diagonal or lie above it if `upper`.
template <class T>
void gemm_blocks(int64_t m, int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c,
                 int64_t ldc, bool accumulate, bool upper, void* workspace) {
  using Blocks = GemmBlocks<T>;
  T* const packed_a = static_cast<T*>(workspace);
  T* const packed_b = packed_a + Blocks::kPackedA;
  if (k == 0 && !accumulate) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = upper ? i : 0; j < n; ++j) c[i * ldc + j] = T(0);
    }
  }
  const int64_t most_depth = part_of(k, Blocks::kDepth);
  for (int64_t jc = 0; jc < n; jc += Blocks::kCols) {
    const int64_t cols = n - jc < Blocks::kCols ? n - jc : Blocks::kCols;
    for (int64_t pc = 0; pc < k; pc += most_depth) {
      const int64_t depth = k - pc < most_depth ? k - pc : most_depth;
      PanelSource<T> source{b.data + pc * b.row_stride + jc * b.col_stride, b.col_stride,
                            b.row_stride};
      for (int64_t ic = 0; ic < m; ic += Blocks::kRows) {
        if (upper && jc + cols <= ic) break;
        const int64_t rows = m - ic < Blocks::kRows ? m - ic : Blocks::kRows;
        const T* const block = a.data + ic * a.row_stride + pc * a.col_stride;
        T* const to = c + ic * ldc + jc;
        const bool add = accumulate || pc > 0;
        if (a.col_stride == 1 && cols <= kUnpackedCols) {
          multiply_blocks<1, T>(rows, cols, depth, block, a.row_stride, source, packed_b, to, ldc,
                                add, upper, jc - ic);
        } else {
          pack_panels<kTileRows>(rows, depth, block, a.row_stride, a.col_stride, packed_a);
          multiply_blocks<kTileRows, T>(rows, cols, depth, packed_a, 1, source, packed_b, to, ldc,
                                        add, upper, jc - ic);
        }
        source.data = nullptr;
      }
    }
  }
}
