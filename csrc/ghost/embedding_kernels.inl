// Rows of errors. Compiled once for each instruction set by for_each_isa.h.
#include "ghost/sums.inl"

template <class In>
double row_squares(const void* row, int64_t n) {
  double sum = 0.0, squares = 0.0;
  sum_and_squares(static_cast<const In*>(row), n, sum, squares);
  return squares;
}

// sum[j] (+)= row[j], in double. Returns the sum of squares of the row.
template <class In>
double add_row(const void* row, int64_t n, double* sum, bool overwrite) {
  const In* x = static_cast<const In*>(row);
  constexpr int kStep = kLanes / 2;
  // Four chains of squares hide the latency of additions.
  constexpr int kChains = 4;
  vd squares[kChains] = {vd{}, vd{}, vd{}, vd{}};
  int64_t j = 0;
  for (; j + kChains * kStep <= n; j += kChains * kStep) {
    for (int k = 0; k < kChains; ++k) {
      const vd v = load_double(x + j + k * kStep);
      double* const to = sum + j + k * kStep;
      squares[k] += v * v;
      store(to, overwrite ? v : load_as<vd>(to) + v);
    }
  }
  double total = sum_of_lanes(squares[0] + squares[1] + (squares[2] + squares[3]));
  for (; j < n; ++j) {
    const double v = to_float(x[j]);
    total += v * v;
    sum[j] = (overwrite ? 0.0 : sum[j]) + v;
  }
  return total;
}

DPK_INLINE vf load_row(const float* p) { return load_float(p); }
DPK_INLINE vf load_row(const BFloat16* p) { return load_float(p); }
DPK_INLINE vf load_row(const Float16* p) { return load_float(p); }
DPK_INLINE vd load_row(const double* p) { return load_as<vd>(p); }

// sum[j] += weight * row[j], in the type of the sums.
template <class In>
void add_weighted_row(const void* row, int64_t n, double weight, void* sum) {
  using Sum = typename SumOf<In>::type;
  using V = typename VectorOf<Sum>::type;
  constexpr int kStep = sizeof(V) / sizeof(Sum);
  const In* x = static_cast<const In*>(row);
  Sum* s = static_cast<Sum*>(sum);
  const Sum w = static_cast<Sum>(weight);
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) store(s + j, load_as<V>(s + j) + w * load_row(x + j));
  for (; j < n; ++j) s[j] += w * static_cast<Sum>(to_float(x[j]));
}

// The same, in double.
template <class In>
void add_weighted_row_in_double(const void* row, int64_t n, double weight, double* sum) {
  constexpr int kStep = kLanes / 2;
  const In* x = static_cast<const In*>(row);
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    store(sum + j, load_as<vd>(sum + j) + weight * load_double(x + j));
  }
  for (; j < n; ++j) sum[j] += weight * to_float(x[j]);
}

DPK_INLINE void add_rounded(float* s, vd v) {
  store(s, load_as<vf_half>(s) + __builtin_convertvector(v, vf_half));
}
DPK_INLINE void add_rounded(double* s, vd v) { store(s, load_as<vd>(s) + v); }

// sum[j] += weight * row[j], a product in double that is rounded to the type of the sums first.
template <class Sum>
void add_rounded_row(const double* row, int64_t n, double weight, void* sum) {
  constexpr int kStep = kLanes / 2;
  Sum* s = static_cast<Sum*>(sum);
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) add_rounded(s + j, weight * load_as<vd>(row + j));
  for (; j < n; ++j) s[j] += static_cast<Sum>(weight * row[j]);
}
