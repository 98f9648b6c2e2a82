// Clipped residuals of float32 records for one instruction set: see common/for_each_isa.h. Lanes
// are records.
//
// Logits, exponentials and residuals are float; what bounds a record's contribution is double. With
// e_c = exp(logit_c - largest), o = the sum of e_c over the classes but y, and S = o + e_y, a
// record adds w x^T with
//   w_c = s e_c,  w_y = -s o,  s = min(1 / S, C / (|(e, -o)| |x|)) rounded towards zero.
// The norm is that of the floats e and o that w is made of, so whatever they err by, |w| |x| is at
// most C but for the one rounding of s e_c. o is a sum in which nothing cancels, whichever class is
// the likeliest.
//
// Every record goes through the same operations in the same order, in a full group or in the last:
// its w depends on it and on theta alone, and is the same whichever records are there beside it.
#include "glm/records.inl"

static_assert(kResidualGroup % kRecordLanes == 0 && kResidualGroup % kLanes == 0);

// exp(x) for x <= 0, to about 1e-7; NaN for NaN, 1e-38 for all x < -87. The polynomial is that of
// Cephes' expf.
DPK_INLINE vf exp_nonpositive(vf x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to the nearest integer
  x = x < -87.0f ? vf{} - 87.0f : x;
  const vf shifted = x * 1.44269504f + kRound;
  const vf n = shifted - kRound;
  // ln 2 in two parts, the first of which times n is exact.
  const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf y = vf{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r;
  y = y + 1.0f;
  return y * (vf)(((vi)shifted + 127) << 23);
}

typedef float vf4 __attribute__((vector_size(16)));
typedef float vf8 __attribute__((vector_size(32)));

// Eight rows of eight floats, transposed. Halves of rows r and r + 4 are put side by side when
// they are loaded, which leaves 16 shuffles instead of the 24 of transpose_eight().
DPK_INLINE void load_eight_columns(const float* const (&from)[8], vf8 (&columns)[8]) {
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4) {
    vf8 rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const vf4 above = load_as<vf4>(from[r] + half);
      const vf4 below = load_as<vf4>(from[r + 4] + half);
      rows[r] = __builtin_shufflevector(above, below, 0, 1, 2, 3, 4, 5, 6, 7);
    }
    const vf8 a = __builtin_shufflevector(rows[0], rows[1], 0, 8, 1, 9, 4, 12, 5, 13);
    const vf8 b = __builtin_shufflevector(rows[2], rows[3], 0, 8, 1, 9, 4, 12, 5, 13);
    const vf8 c = __builtin_shufflevector(rows[0], rows[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const vf8 d = __builtin_shufflevector(rows[2], rows[3], 2, 10, 3, 11, 6, 14, 7, 15);
    columns[half] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    columns[half + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    columns[half + 2] = __builtin_shufflevector(c, d, 0, 1, 8, 9, 4, 5, 12, 13);
    columns[half + 3] = __builtin_shufflevector(c, d, 2, 3, 10, 11, 6, 7, 14, 15);
  }
}

DPK_INLINE vd square_root(vd x) {
#if DPK_VECTOR_BYTES == 64
  return (vd)_mm512_sqrt_pd((__m512d)x);
#elif DPK_VECTOR_BYTES == 32
  return (vd)_mm256_sqrt_pd((__m256d)x);
#else
  for (int i = 0; i < kDoubles; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
#endif
}

// xt [features, kResidualGroup] = the transpose of `count` rows; zeros fill up the last
// kRecordLanes. squares [count] = |x|^2.
inline void transpose_and_square(const float* x, int64_t row_stride, int64_t count,
                                 int64_t features, float* xt, double* squares) {
  const float zeros[8] = {};
  const int64_t end = padded_records(count);
  for (int64_t i = 0; i < end; i += 8) {
    const float* from[8];
    for (int r = 0; r < 8; ++r) from[r] = i + r < count ? x + (i + r) * row_stride : nullptr;
    vd sums[8 / kDoubles] = {};
    int64_t j = 0;
    for (; j + 8 <= features; j += 8) {
      const float* at[8];
      for (int r = 0; r < 8; ++r) at[r] = from[r] != nullptr ? from[r] + j : zeros;
      vf8 columns[8];
      load_eight_columns(at, columns);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        float* const to = xt + (j + r) * kResidualGroup + i;
        __builtin_memcpy(to, &columns[r], sizeof(vf8));
        vf_half parts[8 / kDoubles];
        __builtin_memcpy(parts, &columns[r], sizeof(vf8));
        for (int k = 0; k < 8 / kDoubles; ++k) {
          const vd wide = widen(parts[k]);
          sums[k] += wide * wide;
        }
      }
    }
    __builtin_memcpy(squares + i, sums, sizeof(sums));
    for (; j < features; ++j) {
      for (int r = 0; r < 8; ++r) {
        const float value = from[r] != nullptr ? from[r][j] : 0.0f;
        xt[j * kResidualGroup + i + r] = value;
        squares[i + r] += double(value) * double(value);
      }
    }
  }
}

// A vector of floats as two of doubles.
DPK_INLINE void widen_both(vf x, vd (&wide)[2]) {
  vf_half halves[2];
  __builtin_memcpy(halves, &x, sizeof(x));
  wide[0] = widen(halves[0]);
  wide[1] = widen(halves[1]);
}

// The largest floats that are no more than `scale`; scale > 0.
DPK_INLINE void narrow_down(vd scale, float* to) {
  store_narrow(scale, to);
  const vd nearest = load_double(to);
  // Three quarters of a unit in the last place, or more, below a float is nearest to the one below.
  store_narrow(nearest > scale ? nearest * (1.0 - 0x1.8p-24) : nearest, to);
}

// The labels of a vector of records; -1 where there is none.
DPK_INLINE vi narrow_labels_of(const int64_t* labels, int64_t i, int64_t count) {
  int32_t found[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) found[r] = i + r < count ? int32_t(labels[i + r]) : -1;
  return load_as<vi>(found);
}

// Turns the logits of records i, ..., [classes, kResidualGroup], into e, and gives o, S and
// |(e, -o)|^2 of each.
struct Exponentials {
  vf others, all;
  vd squares[2];
};
DPK_INLINE Exponentials exponentials_of(int64_t classes, vi label, float* logits) {
  vf top = load_as<vf>(logits);
  for (int64_t c = 1; c < classes; ++c) {
    const vf logit = load_as<vf>(logits + c * kResidualGroup);
    top = logit > top ? logit : top;
  }
  vf others = vf{}, own = vf{};
  vd squares[2] = {}, wide[2];
  for (int64_t c = 0; c < classes; ++c) {
    const vf e = exp_nonpositive(load_as<vf>(logits + c * kResidualGroup) - top);
    store(logits + c * kResidualGroup, e);
    const vi is_own = label == int32_t(c);
    const vf other = is_own ? vf{} : e;
    own = is_own ? e : own;
    others += other;
    widen_both(other, wide);
    for (int h = 0; h < 2; ++h) squares[h] += wide[h] * wide[h];
  }
  widen_both(others, wide);
  return {others, others + own, {squares[0] + wide[0] * wide[0], squares[1] + wide[1] * wide[1]}};
}

// residuals [classes, ld] = w of `count` <= kResidualGroup records, from their logits and |x|^2;
// sq_norms [count] = squared norms before the clip.
inline void clip_group(int64_t classes, int64_t count, const int64_t* labels, double bound,
                       float* logits, const double* squares, float* residuals, int64_t ld,
                       double* sq_norms) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const vi label = narrow_labels_of(labels, i, count);
    const Exponentials e = exponentials_of(classes, label, logits + i);
    vd all[2];
    widen_both(e.all, all);
    double norms[kLanes];
    float scales[kLanes];
    for (int h = 0; h < 2; ++h) {
      const vd inverse = 1.0 / all[h];
      const vd of_x = load_as<vd>(squares + i + h * kDoubles);
      const vd square = e.squares[h] * of_x * (inverse * inverse);
      store(norms + h * kDoubles, square);
      const vd norm = square_root(square);
      const vd factor = bound / (norm > bound ? norm : vd{} + bound);
      // Where C / |x| < 1e-36, w is so small that rounding to denormals could take it beyond.
      const vl kept = (square <= __DBL_MAX__) & (of_x * 1e-72 <= bound * bound);
      narrow_down(factor * inverse, scales + h * kDoubles);
      const vd scale = load_double(scales + h * kDoubles);
      store_narrow(kept ? scale : vd{}, scales + h * kDoubles);
    }
    const int64_t lanes = count - i < kLanes ? count - i : kLanes;
    __builtin_memcpy(sq_norms + i, norms, lanes * sizeof(double));
    const vf scale = load_as<vf>(scales);
    const vi kept = scale != 0.0f;
    for (int64_t c = 0; c < classes; ++c) {
      const vf value =
          label == int32_t(c) ? -e.others : load_as<vf>(logits + c * kResidualGroup + i);
      const vf weight = kept ? scale * value : vf{};
      float* const to = residuals + c * ld + i;
      if (lanes == kLanes) {
        store(to, weight);
      } else {
        for (int64_t r = 0; r < lanes; ++r) to[r] = weight[r];
      }
    }
  }
}

// residuals [classes, ld] and sq_norms [count] of the records of one client. xt: [features,
// kResidualGroup]; logits: [classes, kResidualGroup]. Returns whether all features are finite.
inline bool clip_residuals(const ResidualJob& job, float* xt, float* logits) {
  double squares[kResidualGroup];
  double none = 0;
  for (int64_t i = 0; i < job.count; i += kResidualGroup) {
    const int64_t count = job.count - i < kResidualGroup ? job.count - i : kResidualGroup;
    transpose_and_square(job.x + i * job.row_stride, job.row_stride, count, job.features, xt,
                         squares);
    // Zero times what is not finite is not zero.
    for (int64_t r = 0; r < count; ++r) none += 0.0 * squares[r];
    thin_product<float, float>(job.classes, padded_records(count), job.features, job.theta,
                               job.features, xt, kResidualGroup, /*padded=*/true, logits,
                               kResidualGroup, nullptr);
    clip_group(job.classes, count, job.labels + i, job.bound, logits, squares, job.residuals + i,
               job.ld, job.sq_norms + i);
  }
  return none == 0;
}
