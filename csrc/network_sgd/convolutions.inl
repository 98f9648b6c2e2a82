// Convolutions forward and back, for one instruction set: see kernels.inl.

// Positions of a tile of one vector: 8 sums, 4 cycles each on two units, keep both at work. LeNet's
// 6 and 16 outputs took two vectors each before; with this, pools and gradients in registers, and
// lists by output, an epoch of it takes 0.37 of the time, and of a CNN with 32 and 64 outputs 0.9
// (one core of a busy machine, medians of 9, beside an unchanged loop).
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
  const T* a[kNarrowRows];
#pragma GCC unroll 8
  for (int r = 0; r < kNarrowRows; ++r) a[r] = frame + at[r < rows ? r : rows - 1];
  for (int64_t run = 0; run < patch.runs; ++run) {
    for (int64_t p = 0; p < patch.length; ++p, panel += kColumns) {
      const W b = load_as<W>(panel);
#pragma GCC unroll 8
      for (int r = 0; r < kNarrowRows; ++r) tile[r] += a[r][p] * b;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kNarrowRows; ++r) a[r] += patch.apart;
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
  using Of = NetVectors<T>;
  if (outputs <= Of::kLanesOfV) {
    auto* const run = outputs <= Of::kHalfLanes ? narrow_forward<typename Of::Half, T>
                                                : narrow_forward<typename Of::V, T>;
    run(patch, frame, at, positions, packed, outputs, out);
    return;
  }
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
template <int Pieces, class V, class T>
void patches_back(const ByOutput<T>& back, const T* frame, const int32_t* pieces, T* gradient) {
  constexpr int64_t kLanesOfV = sizeof(V) / sizeof(T);
  for (int64_t o = 0; o < back.outputs; ++o, gradient += Pieces * kLanesOfV) {
    V sums[Pieces];
#pragma GCC unroll 6
    for (int j = 0; j < Pieces; ++j) sums[j] = load_as<V>(gradient + j * kLanesOfV);
    for (int64_t e = o * back.most; e < back.end[o]; ++e) {
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
template <int Pieces, class V, class T>
void weights_back(const CameBack<T>& back, const T* weights, const int32_t* pieces, T* frame) {
  constexpr int64_t kLanesOfV = sizeof(V) / sizeof(T);
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

// Chooses by the vectors that the patch is taken in, and how many a chunk has; frame is read,
// `sums` written.
template <class T>
void add_patches_back(int64_t lanes, int64_t pieces, const ByOutput<T>& back, const T* frame,
                      const int32_t* at, T* sums) {
  using V = typename NetVectors<T>::V;
  using W = typename NetVectors<T>::Half;
  constexpr decltype(&patches_back<1, V, T>) kBy[2][kMostPieces] = {
      {patches_back<1, V, T>, patches_back<2, V, T>, patches_back<3, V, T>, patches_back<4, V, T>,
       patches_back<5, V, T>, patches_back<6, V, T>},
      {patches_back<1, W, T>, patches_back<2, W, T>, patches_back<3, W, T>, patches_back<4, W, T>,
       patches_back<5, W, T>, patches_back<6, W, T>}};
  kBy[lanes < NetVectors<T>::kLanesOfV][pieces - 1](back, frame, at, sums);
}

template <class T>
void add_weights_back(int64_t lanes, int64_t pieces, const CameBack<T>& back, const T* weights,
                      const int32_t* at, T* frame) {
  using V = typename NetVectors<T>::V;
  using W = typename NetVectors<T>::Half;
  constexpr decltype(&weights_back<1, V, T>) kBy[2][kMostPieces] = {
      {weights_back<1, V, T>, weights_back<2, V, T>, weights_back<3, V, T>, weights_back<4, V, T>,
       weights_back<5, V, T>, weights_back<6, V, T>},
      {weights_back<1, W, T>, weights_back<2, W, T>, weights_back<3, W, T>, weights_back<4, W, T>,
       weights_back<5, W, T>, weights_back<6, W, T>}};
  kBy[lanes < NetVectors<T>::kLanesOfV][pieces - 1](back, weights, at, frame);
}
