// The record kernels of one instruction set: see common/for_each_isa.h. Lanes are records.
#include "glm/thin_product.inl"

typedef int64_t vl __attribute__((vector_size(DPK_VECTOR_BYTES)));
constexpr int kDoubles = DPK_VECTOR_BYTES / 8;

// exp(x) for x <= 0, to about one unit in the last place; NaN for NaN, 1e-307 for all x < -707.
DPK_INLINE vd exp_nonpositive(vd x) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to the nearest integer
  x = x < -707.0 ? vd{} - 707.0 : x;
  const vd shifted = x * 1.4426950408889634 + kRound;
  const vd n = shifted - kRound;
  // ln 2 in two parts, the first of which times n is exact.
  const vd r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  // Taylor series; |r| <= ln(2) / 2, so the first term left out is below 5e-18.
  vd y = vd{} + 1.0 / 6227020800;
  y = y * r + 1.0 / 479001600;
  y = y * r + 1.0 / 39916800;
  y = y * r + 1.0 / 3628800;
  y = y * r + 1.0 / 362880;
  y = y * r + 1.0 / 40320;
  y = y * r + 1.0 / 5040;
  y = y * r + 1.0 / 720;
  y = y * r + 1.0 / 120;
  y = y * r + 1.0 / 24;
  y = y * r + 1.0 / 6;
  y = y * r + 0.5;
  y = y * r + 1.0;
  y = y * r + 1.0;
  return y * (vd)(((vl)shifted + 1023) << 52);
}

// The labels of a vector of records; -1 where there is none.
DPK_INLINE vl labels_of(const int64_t* labels, int64_t i, int64_t count) {
  if (labels != nullptr && i + kDoubles <= count) return load_as<vl>(labels + i);
  vl label = vl{} - 1;
  for (int64_t r = 0; labels != nullptr && r < kDoubles && i + r < count; ++r) {
    label[r] = labels[i + r];
  }
  return label;
}

// Turns logits, [classes, kRecordBlock] in `p`, into p and q = 1 - p, and gives |p - e_y|^2 and
// |diag p - p p^T|_F^2 of the first `count` records. Neither cancels: q of the likeliest class is
// the sum of the others, and the second norm is a sum of squares,
//   sum_c (p_c q_c)^2 + 2 sum_{c' < c} p_c'^2 p_c^2.
inline void softmax_block(int64_t classes, int64_t count, const int64_t* labels, double* p,
                          double* q, double* gradient, double* hessian) {
  for (int64_t i = 0; i < count; i += kDoubles) {
    vd top = load_as<vd>(p + i);
    vl likeliest = vl{};
    for (int64_t c = 1; c < classes; ++c) {
      const vd logit = load_as<vd>(p + c * kRecordBlock + i);
      likeliest = logit > top ? vl{} + c : likeliest;
      top = logit > top ? logit : top;
    }
    vd others = vd{};
    for (int64_t c = 0; c < classes; ++c) {
      const vd e = exp_nonpositive(load_as<vd>(p + c * kRecordBlock + i) - top);
      others += likeliest == c ? vd{} : e;
      store(p + c * kRecordBlock + i, e);
    }
    const vl label = labels_of(labels, i, count);
    const vd inverse = 1.0 / (1.0 + others);
    vd norm = vd{}, squares = vd{}, products = vd{};
    for (int64_t c = 0; c < classes; ++c) {
      const vd pc = load_as<vd>(p + c * kRecordBlock + i) * inverse;
      const vd qc = likeliest == c ? others * inverse : 1.0 - pc;
      store(p + c * kRecordBlock + i, pc);
      store(q + c * kRecordBlock + i, qc);
      const vd residual = label == c ? qc : pc;
      norm += residual * residual;
      products += (pc * qc) * (pc * qc) + 2.0 * (pc * pc) * squares;
      squares += pc * pc;
    }
    store(gradient + i, norm);
    store(hessian + i, products);
  }
}

inline void widen_rows(const float* x, int64_t row_stride, int64_t count, int64_t features,
                       double* wide) {
  for (int64_t i = 0; i < count; ++i, x += row_stride, wide += features) {
    int64_t j = 0;
    for (; j + kDoubles <= features; j += kDoubles) store(wide + j, load_double(x + j));
    for (; j < features; ++j) wide[j] = x[j];
  }
}

// Eight rows of eight become eight columns of eight.
template <class V8>
DPK_INLINE void transpose_eight(V8 (&rows)[8]) {
  V8 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int r = 0; r < 8; r += 2) {
    pairs[r] = __builtin_shufflevector(rows[r], rows[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[r + 1] = __builtin_shufflevector(rows[r], rows[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
      const V8 &above = pairs[r + s], &below = pairs[r + s + 2];
      fours[r + 2 * s] = __builtin_shufflevector(above, below, 0, 1, 8, 9, 4, 5, 12, 13);
      fours[r + 2 * s + 1] = __builtin_shufflevector(above, below, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    rows[r] = __builtin_shufflevector(fours[r], fours[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[r + 4] = __builtin_shufflevector(fours[r], fours[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// xt [features, ld] = the transpose of `count` rows of x; zeros fill up the columns to a multiple
// of kRecordLanes.
template <class T>
void transpose_rows(const T* x, int64_t row_stride, int64_t count, int64_t features, T* xt,
                    int64_t ld) {
  // Never passed by value: eight doubles are more than a register of the portable path.
  typedef T V8 __attribute__((vector_size(8 * sizeof(T))));
  const T zeros[8] = {};
  const int64_t end = (count + kRecordLanes - 1) / kRecordLanes * kRecordLanes;
  for (int64_t i = 0; i < end; i += 8) {
    int64_t j = 0;
    for (; j + 8 <= features; j += 8) {
      V8 rows[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        const T* const from = i + r < count ? x + (i + r) * row_stride + j : zeros;
        __builtin_memcpy(&rows[r], from, sizeof(V8));
      }
      transpose_eight(rows);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        __builtin_memcpy(xt + (j + r) * ld + i, &rows[r], sizeof(V8));
      }
    }
    for (; j < features; ++j) {
      for (int r = 0; r < 8; ++r) {
        xt[j * ld + i + r] = i + r < count ? x[(i + r) * row_stride + j] : T(0);
      }
    }
  }
}

template <class T>
void squares_of_rows(const T* x, int64_t row_stride, int64_t count, int64_t features,
                     double* squares) {
  for (int64_t i = 0; i < count; ++i, x += row_stride) {
    vd a = vd{}, b = vd{};
    int64_t j = 0;
    for (; j + 2 * kDoubles <= features; j += 2 * kDoubles) {
      const vd u = load_double(x + j), v = load_double(x + j + kDoubles);
      a += u * u;
      b += v * v;
    }
    double total = 0;
    for (; j < features; ++j) total += double(x[j]) * double(x[j]);
    a += b;
    for (int r = 0; r < kDoubles; ++r) total += a[r];
    squares[i] = total;
  }
}

// logits [classes, kRecordBlock] = weights [classes, features] times xt [features, ld], and squares
// [count] = |x|^2; count is a multiple of kRecordLanes.
template <class T>
void logits_and_squares(int64_t classes, int64_t count, int64_t features, const double* weights,
                        const T* xt, int64_t ld, double* logits, double* squares) {
  thin_product<double, T>(classes, count, features, weights, features, xt, ld, /*padded=*/true,
                          logits, kRecordBlock, squares);
}

// sq_norms [count] = (products + kLostSquares) * squares, once more times squares if `twice`: the
// squared norms of gradients and of Hessians.
inline void multiply_norms(int64_t count, const double* products, const double* squares, bool twice,
                           double* sq_norms) {
  for (int64_t i = 0; i < count; ++i) {
    const double once = (products[i] + kLostSquares) * squares[i];
    sq_norms[i] = twice ? once * squares[i] : once;
  }
}

// The largest T that is no more than a factor from 0 to 1.
DPK_INLINE void round_down(double factor, double& rounded) { rounded = factor; }
DPK_INLINE void round_down(double factor, float& rounded) {
  rounded = float(factor);
  int32_t bits;
  __builtin_memcpy(&bits, &rounded, sizeof(bits));
  bits -= double(rounded) > factor;
  __builtin_memcpy(&rounded, &bits, sizeof(bits));
}

// factors [count] = min(1, bound / norm), rounded towards zero; 0 for a norm that is none: what
// clip_factor_of() gives, in vectors, because roots and divisions are slow one after the other.
template <class T>
void factors_of_norms(int64_t count, const double* sq_norms, double bound, T* factors) {
  for (int64_t i = 0; i < count; ++i) {
    const double square = sq_norms[i];
    const double ratio = bound / __builtin_sqrt(square + kLostSquares);
    const double factor = ratio < 1.0 ? ratio : 1.0;
    T rounded;
    round_down(square >= 0.0 && square <= __DBL_MAX__ ? factor : 0.0, rounded);
    factors[i] = rounded;
  }
}

// Doubles as T; store_lanes only the first so many.
DPK_INLINE void store_narrow(vd v, double* to) { store(to, v); }
DPK_INLINE void store_narrow(vd v, float* to) {
#if DPK_VECTOR_BYTES == 64
  store(to, _mm512_cvtpd_ps((__m512d)v));
#elif DPK_VECTOR_BYTES == 32
  store(to, _mm256_cvtpd_ps((__m256d)v));
#else
  for (int r = 0; r < kDoubles; ++r) to[r] = float(v[r]);
#endif
}
template <class T>
DPK_INLINE void store_lanes(vd v, int64_t lanes, T* to) {
  if (lanes >= kDoubles) {
    store_narrow(v, to);
    return;
  }
  for (int64_t r = 0; r < lanes; ++r) to[r] = T(v[r]);
}

// The factors of a vector of records; 0 where there is none.
template <class T>
DPK_INLINE vd factors_at(const T* factors, int64_t lanes) {
  if (lanes >= kDoubles) return load_double(factors);
  vd v = vd{};
  for (int64_t r = 0; r < lanes; ++r) v[r] = double(factors[r]);
  return v;
}

// out [classes, ld] = the first `count` columns of a block's table, zero where the factor is.
template <class T>
void store_table(int64_t classes, int64_t count, const double* table, const T* factors, T* out,
                 int64_t ld) {
  for (int64_t i = 0; i < count; i += kDoubles) {
    const vl kept = factors_at(factors + i, count - i) != 0.0;
    for (int64_t c = 0; c < classes; ++c) {
      const vd value = load_as<vd>(table + c * kRecordBlock + i);
      store_lanes(kept ? value : vd{}, count - i, out + c * ld + i);
    }
  }
}

// residuals [classes, ld] = factor * (p - e_y).
template <class T>
void store_residuals(int64_t classes, int64_t count, const double* p, const double* q,
                     const int64_t* labels, const T* factors, T* residuals, int64_t ld) {
  for (int64_t i = 0; i < count; i += kDoubles) {
    const vd factor = factors_at(factors + i, count - i);
    const vl kept = factor != 0.0, label = labels_of(labels, i, count);
    for (int64_t c = 0; c < classes; ++c) {
      const int64_t at = c * kRecordBlock + i;
      const vd residual = label == c ? -load_as<vd>(q + at) : load_as<vd>(p + at);
      store_lanes(kept ? factor * residual : vd{}, count - i, residuals + c * ld + i);
    }
  }
}
