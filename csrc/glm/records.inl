// The record kernels of one instruction set: see common/for_each_isa.h. Lanes are records.

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
    vl label = vl{} - 1;
    for (int64_t r = 0; labels != nullptr && r < kDoubles && i + r < count; ++r) {
      label[r] = labels[i + r];
    }
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

inline void fill_columns(int64_t rows, int64_t begin, int64_t end, double* table) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = begin; i < end; ++i) table[r * kRecordBlock + i] = 0.0;
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

// out [classes, ld] = the first `count` columns of a block's table, zero where the factor is.
template <class T>
void store_table(int64_t classes, int64_t count, const double* table, const T* factors, T* out,
                 int64_t ld) {
  for (int64_t c = 0; c < classes; ++c) {
    for (int64_t i = 0; i < count; ++i) {
      out[c * ld + i] = factors[i] != T(0) ? T(table[c * kRecordBlock + i]) : T(0);
    }
  }
}

// residuals [classes, ld] = factor * (p - e_y).
template <class T>
void store_residuals(int64_t classes, int64_t count, const double* p, const double* q,
                     const int64_t* labels, const T* factors, T* residuals, int64_t ld) {
  for (int64_t c = 0; c < classes; ++c) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = c * kRecordBlock + i;
      const double residual = labels[i] == c ? -q[at] : p[at];
      residuals[c * ld + i] = factors[i] != T(0) ? T(double(factors[i]) * residual) : T(0);
    }
  }
}
