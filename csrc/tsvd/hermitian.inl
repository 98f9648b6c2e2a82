// Hermitian eigenproblems for one instruction set: Householder reduction to a real tridiagonal
// matrix, implicit QL, and the way back for the eigenvectors that are wanted.
//
// Real and imaginary parts are matrices of their own. Symmetric problems (kComplex false) leave the
// imaginary part alone.

constexpr int kDoubles = kLanes / 2;
typedef int64_t vl __attribute__((vector_size(DPK_VECTOR_BYTES)));

// v with zeros in all but the first `count` lanes.
DPK_INLINE vd first_lanes(vd v, int64_t count) {
  vl lane;
  for (int i = 0; i < kDoubles; ++i) lane[i] = i;
  return (vd)((vl)v & (lane < count));
}

DPK_INLINE double absolute(double x) { return x < 0 ? -x : x; }

// A vector of complex numbers.
struct Parts {
  double* re;
  double* im;
};

// a[r, j...] - v_r conj(w_j) - w_r conj(v_j): the reflected matrix, kDoubles elements of row r.
template <bool kComplex>
DPK_INLINE void reflect(vd& re, vd& im, Parts v, Parts w, int64_t r, int64_t j) {
  const vd vr = load_as<vd>(v.re + j), wr = load_as<vd>(w.re + j);
  re -= v.re[r] * wr + w.re[r] * vr;
  if constexpr (kComplex) {
    const vd vi = load_as<vd>(v.im + j), wi = load_as<vd>(w.im + j);
    re -= v.im[r] * wi + w.im[r] * vi;
    im -= v.im[r] * wr - v.re[r] * wi + w.im[r] * vr - w.re[r] * vi;
  }
}

// Row r of the lower triangle with the last reflection (v, w) applied.
template <bool kComplex>
DPK_INLINE void reflect_row(const Hermitian& h, Parts v, Parts w, int64_t r) {
  double* const re = h.re + r * h.stride;
  double* const im = h.im + r * h.stride;
  for (int64_t j = 0; j < r; j += kDoubles) {
    vd x = load_as<vd>(re + j), y = kComplex ? load_as<vd>(im + j) : vd{};
    reflect<kComplex>(x, y, v, w, r, j);
    store(re + j, first_lanes(x, r - j));
    if constexpr (kComplex) store(im + j, first_lanes(y, r - j));
  }
  h.values[r] -= 2 * (v.re[r] * w.re[r] + (kComplex ? v.im[r] * w.im[r] : 0.0));
}

// Rows [0, rows): applies the last reflection (v, w) if kReflect, and p = A u on the way, so that
// the matrix passes through the registers once for each column that is eliminated.
template <bool kComplex, bool kReflect>
void reflect_and_multiply(const Hermitian& h, int64_t rows, Parts v, Parts w, Parts u, Parts p) {
  for (int64_t j = 0; j < rows; j += kDoubles) {
    store(p.re + j, vd{});
    if constexpr (kComplex) store(p.im + j, vd{});
  }
  for (int64_t r = 0; r < rows; ++r) {
    double* const re = h.re + r * h.stride;
    double* const im = h.im + r * h.stride;
    const double ur = u.re[r], ui = kComplex ? u.im[r] : 0.0;
    vd dot_re = vd{}, dot_im = vd{};
    for (int64_t j = 0; j < r; j += kDoubles) {
      vd x = load_as<vd>(re + j), y = kComplex ? load_as<vd>(im + j) : vd{};
      if constexpr (kReflect) {
        reflect<kComplex>(x, y, v, w, r, j);
        if (r - j < kDoubles) {
          x = first_lanes(x, r - j);
          y = first_lanes(y, r - j);
        }
        store(re + j, x);
        if constexpr (kComplex) store(im + j, y);
      }
      const vd u_re = load_as<vd>(u.re + j);
      dot_re += x * u_re;
      store(p.re + j, load_as<vd>(p.re + j) + x * ur + (kComplex ? y * ui : vd{}));
      if constexpr (kComplex) {
        const vd u_im = load_as<vd>(u.im + j);
        dot_re -= y * u_im;
        dot_im += x * u_im + y * u_re;
        store(p.im + j, load_as<vd>(p.im + j) + x * ui - y * ur);
      }
    }
    if constexpr (kReflect) {
      h.values[r] -= 2 * (v.re[r] * w.re[r] + (kComplex ? v.im[r] * w.im[r] : 0.0));
    }
    p.re[r] += sum_of_lanes(dot_re) + h.values[r] * ur;
    if constexpr (kComplex) p.im[r] += sum_of_lanes(dot_im) + h.values[r] * ui;
  }
}

// Makes row i, which is the conjugate of column i, the vector v of I - tau v v^H, v[i-1] = 1, whose
// adjoint maps the column to a real multiple of its last element's unit vector (LAPACK's zlarfg).
template <bool kComplex>
void make_reflection(const Hermitian& h, int64_t i) {
  double* const re = h.re + i * h.stride;
  double* const im = h.im + i * h.stride;
  vd squares = vd{};
  for (int64_t j = 0; j < i; j += kDoubles) {
    const vd x = load_as<vd>(re + j), y = kComplex ? load_as<vd>(im + j) : vd{};
    squares += x * x + y * y;
    if constexpr (kComplex) store(im + j, -y);
  }
  const double sq_norm = sum_of_lanes(squares);
  const double alpha_re = re[i - 1], alpha_im = kComplex ? im[i - 1] : 0.0;
  // The trace is 1: what is smaller than this does not matter, and its square may be rounded badly.
  if (sq_norm < 1e-200) {
    h.off[i - 1] = h.scale_re[i] = h.scale_im[i] = 0.0;
    for (int64_t j = 0; j < i; ++j) re[j] = im[j] = 0.0;
    return;
  }
  const double norm = __builtin_sqrt(sq_norm);
  const double beta = alpha_re > 0 ? -norm : norm;
  h.off[i - 1] = beta;
  h.scale_re[i] = (beta - alpha_re) / beta;
  h.scale_im[i] = -alpha_im / beta;
  // 1 / (alpha - beta)
  const double difference = alpha_re - beta;
  const double denominator = difference * difference + alpha_im * alpha_im;
  const double factor_re = difference / denominator, factor_im = -alpha_im / denominator;
  for (int64_t j = 0; j < i; j += kDoubles) {
    const vd x = load_as<vd>(re + j), y = kComplex ? load_as<vd>(im + j) : vd{};
    store(re + j, x * factor_re - y * factor_im);
    if constexpr (kComplex) store(im + j, x * factor_im + y * factor_re);
  }
  re[i - 1] = 1.0;
  if constexpr (kComplex) im[i - 1] = 0.0;
}

// p, which is A v, becomes w = tau p - |tau|^2 (v^H p) / 2 v: the reflected A is A - v w^H - w v^H.
template <bool kComplex>
void finish_product(const Hermitian& h, int64_t i, Parts v, Parts p) {
  vd dot = vd{};
  for (int64_t j = 0; j < i; j += kDoubles) {
    dot += load_as<vd>(v.re + j) * load_as<vd>(p.re + j);
    if constexpr (kComplex) dot += load_as<vd>(v.im + j) * load_as<vd>(p.im + j);
  }
  const double tau_re = h.scale_re[i], tau_im = h.scale_im[i];
  const double half = (tau_re * tau_re + tau_im * tau_im) * sum_of_lanes(dot) / 2;
  for (int64_t j = 0; j < i; j += kDoubles) {
    const vd x = load_as<vd>(p.re + j), y = kComplex ? load_as<vd>(p.im + j) : vd{};
    store(p.re + j, tau_re * x - tau_im * y - half * load_as<vd>(v.re + j));
    if constexpr (kComplex) {
      store(p.im + j, tau_re * y + tau_im * x - half * load_as<vd>(v.im + j));
    }
  }
}

// Reduces to tridiagonal form from the last row to the first: rows begin at aligned addresses, and
// QL finds small elements at the top, where it looks for them first.
template <bool kComplex>
void tridiagonalise(const Hermitian& h) {
  Parts v{nullptr, nullptr}, w{nullptr, nullptr};
  for (int64_t i = h.n - 1; i >= 1; --i) {
    if (v.re != nullptr) reflect_row<kComplex>(h, v, w, i);
    make_reflection<kComplex>(h, i);
    const Parts u{h.re + i * h.stride, h.im + i * h.stride};
    const Parts p{h.product[i % 2][0], h.product[i % 2][1]};
    if (v.re != nullptr) {
      reflect_and_multiply<kComplex, true>(h, i, v, w, u, p);
    } else {
      reflect_and_multiply<kComplex, false>(h, i, v, w, u, p);
    }
    finish_product<kComplex>(h, i, u, p);
    v = u;
    w = p;
  }
  if (v.re != nullptr) reflect_row<kComplex>(h, v, w, 0);
}

// Applies the sweeps to the rows of the eigenvectors, a few columns at a time, which stay in the
// first-level cache for all of the sweeps.
void rotate_vectors(const Hermitian& h, int64_t sweep_count) {
  // Measured for n = 120: QL takes 0.89 / 0.71 / 0.72 ms with 2 / 4 / 8.
  constexpr int kVectors = 4;
  for (int64_t column = 0; column < h.n; column += kVectors * kDoubles) {
    double* const base = h.vectors + column;
    for (int64_t k = 0; k < sweep_count; ++k) {
      const Sweep sweep = h.sweeps[k];
      const Rotation* rotation = h.rotations + sweep.first;
      vd run[kVectors];
      double* row = base + sweep.high * h.stride;
      for (int q = 0; q < kVectors; ++q) run[q] = load_as<vd>(row + q * kDoubles);
      for (int64_t i = sweep.high; i > sweep.low; --i, ++rotation) {
        double* const below = row - h.stride;
        for (int q = 0; q < kVectors; ++q) {
          const vd x = load_as<vd>(below + q * kDoubles);
          store(row + q * kDoubles, rotation->s * x + rotation->c * run[q]);
          run[q] = rotation->c * x - rotation->s * run[q];
        }
        row = below;
      }
      for (int q = 0; q < kVectors; ++q) store(row + q * kDoubles, run[q]);
    }
  }
}

// One implicit QL step with Wilkinson's shift on the unreduced block [low, high] (EISPACK tql2).
// Writes the rotations from the highest to the lowest; returns the lowest row they reach.
inline int64_t ql_step(double* d, double* e, int64_t low, int64_t high, Rotation* rotation) {
  double g = (d[low + 1] - d[low]) / (2 * e[low]);
  double r = __builtin_sqrt(g * g + 1.0);
  g = d[high] - d[low] + e[low] / (g + (g < 0 ? -r : r));
  double s = 1.0, c = 1.0, p = 0.0;
  for (int64_t i = high - 1; i >= low; --i) {
    const double f = s * e[i], b = c * e[i];
    r = __builtin_sqrt(f * f + g * g);
    e[i + 1] = r;
    if (r < 1e-150) {  // the block falls apart here
      d[i + 1] -= p;
      e[high] = 0.0;
      return i + 1;
    }
    s = f / r;
    c = g / r;
    g = d[i + 1] - p;
    r = (d[i] - g) * s + 2 * c * b;
    p = s * r;
    d[i + 1] = g + p;
    g = c * r - b;
    *rotation++ = {c, s};
  }
  d[low] -= p;
  e[low] = g;
  e[high] = 0.0;
  return low;
}

// Eigenvalues of the tridiagonal form into h.values and, if asked for, its eigenvectors into the
// rows of h.vectors. The trace is 1. Returns false if 50 steps do not find an eigenvalue.
bool solve_tridiagonal(const Hermitian& h, bool with_vectors) {
  // An element of 2^-60 moves no eigenvalue by more than 1/128 of the rounding error of the trace.
  constexpr double kRelative = 0x1p-53, kAbsolute = 0x1p-60;
  constexpr int kMostSteps = 50;
  double* const d = h.values;
  double* const e = h.off;
  const int64_t n = h.n;
  e[n - 1] = 0.0;
  if (with_vectors) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < h.stride; ++j) h.vectors[i * h.stride + j] = i == j ? 1.0 : 0.0;
    }
  }
  int64_t sweep_count = 0, found = 0;
  for (int64_t low = 0; low < n; ++low) {
    for (int step = 0;; ++step) {
      int64_t high = low;
      while (high < n - 1 &&
             absolute(e[high]) > kRelative * (absolute(d[high]) + absolute(d[high + 1])) &&
             absolute(e[high]) > kAbsolute) {
        ++high;
      }
      if (high == low) break;
      if (step == kMostSteps) return false;
      const int64_t reached = ql_step(d, e, low, high, h.rotations + found);
      if (!with_vectors || reached == high) continue;
      h.sweeps[sweep_count++] = {reached, high, found};
      found += high - reached;
      if (found >= Hermitian::kRotations) {
        rotate_vectors(h, sweep_count);
        sweep_count = found = 0;
      }
    }
  }
  rotate_vectors(h, sweep_count);
  return true;
}

// v, n x columns with rows `stride` apart, becomes Q v: eigenvectors of the tridiagonal form become
// those of the matrix. A few columns at a time, which stay in the first-level cache for all of the
// reflections. Works on multiples of 2 vectors of columns.
template <bool kComplex>
void apply_reflections(const Hermitian& h, double* v_re, double* v_im, int64_t columns,
                       int64_t stride) {
  const Parts v{v_re, v_im};
  // Measured for 60 of 120 vectors: 0.40 / 0.30 / 0.39 ms with 1 / 2 / 4.
  constexpr int kVectors = 2;
  for (int64_t column = 0; column < columns; column += kVectors * kDoubles) {
    for (int64_t i = 1; i < h.n; ++i) {
      const double* const re = h.re + i * h.stride;
      const double* const im = h.im + i * h.stride;
      vd y_re[kVectors], y_im[kVectors];  // v_i^H times the columns
      for (int q = 0; q < kVectors; ++q) y_re[q] = y_im[q] = vd{};
      for (int64_t j = 0; j < i; ++j) {
        const int64_t at = j * stride + column;
        for (int q = 0; q < kVectors; ++q) {
          const vd x = load_as<vd>(v.re + at + q * kDoubles);
          y_re[q] += re[j] * x;
          if constexpr (kComplex) {
            const vd y = load_as<vd>(v.im + at + q * kDoubles);
            y_re[q] += im[j] * y;
            y_im[q] += re[j] * y - im[j] * x;
          }
        }
      }
      for (int q = 0; q < kVectors; ++q) {
        const vd x = y_re[q], y = y_im[q];
        y_re[q] = h.scale_re[i] * x - h.scale_im[i] * y;
        y_im[q] = h.scale_re[i] * y + h.scale_im[i] * x;
      }
      for (int64_t j = 0; j < i; ++j) {
        const int64_t at = j * stride + column;
        for (int q = 0; q < kVectors; ++q) {
          vd x = load_as<vd>(v.re + at + q * kDoubles) - re[j] * y_re[q];
          if constexpr (kComplex) {
            x += im[j] * y_im[q];
            const vd y = load_as<vd>(v.im + at + q * kDoubles);
            store(v.im + at + q * kDoubles, y - re[j] * y_im[q] - im[j] * y_re[q]);
          }
          store(v.re + at + q * kDoubles, x);
        }
      }
    }
  }
}
