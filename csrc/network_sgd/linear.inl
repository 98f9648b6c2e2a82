// Linear layers forward, and back with their step, for one instruction set: see kernels.inl.

// Outputs x records of a tile of dot products: 20 of 32 registers with AVX-512, 8 of 16 without.
constexpr int kDotOutputs = DPK_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kDotRecords = DPK_VECTOR_BYTES == 64 ? 5 : 4;

template <class T>
inline void dot_tile(int64_t k, const T* weight, int64_t ldw, int64_t outputs, const T* x,
                     int64_t ldx, int64_t records, T* out, int64_t ldo) {
  using V = typename NetVectors<T>::V;
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  const T *w[kDotOutputs], *a[kDotRecords];
  for (int i = 0; i < kDotOutputs; ++i) w[i] = weight + (i < outputs ? i : outputs - 1) * ldw;
  for (int r = 0; r < kDotRecords; ++r) a[r] = x + (r < records ? r : records - 1) * ldx;
  V sums[kDotRecords][kDotOutputs];
#pragma GCC unroll 5
  for (int r = 0; r < kDotRecords; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kDotOutputs; ++i) sums[r][i] = V{};
  }
  int64_t p = 0;
  for (; p + kLanesOfV <= k; p += kLanesOfV) {
    V row[kDotOutputs];
#pragma GCC unroll 4
    for (int i = 0; i < kDotOutputs; ++i) {
      row[i] = load_as<V>(w[i] + p);
      __builtin_prefetch(w[i] + kDotOutputs * ldw + p);
    }
#pragma GCC unroll 5
    for (int r = 0; r < kDotRecords; ++r) {
      const V own = load_as<V>(a[r] + p);
#pragma GCC unroll 4
      for (int i = 0; i < kDotOutputs; ++i) sums[r][i] += own * row[i];
    }
  }
#pragma GCC unroll 5
  for (int r = 0; r < kDotRecords; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kDotOutputs; ++i) {
      if (r >= records || i >= outputs) continue;
      T total = T(0);
      T lanes[kLanesOfV];
      store(lanes, sums[r][i]);
      for (int lane = 0; lane < kLanesOfV; ++lane) total += lanes[lane];
      for (int64_t q = p; q < k; ++q) total += a[r][q] * w[i][q];
      out[r * ldo + i] += total;
    }
  }
}

// out [records, outputs] = x [records, inputs] weight^T; weight [outputs, inputs].
//
// Dot products, because a small batch uses each weight a few times only, and gemm would pack all of
// them first. Not measured against gemm.
template <class T>
void linear_forward(int64_t records, int64_t inputs, int64_t outputs, const T* x, const T* weight,
                    T* out) {
  for (int64_t j = 0; j < records * outputs; ++j) out[j] = T(0);
  for (int64_t p = 0; p < inputs; p += kDotDepth) {
    const int64_t k = inputs - p < kDotDepth ? inputs - p : kDotDepth;
    for (int64_t o = 0; o < outputs; o += kDotOutputs) {
      for (int64_t r = 0; r < records; r += kDotRecords) {
        dot_tile(k, weight + o * inputs + p, inputs, outputs - o, x + r * inputs + p, inputs,
                 records - r, out + r * outputs + o, outputs);
      }
    }
  }
}

// A step of weights: last = momentum last + d^T x, then weight += last; last null: weight += d^T x.
template <class T>
struct Steps {
  T* weight;
  T* last;
  T momentum;

  Steps at(int64_t j) const { return {weight + j, last == nullptr ? nullptr : last + j, momentum}; }
};

// For Rows rows of weight: dx += d weight if dx, then their step.
template <int Rows, int Vectors, class T>
DPK_INLINE void rows_back(int64_t records, const T* d, int64_t ldd, const T* x, int64_t ld, T* dx,
                          const Steps<T>& steps) {
  using V = typename NetVectors<T>::V;
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  V old[Rows][Vectors], sums[Rows][Vectors];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      old[i][v] = load_as<V>(steps.weight + i * ld + v * kLanesOfV);
      // Rows are far apart, and no prefetcher goes from one group of them to the next.
      __builtin_prefetch(steps.weight + (Rows + i) * ld + v * kLanesOfV, 1);
      if (steps.last != nullptr) {
        __builtin_prefetch(steps.last + i * ld + v * kLanesOfV, 1);
      }
      sums[i][v] = V{};
    }
  }
  for (int64_t r = 0; r < records; ++r) {
    V own[Vectors], back[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      own[v] = load_as<V>(x + r * ld + v * kLanesOfV);
      if (dx != nullptr) back[v] = load_as<V>(dx + r * ld + v * kLanesOfV);
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const T s = d[r * ldd + i];
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        sums[i][v] += s * own[v];
        if (dx != nullptr) back[v] += s * old[i][v];
      }
    }
    if (dx != nullptr) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) store(dx + r * ld + v * kLanesOfV, back[v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      const int64_t at = i * ld + v * kLanesOfV;
      if (steps.last != nullptr) {
        sums[i][v] += steps.momentum * load_as<V>(steps.last + at);
        store(steps.last + at, sums[i][v]);
      }
      store(steps.weight + at, old[i][v] + sums[i][v]);
    }
  }
}

template <int Rows, class T>
inline void columns_back(int64_t records, int64_t cols, const T* d, int64_t ldd, const T* x,
                         int64_t ld, T* dx, const Steps<T>& steps) {
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  constexpr int kVectors = DPK_VECTOR_BYTES == 64 ? 2 : 1;
  int64_t j = 0;
  const auto at = [&j](T* p) { return p == nullptr ? nullptr : p + j; };
  for (; j + kVectors * kLanesOfV <= cols; j += kVectors * kLanesOfV) {
    rows_back<Rows, kVectors>(records, d, ldd, x + j, ld, at(dx), steps.at(j));
  }
  for (; j + kLanesOfV <= cols; j += kLanesOfV) {
    rows_back<Rows, 1>(records, d, ldd, x + j, ld, at(dx), steps.at(j));
  }
  for (; j < cols; ++j) {
    for (int i = 0; i < Rows; ++i) {
      const T old = steps.weight[i * ld + j];
      T sum = T(0);
      for (int64_t r = 0; r < records; ++r) {
        sum += d[r * ldd + i] * x[r * ld + j];
        if (dx != nullptr) dx[r * ld + j] += d[r * ldd + i] * old;
      }
      if (steps.last != nullptr) {
        sum += steps.momentum * steps.last[i * ld + j];
        steps.last[i * ld + j] = sum;
      }
      steps.weight[i * ld + j] = old + sum;
    }
  }
}

// dx = d weight (unless null), then the step of weight by d^T x (last, momentum: of Steps), in one
// pass over the weights: they are larger than the cache, and all else is not. block: of columns, so
// that its part of x and dx stays in the first-level cache.
template <class T>
void linear_back(int64_t records, int64_t inputs, int64_t outputs, const T* d, const T* x, T* dx,
                 T* weight, T* last, T momentum, int64_t block) {
  const Steps<T> steps{weight, last, momentum};
  for (int64_t j = 0; j < inputs; j += block) {
    const int64_t cols = inputs - j < block ? inputs - j : block;
    T* const to = dx == nullptr ? nullptr : dx + j;
    if (to != nullptr) {
      for (int64_t r = 0; r < records; ++r) {
        for (int64_t c = 0; c < cols; ++c) to[r * inputs + c] = T(0);
      }
    }
    int64_t o = 0;
    for (; o + 4 <= outputs; o += 4) {
      columns_back<4>(records, cols, d + o, outputs, x + j, inputs, to, steps.at(o * inputs + j));
    }
    for (; o < outputs; ++o) {
      columns_back<1>(records, cols, d + o, outputs, x + j, inputs, to, steps.at(o * inputs + j));
    }
  }
}
