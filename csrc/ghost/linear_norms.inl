// The inner loops of one instruction set: see common/for_each_isa.h.
#include "common/gemm.inl"
#include "ghost/linear_rows.inl"

// How many products are added up in float before they go to double: the bound of a norm's error
// (ghost/rounding.h) is in proportion.
// Measured for 256 positions of 768 + 768: chains of 16 / 32 / 256 reach 57 / 67 / 75 GFLOP/s.
constexpr int kChain = 32;

DPK_INLINE vf_half low_half(vf v) {
#if DPK_VECTOR_BYTES == 64
  return (vf_half)_mm512_castps512_ps256((__m512)v);
#elif DPK_VECTOR_BYTES == 32
  return (vf_half)_mm256_castps256_ps128((__m256)v);
#else
  return load_as<vf_half>(&v);
#endif
}
DPK_INLINE vf_half high_half(vf v) {
#if DPK_VECTOR_BYTES == 64
  return (vf_half)_mm512_extractf32x8_ps((__m512)v, 1);
#elif DPK_VECTOR_BYTES == 32
  return (vf_half)_mm256_extractf128_ps((__m256)v, 1);
#else
  return load_as<vf_half>((const char*)&v + sizeof(vf_half));
#endif
}

DPK_INLINE void add_in_double(double* to, vf v) {
  store(to, load_as<vd>(to) + widen(low_half(v)));
  store(to + kLanes / 2, load_as<vd>(to + kLanes / 2) + widen(high_half(v)));
}
DPK_INLINE void add_in_double(double* to, vd v) { store(to, load_as<vd>(to) + v); }

// sums [kTileRows, kTileCols] += the dot products, over `depth` elements, of kTileRows rows, whose
// elements are kStride apart, with the columns of a packed panel [depth, kTileCols].
template <class T, int kStride>
DPK_INLINE void add_tile(const T* (&rows)[kTileRows], const T* panel, int64_t depth, double* sums,
                         int64_t stride) {
  using V = typename GemmSizes<T>::V;
  constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
  V tile[kTileRows][2];
  while (depth > 0) {
    const int64_t chain = depth < kChain ? depth : kChain;
#pragma GCC unroll 14
    for (int r = 0; r < kTileRows; ++r) tile[r][0] = tile[r][1] = V{};
    for (int64_t p = 0; p < chain; ++p) {
      const V b0 = load_as<V>(panel), b1 = load_as<V>(panel + kLanesOfV);
#pragma GCC unroll 14
      for (int r = 0; r < kTileRows; ++r) {
        tile[r][0] += rows[r][p * kStride] * b0;
        tile[r][1] += rows[r][p * kStride] * b1;
      }
      panel += 2 * kLanesOfV;
    }
#pragma GCC unroll 14
    for (int r = 0; r < kTileRows; ++r) {
      rows[r] += chain * kStride;
      add_in_double(sums + r * stride, tile[r][0]);
      add_in_double(sums + r * stride + kLanesOfV, tile[r][1]);
    }
    depth -= chain;
  }
}

// sums [rows, columns] += the dot products of rows of x with packed ones; only tiles that reach
// above the diagonal, which begins at row `diagonal` of column 0. Rows and columns of sums are
// rounded up to whole tiles; what is beyond the given ones is not meant to be read.
template <class T>
void add_dots(const T* x, int64_t row_stride, int64_t rows, const T* packed, int64_t columns,
              int64_t depth, int64_t diagonal, double* sums, int64_t stride) {
  const T* from[kTileRows];
  for (int64_t i = 0; i < rows; i += kTileRows) {
    for (int64_t j = 0; j < columns; j += GemmSizes<T>::kTileCols) {
      if (i >= diagonal + j + GemmSizes<T>::kTileCols) continue;
      for (int r = 0; r < kTileRows; ++r) {
        from[r] = x + (i + r < rows ? i + r : rows - 1) * row_stride;
      }
      add_tile<T, 1>(from, packed + j * depth, depth, sums + i * stride + j, stride);
    }
  }
}

// sums [rows, columns] += a b for a packed as panels [depth, kTileRows], b as [depth, kTileCols].
template <class T>
void add_products(const T* a, int64_t rows, const T* b, int64_t columns, int64_t depth,
                  double* sums, int64_t stride) {
  const T* from[kTileRows];
  for (int64_t i = 0; i < rows; i += kTileRows) {
    for (int64_t j = 0; j < columns; j += GemmSizes<T>::kTileCols) {
      for (int r = 0; r < kTileRows; ++r) from[r] = a + i * depth + r;
      add_tile<T, kTileRows>(from, b + j * depth, depth, sums + i * stride + j, stride);
    }
  }
}

// Panels of the columns of x [depth, rows], which lie beside each other.
template <class T>
void pack_rows(int64_t rows, int64_t depth, const T* x, int64_t depth_stride, T* packed) {
  pack_panels<kTileRows>(rows, depth, x, 1, depth_stride, packed);
}

template <class T>
void pack_columns(int64_t columns, int64_t depth, const T* x, int64_t column_stride,
                  int64_t depth_stride, T* packed) {
  pack_panels<GemmSizes<T>::kTileCols>(columns, depth, x, column_stride, depth_stride, packed);
}

// What elements [0, n) of row s of both Gram matrices add to `products`, sum over t of
// (a_s . a_t)(d_s . d_t), and to `reach`, how far that may be off in units of the relative error of
// a dot product: sum of |a_s . a_t| |d_s| |d_t| + |a_s| |a_t| |d_s . d_t|.
inline void add_gram_row(const double* aa, const double* dd, const double* a_lengths,
                         const double* d_lengths, int64_t n, double a_length, double d_length,
                         double* products, double* reach) {
  constexpr int kStep = kLanes / 2;
  typedef int64_t vl __attribute__((vector_size(DPK_VECTOR_BYTES)));
  const vl magnitude = vl{} + INT64_MAX;
  vd product = vd{}, a_reach = vd{}, d_reach = vd{};
  int64_t t = 0;
  for (; t + kStep <= n; t += kStep) {
    const vd x = load_as<vd>(aa + t), y = load_as<vd>(dd + t);
    product += x * y;
    a_reach += (vd)((vl)x & magnitude) * load_as<vd>(d_lengths + t);
    d_reach += (vd)((vl)y & magnitude) * load_as<vd>(a_lengths + t);
  }
  double a_total = sum_of_lanes(a_reach), d_total = sum_of_lanes(d_reach);
  double total = sum_of_lanes(product);
  for (; t < n; ++t) {
    total += aa[t] * dd[t];
    a_total += __builtin_fabs(aa[t]) * d_lengths[t];
    d_total += __builtin_fabs(dd[t]) * a_lengths[t];
  }
  *products += total;
  *reach += a_total * d_length + d_total * a_length;
}
