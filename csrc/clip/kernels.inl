// The inner loops of one instruction set: see common/for_each_isa.h.

// Of the elements [j, n), fewer than a step of the main loop.
template <class T>
DPK_INLINE double rest_sq_norm(const T* x, int64_t j, int64_t n) {
  double total = 0.0;
  for (; j < n; ++j) {
    const double v = to_float(x[j]);
    total += v * v;
  }
  return total;
}

// Sum of squares in double. Eight chains of additions keep the adder busy (latency 4, two a cycle).
template <class T>
double sq_norm(const void* data, int64_t n) {
  constexpr int kStep = kLanes / 2;
  constexpr int kChains = 8;
  const T* x = static_cast<const T*>(data);
  vd sums[kChains];
  for (int k = 0; k < kChains; ++k) sums[k] = vd{};
  int64_t j = 0;
  for (; j + kChains * kStep <= n; j += kChains * kStep) {
    for (int k = 0; k < kChains; ++k) {
      const vd v = load_double(x + j + k * kStep);
      sums[k] += v * v;
    }
  }
  for (; j + kStep <= n; j += kStep) {
    const vd v = load_double(x + j);
    sums[0] += v * v;
  }
  for (int k = 1; k < kChains; ++k) sums[0] += sums[k];
  return sum_of_lanes(sums[0]) + rest_sq_norm(x, j, n);
}

DPK_INLINE vf load_row(const float* p) { return load_float(p); }
DPK_INLINE vf load_row(const BFloat16* p) { return load_float(p); }
DPK_INLINE vf load_row(const Float16* p) { return load_float(p); }
DPK_INLINE vd load_row(const double* p) { return load_as<vd>(p); }

// kVectors vectors at column j of what add_exactly does.
template <int kVectors, bool kMeasure, class T, class Sum, class V, int kRows, int kChains>
DPK_INLINE void add_step(Sum* sum, const T* const (&rows)[kRows], const V (&weights)[kRows],
                         bool overwrite, const T* const (&next)[kRows], int64_t j, int64_t ahead,
                         vd (&norms)[kRows][kChains]) {
  constexpr int kStep = sizeof(V) / sizeof(Sum);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = j + v * kStep;
    V total = weights[0] * load_row(rows[0] + at);
    for (int r = 1; r < kRows; ++r) total += weights[r] * load_row(rows[r] + at);
    if (!overwrite) total += load_as<V>(sum + at);
    store(sum + at, total);
  }
  if constexpr (kMeasure) {
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(next[r] + j + ahead);
      for (int k = 0; k < kVectors * kStep / (kLanes / 2); ++k) {
        const vd v = load_double(next[r] + j + k * (kLanes / 2));
        norms[r][k % kChains] += v * v;
      }
    }
  }
}

// sum[j] (+)= sum over kRows rows of factor * row[j]. If kMeasure, also sq_norms[r] += the squared
// norm of next[r]: the rows are in the cache, the next ones come from memory, and the arithmetic of
// both hides behind the memory's time. What lies `ahead` of the next elements is asked for already.
template <class T, int kRows, bool kMeasure>
DPK_INLINE void add_exactly(typename SumOf<T>::type* sum, const T* const* row_list,
                            const typename SumOf<T>::type* factors, int64_t n, bool overwrite,
                            const T* const* next_list, int64_t ahead, double* sq_norms) {
  using V = decltype(load_row(row_list[0]));
  constexpr int kStep = sizeof(V) / sizeof(factors[0]);
  // Chains of additions for each row; four times two fill the registers beside the factors.
  constexpr int kChains = kRows >= 4 ? 2 : 4;
  // Copies of the addresses: those in the lists might change with every store, for all the compiler
  // knows.
  const T* rows[kRows];
  const T* next[kRows];
  V weights[kRows];
  vd norms[kRows][kChains];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kChains; ++k) norms[r][k] = vd{};
    rows[r] = row_list[r];
    next[r] = kMeasure ? next_list[r] : nullptr;
    weights[r] = V{} + factors[r];
  }
  int64_t j = 0;
  for (; j + 2 * kStep <= n; j += 2 * kStep) {
    add_step<2, kMeasure>(sum, rows, weights, overwrite, next, j, ahead, norms);
  }
  for (; j + kStep <= n; j += kStep) {
    add_step<1, kMeasure>(sum, rows, weights, overwrite, next, j, ahead, norms);
  }
  if constexpr (kMeasure) {
    for (int r = 0; r < kRows; ++r) {
      for (int k = 1; k < kChains; ++k) norms[r][0] += norms[r][k];
      sq_norms[r] += sum_of_lanes(norms[r][0]) + rest_sq_norm(next[r], j, n);
    }
  }
  for (; j < n; ++j) {
    typename SumOf<T>::type a = 0;
    for (int r = 0; r < kRows; ++r) a += factors[r] * to_float(rows[r][j]);
    sum[j] = overwrite ? a : sum[j] + a;
  }
}

// The same for `count` rows: 1 to 8, or 1, 2 or 4 if there are as many next ones to measure. With
// eight, a sum is loaded and stored once for eight rows and the prefetchers still follow all nine
// streams; with four and four, everything that is kept stays in registers.
template <class T>
void add_rows(void* sum, const void* const* rows, const void* factors, int count, int64_t n,
              bool overwrite, const void* const* next, int64_t ahead, double* sq_norms) {
  using Sum = typename SumOf<T>::type;
  Sum* s = static_cast<Sum*>(sum);
  const T* const* r = reinterpret_cast<const T* const*>(rows);
  const T* const* m = reinterpret_cast<const T* const*>(next);
  const Sum* f = static_cast<const Sum*>(factors);
  if (next != nullptr) {
    switch (count) {
      case 1:
        return add_exactly<T, 1, true>(s, r, f, n, overwrite, m, ahead, sq_norms);
      case 2:
        return add_exactly<T, 2, true>(s, r, f, n, overwrite, m, ahead, sq_norms);
      case 4:
        return add_exactly<T, 4, true>(s, r, f, n, overwrite, m, ahead, sq_norms);
    }
    return;
  }
  switch (count) {
    case 1:
      return add_exactly<T, 1, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 2:
      return add_exactly<T, 2, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 3:
      return add_exactly<T, 3, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 4:
      return add_exactly<T, 4, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 5:
      return add_exactly<T, 5, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 6:
      return add_exactly<T, 6, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 7:
      return add_exactly<T, 7, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
    case 8:
      return add_exactly<T, 8, false>(s, r, f, n, overwrite, m, ahead, sq_norms);
  }
}
