// Passes through one layer, for one instruction set: see common/for_each_isa.h.
#include "common/gemm.inl"

template <class T>
struct NetVectors {
  using V = typename GemmSizes<T>::V;
  static constexpr int kLanesOfV = GemmSizes<T>::kLanesOfV;
};

template <class T>
int64_t lanes_of() {
  return NetVectors<T>::kLanesOfV;
}

// Columns of a panel of weights: no more than a vector, or half a long one, for so few outputs.
template <class T>
int64_t panel_columns(int64_t outputs) {
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  if (DPK_VECTOR_BYTES == 64 && 2 * outputs <= kLanesOfV) return kLanesOfV / 2;
  return outputs <= kLanesOfV ? kLanesOfV : 2 * kLanesOfV;
}

// Positions of a tile of one vector: with their 8 sums, no multiplication waits for the last one.
constexpr int kNarrowRows = 8;

// out [rows, outputs] of a tile of positions, whose outputs fit one vector W. Rows are written as
// whole vectors, first to last: what is past a row belongs to the next one, or to slack.
template <class W, class T>
inline void narrow_tile(const PatchRuns& patch, const T* frame, const int32_t* at, int64_t rows,
                        const T* panel, T* out, int64_t ldo) {
  constexpr int64_t kColumns = sizeof(W) / sizeof(T);
  W tile[kNarrowRows];
#pragma GCC unroll 8
  for (int r = 0; r < kNarrowRows; ++r) tile[r] = W{};
  for (int64_t run = 0; run < patch.runs; ++run) {
    const T* a[kNarrowRows];
#pragma GCC unroll 8
    for (int r = 0; r < kNarrowRows; ++r) {
      a[r] = frame + at[r < rows ? r : rows - 1] + run * patch.apart;
    }
    for (int64_t p = 0; p < patch.length; ++p, panel += kColumns) {
      const W b = load_as<W>(panel);
#pragma GCC unroll 8
      for (int r = 0; r < kNarrowRows; ++r) tile[r] += a[r][p] * b;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kNarrowRows; ++r) {
    if (r < rows) store(out + r * ldo, tile[r]);
  }
}

template <class W, class T>
inline void narrow_forward(const PatchRuns& patch, const T* frame, const int32_t* at,
                           int64_t positions, const T* panel, int64_t outputs, T* out) {
  for (int64_t i = 0; i < positions; i += kNarrowRows) {
    narrow_tile<W>(patch, frame, at + i, positions - i, panel, out + i * outputs, outputs);
  }
}

// out [rows, cols] of a tile of positions x outputs: at[r] is where position r's patch begins.
template <int Rows, class T>
inline void conv_tile(const PatchRuns& patch, const T* frame, const int32_t* at, int64_t rows,
                      const T* panel, T* out, int64_t ldo, int64_t cols) {
  using V = typename NetVectors<T>::V;
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  V tile[kTileRows][2];
#pragma GCC unroll 14
  for (int r = 0; r < Rows; ++r) tile[r][0] = tile[r][1] = V{};
  for (int64_t run = 0; run < patch.runs; ++run) {
    const T* a[Rows];
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) a[r] = frame + at[r < rows ? r : rows - 1] + run * patch.apart;
#pragma GCC unroll 4
    for (int64_t p = 0; p < patch.length; ++p) {
      const V b0 = load_as<V>(panel), b1 = load_as<V>(panel + kLanesOfV);
#pragma GCC unroll 14
      for (int r = 0; r < Rows; ++r) {
        tile[r][0] += a[r][p] * b0;
        tile[r][1] += a[r][p] * b1;
      }
      panel += 2 * kLanesOfV;
    }
  }
  store_tile<Rows, T>(tile, out, ldo, rows, cols, false);
}

// out [positions, outputs] = patches of frame times packed weights, [panel][run][length][columns].
// Up to a vector past out is written.
template <class T>
void conv_forward(const PatchRuns& patch, const T* frame, const int32_t* at, int64_t positions,
                  const T* packed, int64_t outputs, T* out) {
  using V = typename NetVectors<T>::V;
  const int64_t columns = panel_columns<T>(outputs);
  if (columns == NetVectors<T>::kLanesOfV) {
    narrow_forward<V>(patch, frame, at, positions, packed, outputs, out);
    return;
  }
#if DPK_VECTOR_BYTES == 64
  if (columns < NetVectors<T>::kLanesOfV) {
    typedef T Half __attribute__((vector_size(32)));
    narrow_forward<Half>(patch, frame, at, positions, packed, outputs, out);
    return;
  }
#endif
  constexpr int kCols = GemmSizes<T>::kTileCols;
  for (int64_t j = 0; j < outputs; j += kCols) {
    const T* const panel = packed + j * patch.runs * patch.length;
    for (int64_t i = 0; i < positions; i += kTileRows) {
      const int64_t rows = positions - i;
      T* const to = out + i * outputs + j;
      auto* const run = rows <= 2   ? conv_tile<2, T>
                        : rows <= 4 ? conv_tile<4, T>
                                    : conv_tile<kTileRows, T>;
      run(patch, frame, at + i, rows, panel, to, outputs, outputs - j);
    }
  }
}

// gradient [outputs][pieces] += value x (a chunk of the patch) for every number that came back.
template <int Pieces, class T>
void patches_back(const ByOutput<T>& back, const T* frame, const int32_t* pieces, T* gradient) {
  using V = typename NetVectors<T>::V;
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  for (int64_t o = 0; o < back.outputs; ++o, gradient += Pieces * kLanesOfV) {
    V sums[Pieces];
#pragma GCC unroll 6
    for (int j = 0; j < Pieces; ++j) sums[j] = load_as<V>(gradient + j * kLanesOfV);
    for (int32_t e = back.begin[o]; e < back.begin[o + 1]; ++e) {
      const T* const patch = frame + back.at[e];
      const T value = back.value[e];
#pragma GCC unroll 6
      for (int j = 0; j < Pieces; ++j) sums[j] += value * load_as<V>(patch + pieces[j]);
    }
#pragma GCC unroll 6
    for (int j = 0; j < Pieces; ++j) store(gradient + j * kLanesOfV, sums[j]);
  }
}

// The patches of frame += sum over what came back of value x (a chunk of the output's weights).
template <int Pieces, class T>
void weights_back(const CameBack<T>& back, const T* weights, const int32_t* pieces, T* frame) {
  using V = typename NetVectors<T>::V;
  constexpr int kLanesOfV = NetVectors<T>::kLanesOfV;
  for (int64_t q = 0; q < back.lists; ++q) {
    if (back.begin[q] == back.begin[q + 1]) continue;
    V sums[Pieces];
#pragma GCC unroll 6
    for (int j = 0; j < Pieces; ++j) sums[j] = V{};
    for (int32_t e = back.begin[q]; e < back.begin[q + 1]; ++e) {
      const T* const from = weights + back.output[e] * (Pieces * kLanesOfV);
      const T value = back.value[e];
#pragma GCC unroll 6
      for (int j = 0; j < Pieces; ++j) sums[j] += value * load_as<V>(from + j * kLanesOfV);
    }
    T* const patch = frame + back.at[q];
    // One after the other: the zeros that fill up a piece lie on the next pixels.
#pragma GCC unroll 6
    for (int j = 0; j < Pieces; ++j) {
      store(patch + pieces[j], load_as<V>(patch + pieces[j]) + sums[j]);
    }
  }
}

// Chooses by the number of pieces in a chunk; frame is read, `sums` written.
template <class T>
void add_patches_back(int64_t pieces, const ByOutput<T>& back, const T* frame, const int32_t* at,
                      T* sums) {
  constexpr decltype(&patches_back<1, T>) kBy[] = {patches_back<1, T>, patches_back<2, T>,
                                                   patches_back<3, T>, patches_back<4, T>,
                                                   patches_back<5, T>, patches_back<6, T>};
  kBy[pieces - 1](back, frame, at, sums);
}

template <class T>
void add_weights_back(int64_t pieces, const CameBack<T>& back, const T* weights, const int32_t* at,
                      T* frame) {
  constexpr decltype(&weights_back<1, T>) kBy[] = {weights_back<1, T>, weights_back<2, T>,
                                                   weights_back<3, T>, weights_back<4, T>,
                                                   weights_back<5, T>, weights_back<6, T>};
  kBy[pieces - 1](back, weights, at, frame);
}

// Sorts what came back by output: at, value of output o are [begin[o], begin[o + 1]), in the order
// that they had. next: [outputs].
template <class T>
ByOutput<T> by_output(const CameBack<T>& back, int64_t outputs, int32_t* begin, int32_t* next,
                      int32_t* at, T* value) {
  const int32_t end = back.begin[back.lists];
  for (int64_t o = 0; o < outputs; ++o) next[o] = 0;
  for (int32_t e = 0; e < end; ++e) ++next[back.output[e]];
  int32_t sum = 0;
  for (int64_t o = 0; o < outputs; ++o) {
    begin[o] = sum;
    sum += next[o];
    next[o] = begin[o];
  }
  begin[outputs] = sum;
  for (int64_t q = 0; q < back.lists; ++q) {
    for (int32_t e = back.begin[q]; e < back.begin[q + 1]; ++e) {
      const int32_t to = next[back.output[e]]++;
      at[to] = back.at[q];
      value[to] = back.value[e];
    }
  }
  return {outputs, at, begin, value};
}

template <class T>
struct Places;
template <>
struct Places<float> {
  typedef int32_t I __attribute__((vector_size(DPK_VECTOR_BYTES)));
  typedef uint8_t Names __attribute__((vector_size(DPK_VECTOR_BYTES / 4)));
};
template <>
struct Places<double> {
  typedef int64_t I __attribute__((vector_size(DPK_VECTOR_BYTES)));
  typedef uint8_t Names __attribute__((vector_size(DPK_VECTOR_BYTES / 8)));
};

// best [pooled, channels] = the largest of z's numbers in each window, those at
// [begin[q], begin[q + 1]) of at; which: the first that has it, by its name. NaN wins, as in torch.
// Up to a vector past z is read, and past best and which written.
template <class T>
void max_pool(const T* z, const int32_t* begin, const int32_t* at, const uint8_t* names,
              int64_t pooled, int64_t channels, T* best, uint8_t* which) {
  using V = typename NetVectors<T>::V;
  using I = typename Places<T>::I;
  for (int64_t q = 0; q < pooled; ++q, best += channels, which += channels) {
    for (int64_t c = 0; c < channels; c += NetVectors<T>::kLanesOfV) {
      int32_t i = begin[q];
      V most = load_as<V>(z + at[i] + c);
      I name = I{} + names[i];
      for (++i; i < begin[q + 1]; ++i) {
        const V v = load_as<V>(z + at[i] + c);
        const I take = (v > most) | (v != v);
        most = take ? v : most;
        name = take ? I{} + names[i] : name;
      }
      store(best + c, most);
      store(which + c, __builtin_convertvector(name, typename Places<T>::Names));
    }
  }
}

// z [rows, width] += bias, then ReLU if asked.
template <class T>
void add_bias(const T* bias, bool relu, int64_t rows, int64_t width, T* z) {
  for (int64_t r = 0; r < rows; ++r, z += width) {
    if (bias != nullptr) {
      for (int64_t j = 0; j < width; ++j) z[j] += bias[j];
    }
    if (relu) {
      for (int64_t j = 0; j < width; ++j) z[j] = z[j] < T(0) ? T(0) : z[j];
    }
  }
}

// d = 0 where an output of ReLU is 0.
template <class T>
void relu_back(const T* outputs, int64_t count, T* d) {
  for (int64_t j = 0; j < count; ++j) d[j] = outputs[j] <= T(0) ? T(0) : d[j];
}

template <class T>
void tanh_back(const T* outputs, int64_t count, T* d) {
  for (int64_t j = 0; j < count; ++j) d[j] *= T(1) - outputs[j] * outputs[j];
}

// values *= scale where level < kept, and 0 elsewhere.
template <class T, class Level>
inline void drop(const Level* levels, int32_t kept, T scale, int64_t count, T* values) {
  for (int64_t j = 0; j < count; ++j)
    values[j] = int32_t(levels[j]) < kept ? values[j] * scale : T(0);
}

template <class T>
void drop_by_bytes(const void* levels, int32_t kept, T scale, int64_t count, T* values) {
  drop(static_cast<const uint8_t*>(levels), kept, scale, count, values);
}

template <class T>
void drop_by_words(const void* levels, int32_t kept, T scale, int64_t count, T* values) {
  drop(static_cast<const uint16_t*>(levels), kept, scale, count, values);
}

// sum [width] += the rows of d.
template <class T>
void add_rows(const T* d, int64_t rows, int64_t width, T* sum) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < width; ++j) sum[j] += d[r * width + j];
  }
}

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

// Appends the numbers of d [outputs] that are not zero, and whose place is `place` if which is not
// null, to output and value; returns how many. Writes up to a vector past them.
template <class T>
inline int32_t append(const T* d, const uint8_t* which, int place, int64_t outputs, int32_t* output,
                      T* value) {
  int32_t count = 0;
  for (int64_t o = 0; o < outputs; ++o) {
    output[count] = int32_t(o);
    value[count] = d[o];
    count += d[o] != T(0) && (which == nullptr || which[o] == place);
  }
  return count;
}

#if DPK_VECTOR_BYTES == 64
// Compressed in registers. Listing element by element, with what else is not in a kernel, took 23%
// of the samples of a profile; listing like this takes 3%.
inline int32_t append(const float* d, const uint8_t* which, int place, int64_t outputs,
                      int32_t* output, float* value) {
  int32_t count = 0;
  __m512i names = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t o = 0; o < outputs; o += 16) {
    const __mmask16 there = outputs - o < 16 ? __mmask16((1u << (outputs - o)) - 1) : 0xffff;
    const __m512 v = _mm512_maskz_loadu_ps(there, d + o);
    // Unordered is unequal: NaN goes on.
    __mmask16 taken = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    if (which != nullptr) {
      const __m128i places = _mm_maskz_loadu_epi8(there, which + o);
      taken &= _mm_cmpeq_epi8_mask(places, _mm_set1_epi8(char(place)));
    }
    _mm512_storeu_si512(output + count, _mm512_maskz_compress_epi32(taken, names));
    _mm512_storeu_ps(value + count, _mm512_maskz_compress_ps(taken, v));
    count += __builtin_popcount(taken);
    names = _mm512_add_epi32(names, _mm512_set1_epi32(16));
  }
  return count;
}
#endif

// Lists the numbers of d [pooled, outputs] that are not zero by the place that each belongs to:
// list q * window + place is [begin, begin + 1) of output and value.
template <class T>
void list_by_place(const T* d, const uint8_t* which, int64_t pooled, int64_t window,
                   int64_t outputs, int32_t* begin, int32_t* output, T* value) {
  int32_t end = 0;
  *begin = 0;
  for (int64_t q = 0; q < pooled; ++q) {
    for (int place = 0; place < window; ++place) {
      const uint8_t* const own = window == 1 ? nullptr : which + q * outputs;
      end += append(d + q * outputs, own, place, outputs, output + end, value + end);
      *++begin = end;
    }
  }
}

// to [b, a] = from [a, b].
template <class T>
void turn(const T* from, int64_t a, int64_t b, T* to) {
  // Never passed by value: four doubles are more than a register of the portable path.
  typedef T V4 __attribute__((vector_size(4 * sizeof(T))));
  int64_t i = 0;
  for (; i + 4 <= a; i += 4) {
    int64_t j = 0;
    for (; j + 4 <= b; j += 4) {
      V4 rows[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) __builtin_memcpy(&rows[r], from + (i + r) * b + j, sizeof(V4));
      transpose(rows[0], rows[1], rows[2], rows[3]);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) __builtin_memcpy(to + (j + r) * a + i, &rows[r], sizeof(V4));
    }
    for (; j < b; ++j) {
      for (int r = 0; r < 4; ++r) to[j * a + i + r] = from[(i + r) * b + j];
    }
  }
  for (; i < a; ++i) {
    for (int64_t j = 0; j < b; ++j) to[j * a + i] = from[i * b + j];
  }
}

// values *= part; zero for a part of zero, whatever they were.
template <class T>
void keep_part(T part, int64_t count, T* values) {
  if (part == T(0)) {
    for (int64_t j = 0; j < count; ++j) values[j] = T(0);
    return;
  }
  for (int64_t j = 0; j < count; ++j) values[j] *= part;
}

// to = a - b.
template <class T>
void subtract(const T* a, const T* b, int64_t count, T* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = a[j] - b[j];
}
