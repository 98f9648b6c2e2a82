// Convolution, one sample at a time. Compiled once for each instruction set by for_each_isa.h.
#include "ghost/sums.inl"

template <class In, class T>
DPK_INLINE void copy_row(T* to, const In* from, int64_t n, int64_t step) {
  for (int64_t x = 0; x < n; ++x) to[x] = static_cast<T>(to_float(from[x * step]));
}
template <>
DPK_INLINE void copy_row(float* to, const float* from, int64_t n, int64_t step) {
  int64_t x = 0;
  if (step == 1) {
    for (; x + kLanes <= n; x += kLanes) store(to + x, load_as<vf>(from + x));
  }
  for (; x < n; ++x) to[x] = from[x * step];
}

// One plane: what a channel's phase meets. The fringe is zero already.
template <class In, class T>
DPK_INLINE void spread_plane(const ConvPlanes& planes, const In* from, const ConvPhase& z,
                             const ConvPhase& y, const ConvPhase& x, T* plane) {
  const int64_t height = planes.extent[1], width = planes.extent[2];
  for (int64_t i = z.begin; i < z.end; ++i) {
    const int64_t slice = (i * planes.stride[0] + z.shift) * planes.in[1];
    for (int64_t j = y.begin; j < y.end; ++j) {
      const In* row = from + (slice + j * planes.stride[1] + y.shift) * planes.in[2];
      copy_row(plane + (i * height + j) * width + x.begin,
               row + x.begin * planes.stride[2] + x.shift, x.end - x.begin, planes.stride[2]);
    }
  }
}

// The input of one sample, into its planes; returns the sum of its channels' squares times their
// weights.
template <class Types>
double spread_input(const ConvPlanes& planes, const void* input, const double* weights,
                    void* output) {
  using In = typename Types::From;
  using T = typename Types::To;
  const In* from = static_cast<const In*>(input);
  T* to = static_cast<T*>(output);
  double total = 0.0;
  for (int64_t c = 0; c < planes.channels; ++c, from += planes.pixels) {
    double sum = 0.0, squares = 0.0;
    sum_and_squares(from, planes.pixels, sum, squares);
    total += weights[c] * squares;
    for (int64_t z = 0; z < planes.phase_count[0]; ++z) {
      for (int64_t y = 0; y < planes.phase_count[1]; ++y) {
        for (int64_t x = 0; x < planes.phase_count[2]; ++x, to += planes.plane) {
          spread_plane(planes, from, planes.phases[0][z], planes.phases[1][y], planes.phases[2][x],
                       to);
        }
      }
    }
  }
  return total;
}

// The errors of one sample, rows at the pitch of the planes and channels `pitch` apart; returns
// their sum of squares, and in sums the sum of each channel.
template <class Types>
double spread_errors(const ConvPlanes& planes, const void* errors, void* output, int64_t pitch,
                     double* sums) {
  using In = typename Types::From;
  using T = typename Types::To;
  const In* from = static_cast<const In*>(errors);
  double squares = 0.0;
  for (int64_t o = 0; o < planes.out_channels; ++o) {
    T* to = static_cast<T*>(output) + o * pitch;
    sums[o] = 0.0;
    sum_and_squares(from, planes.positions, sums[o], squares);
    for (int64_t z = 0; z < planes.out[0]; ++z) {
      for (int64_t y = 0; y < planes.out[1]; ++y, from += planes.out[2]) {
        copy_row(to + (z * planes.extent[1] + y) * planes.extent[2], from, planes.out[2], 1);
      }
    }
  }
  return squares;
}

// Never passed by value: without AVX the compiler has no register for it, and says so.
typedef double four_doubles __attribute__((vector_size(32)));

DPK_INLINE void round_four(const double* from, double* to) { __builtin_memcpy(to, from, 32); }
DPK_INLINE void round_four(const double* from, float* to) {
#if DPK_VECTOR_BYTES >= 32
  _mm_storeu_ps(to, _mm256_cvtpd_ps(_mm256_loadu_pd(from)));
#else
  for (int c = 0; c < 4; ++c) to[c] = static_cast<float>(from[c]);
#endif
}

// Rows [0, kRows) of the gradient of one group; returns their sum of squares, scaled.
template <int kRows, class T>
DPK_INLINE double gradient_rows(const T* errors, int64_t pitch, const T* planes,
                                const int64_t* offsets, int64_t columns, int64_t window,
                                const double* scale, T* grads) {
  const T* a[kRows];
  for (int r = 0; r < kRows; ++r) a[r] = errors + r * pitch;
  four_doubles squares = {0.0, 0.0, 0.0, 0.0};
  for (int64_t j = 0; j < columns; j += 4) {
    const int64_t width = columns - j < 4 ? columns - j : 4;
    const T* b[4];
    for (int c = 0; c < 4; ++c) b[c] = planes + offsets[j + (c < width ? c : 0)];
    double totals[kRows][4];
    dot_tile<kRows>(a, b, window, totals);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 3; c >= width; --c) totals[r][c] = 0.0;
      four_doubles total, factors = {1.0, 1.0, 1.0, 1.0};
      __builtin_memcpy(&total, totals[r], sizeof(total));
      if (scale != nullptr) __builtin_memcpy(&factors, scale + j, sizeof(factors));
      total *= factors;
      squares += total * total;
      if (grads == nullptr) continue;
      if (width == 4) {
        round_four(totals[r], grads + r * columns + j);
      } else {
        for (int c = 0; c < width; ++c) grads[r * columns + j + c] = static_cast<T>(totals[r][c]);
      }
    }
  }
  return squares[0] + squares[1] + squares[2] + squares[3];
}

// The gradient of one group of one sample: `rows` by `columns`, written if grads is not null;
// returns its sum of squares. Three rows of errors stay in the first-level cache meanwhile.
template <class T>
double gradient(const void* errors, int64_t pitch, int64_t rows, const void* planes,
                const int64_t* offsets, int64_t columns, int64_t window, const double* scale,
                void* grads) {
  const T* a = static_cast<const T*>(errors);
  const T* b = static_cast<const T*>(planes);
  T* g = static_cast<T*>(grads);
  const auto at = [&](int64_t o) { return g == nullptr ? nullptr : g + o * columns; };
  double sq_norm = 0.0;
  int64_t o = 0;
  for (; o + 3 <= rows; o += 3) {
    sq_norm += gradient_rows<3>(a + o * pitch, pitch, b, offsets, columns, window, scale, at(o));
  }
  if (rows - o == 2) {
    sq_norm += gradient_rows<2>(a + o * pitch, pitch, b, offsets, columns, window, scale, at(o));
  } else if (rows - o == 1) {
    sq_norm += gradient_rows<1>(a + o * pitch, pitch, b, offsets, columns, window, scale, at(o));
  }
  return sq_norm;
}

// squares[p] += x[p]^2, in double.
template <class In>
DPK_INLINE void add_squares(const In* x, int64_t n, double* squares) {
  constexpr int kStep = kLanes / 2;
  int64_t p = 0;
  for (; p + kStep <= n; p += kStep) {
    const vd v = load_double(x + p);
    store(squares + p, load_as<vd>(squares + p) + v * v);
  }
  for (; p < n; ++p) squares[p] += double(to_float(x[p])) * double(to_float(x[p]));
}

// to[p][c] = from[c][p] for `channels` by `points`; rows of `to` are `pitch` apart. squares[p]: the
// sum of squares of a point. Returns that of all; where sums is not null, adds up each channel.
template <class Types>
double transpose(const void* input, int64_t channels, int64_t points, void* output, int64_t pitch,
                 double* squares, double* sums) {
  using In = typename Types::From;
  using T = typename Types::To;
  double total = 0.0;
  for (int64_t p = 0; p < points; ++p) squares[p] = 0.0;
  for (int64_t c = 0; c < channels; ++c) {
    const In* from = static_cast<const In*>(input) + c * points;
    T* to = static_cast<T*>(output) + c;
    double sum = 0.0;
    sum_and_squares(from, points, sum, total);
    if (sums != nullptr) sums[c] = sum;
    add_squares(from, points, squares);
    for (int64_t p = 0; p < points; ++p) to[p * pitch] = static_cast<T>(to_float(from[p]));
  }
  return total;
}

// Calls visit(s, t, products) for the tiles of the upper triangle of a a^T, a having n rows of
// length `pitch`: products[i][j] is row s + i times row t + j (garbage where those are beyond n).
template <class T, class Visit>
DPK_INLINE void visit_gram_tiles(const T* a, int64_t n, int64_t pitch, Visit&& visit) {
  for (int64_t s = 0; s < n; s += 3) {
    const T* rows[3];
    for (int i = 0; i < 3; ++i) rows[i] = a + (s + i < n ? s + i : s) * pitch;
    for (int64_t t = s / 4 * 4; t < n; t += 4) {
      const T* columns[4];
      for (int j = 0; j < 4; ++j) columns[j] = a + (t + j < n ? t + j : t) * pitch;
      double products[3][4];
      dot_tile<3>(rows, columns, pitch, products);
      visit(s, t, products);
    }
  }
}

// sum over positions s, t of (patch_s . patch_t)(error_s . error_t), for one group. How far that
// may be off in units of the relative error of products of errors goes to reach[0], sum over s != t
// of |patch_s . patch_t| |error_s| |error_t|, and of patches to reach[1], sum of |patch_s|
// |patch_t| |error_s . error_t|. Terms with s = t are squares of the lengths, in double.
//
// x: [pixels, x_pitch], pixels by channels; d: [positions, d_pitch]. Products of patches are sums
// over the taps of products of pixels, so those are computed once, into `products`
// [pixels + 1, pixels + 1], whose last row and column stand for the padding and are zero.
// meets[tap * positions + t]: the pixel under a tap at position t, or `pixels` for the padding.
template <class T>
double gram(const void* x, int64_t pixels, int64_t x_pitch, const void* d, int64_t positions,
            int64_t d_pitch, const int32_t* meets, int64_t taps, const double* patch_lengths,
            const double* error_lengths, double* products, double* reach) {
  const int64_t ld = pixels + 1;
  visit_gram_tiles(static_cast<const T*>(x), pixels, x_pitch,
                   [&](int64_t s, int64_t t, const double (&tile)[3][4]) {
                     for (int64_t i = s; i < s + 3 && i < pixels; ++i) {
                       for (int64_t j = t; j < t + 4 && j < pixels; ++j) {
                         products[i * ld + j] = products[j * ld + i] = tile[i - s][j - t];
                       }
                     }
                   });
  double total = 0.0, errors_reach = 0.0, patches_reach = 0.0;
  visit_gram_tiles(static_cast<const T*>(d), positions, d_pitch,
                   [&](int64_t s, int64_t t, const double (&tile)[3][4]) {
                     for (int64_t i = s; i < s + 3 && i < positions; ++i) {
                       double row = 0.0, error_reach = 0.0, patch_reach = 0.0;
                       for (int64_t j = t <= i ? i + 1 : t; j < t + 4 && j < positions; ++j) {
                         double patches = 0.0;
                         for (int64_t k = 0; k < taps; ++k) {
                           const int32_t* pixel = meets + k * positions;
                           patches += products[pixel[i] * ld + pixel[j]];
                         }
                         const double errors = tile[i - s][j - t];
                         row += patches * errors;
                         error_reach += __builtin_fabs(patches) * error_lengths[j];
                         patch_reach += __builtin_fabs(errors) * patch_lengths[j];
                       }
                       // Each product beside the diagonal stands for two.
                       total += 2.0 * row;
                       errors_reach += 2.0 * error_reach * error_lengths[i];
                       patches_reach += 2.0 * patch_reach * patch_lengths[i];
                     }
                   });
  for (int64_t t = 0; t < positions; ++t) {
    const double length = patch_lengths[t] * error_lengths[t];
    total += length * length;
  }
  reach[0] += errors_reach;
  reach[1] += patches_reach;
  return total;
}
