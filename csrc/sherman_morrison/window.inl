// Passes over the rows of a window for one instruction set: see common/for_each_isa.h.

// Elements of x as doubles.
template <class T>
void widen_row(const T* x, int64_t n, double* out) {
  constexpr int kStep = kLanes / 2;
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) store(out + j, load_double(x + j));
  for (; j < n; ++j) out[j] = double(x[j]);
}

// Sums of a tile of products: 12 of 16 registers, so that 7 loads feed 12 multiply-adds.
constexpr int kTileLeft = 4;
constexpr int kTileRight = 3;
static_assert(kTileLeft == kGramTileLeft && kTileRight == kGramTileRight);

// sums [tiles, 4, 3, lanes of vd] += products of each of `left` rows with each of `right` rows, as
// `columns` doubles each (a multiple of 8), both numbers rounded up to whole tiles. If `upper`,
// tiles that lie below the diagonal are left as they are.
inline void multiply_tiles(const double* a, int64_t left, const double* b, int64_t right,
                           int64_t columns, bool upper, double* sums) {
  constexpr int kStep = kLanes / 2;
  for (int64_t i = 0; i < left; i += kTileLeft) {
    for (int64_t j = 0; j < right; j += kTileRight, sums += kTileLeft * kTileRight * kStep) {
      if (upper && j + kTileRight <= i) continue;
      const double* x = a + i * columns;
      const double* y = b + j * columns;
      vd tile[kTileLeft][kTileRight];
      for (int r = 0; r < kTileLeft; ++r) {
        for (int c = 0; c < kTileRight; ++c) {
          tile[r][c] = load_as<vd>(sums + (r * kTileRight + c) * kStep);
        }
      }
      for (int64_t p = 0; p < columns; p += kStep) {
        vd column[kTileRight];
        for (int c = 0; c < kTileRight; ++c) column[c] = load_as<vd>(y + c * columns + p);
        for (int r = 0; r < kTileLeft; ++r) {
          const vd row = load_as<vd>(x + r * columns + p);
          for (int c = 0; c < kTileRight; ++c) tile[r][c] += row * column[c];
        }
      }
      for (int r = 0; r < kTileLeft; ++r) {
        for (int c = 0; c < kTileRight; ++c) {
          store(sums + (r * kTileRight + c) * kStep, tile[r][c]);
        }
      }
    }
  }
}

// Doubles of one tile of sums.
inline int64_t tile_doubles() { return kTileLeft * kTileRight * (kLanes / 2); }

// products[r] += row_r . g for kRows rows of n elements.
template <class T, int kRows>
DPK_INLINE void project_rows(const T* w, int64_t stride, int64_t n, const T* g, double* products) {
  constexpr int kStep = kLanes / 2;
  vd sums[kRows][2];
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = vd{};
  int64_t j = 0;
  for (; j + 2 * kStep <= n; j += 2 * kStep) {
    const vd g0 = load_double(g + j), g1 = load_double(g + j + kStep);
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] += load_double(w + r * stride + j) * g0;
      sums[r][1] += load_double(w + r * stride + j + kStep) * g1;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const vd both = sums[r][0] + sums[r][1];
    for (int lane = 0; lane < kStep; ++lane) products[r] += both[lane];
  }
  for (; j < n; ++j) {
    for (int r = 0; r < kRows; ++r) products[r] += double(w[r * stride + j]) * double(g[j]);
  }
}

template <class T>
void project_block(const T* w, int64_t stride, int64_t rows, int64_t n, const T* g,
                   double* products) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) project_rows<T, 4>(w + i * stride, stride, n, g, products + i);
  for (; i < rows; ++i) project_rows<T, 1>(w + i * stride, stride, n, g, products + i);
}

// sums -= sum_r weights[r] row_r for kRows rows of n elements.
template <class T, int kRows>
DPK_INLINE void subtract_rows(const T* w, int64_t stride, int64_t n, const double* weights,
                              double* sums) {
  constexpr int kStep = kLanes / 2;
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    vd total = load_as<vd>(sums + j);
    for (int r = 0; r < kRows; ++r) total -= weights[r] * load_double(w + r * stride + j);
    store(sums + j, total);
  }
  for (; j < n; ++j) {
    for (int r = 0; r < kRows; ++r) sums[j] -= weights[r] * double(w[r * stride + j]);
  }
}

// out = scale * (g - sum_r weights[r] row_r); sums: n doubles to work in.
template <class T>
void combine_block(const T* w, int64_t stride, int64_t rows, int64_t n, const T* g,
                   const double* weights, double scale, double* sums, T* out) {
  widen_row(g, n, sums);
  int64_t i = 0;
  for (; i + 8 <= rows; i += 8) subtract_rows<T, 8>(w + i * stride, stride, n, weights + i, sums);
  for (; i < rows; ++i) subtract_rows<T, 1>(w + i * stride, stride, n, weights + i, sums);
  for (int64_t j = 0; j < n; ++j) out[j] = T(scale * sums[j]);
}
