// The noise kernel of one instruction set: see common/for_each_isa.h.

#include "common/abreast.inl"
#include "common/gaussian.inl"
#include "common/philox.inl"

constexpr int64_t kTile = kNoiseTile;
constexpr int64_t kBlocks = kTile / 4;

constexpr int kVectors = kBlocks / kLanes;
using TileLanes = AbreastLanes<VectorLanes, kVectors>;

#if DPK_X86
#include "common/split_words.inl"
using WordLanes = AbreastLanes<SplitLanes, kVectors>;
DPK_INLINE SplitWords split(vu x) { return SplitWords::of(x); }
DPK_INLINE vu joined(SplitWords x) { return x.joined(); }
#else
using WordLanes = TileLanes;
DPK_INLINE vu split(vu x) { return x; }
DPK_INLINE vu joined(vu x) { return x; }
#endif

DPK_INLINE TileLanes::U joined(WordLanes::U x) {
  TileLanes::U y;
  for (int n = 0; n < kVectors; ++n) y.v[n] = joined(x.v[n]);
  return y;
}

// Whether words of some block are continued: near 0 or 2^32, or, for angles, a multiple of 2^30.
DPK_INLINE bool some_are_continued(TileLanes::U w0, TileLanes::U w1, TileLanes::U w2,
                                   TileLanes::U w3) {
#if DPK_VECTOR_BYTES > 16
  vu least = VectorLanes::broadcast(~0u);
#else
  vi found = {};  // without a minimum of unsigned words, a comparison with 0 is the cheapest
#endif
  for (int n = 0; n < kVectors; ++n) {
    const vu words[] = {w0.v[n], w1.v[n] << 2, w2.v[n], w3.v[n] << 2};
    for (int k = 0; k < 4; ++k) {
      const vu x = words[k] + kNearWords;
#if DPK_VECTOR_BYTES > 16
      least = x < least ? x : least;
#else
      found |= (x & ~(2 * kNearWords - 1)) == 0;
#endif
    }
  }
#if DPK_VECTOR_BYTES == 64
  return _mm512_cmplt_epu32_mask((__m512i)least, _mm512_set1_epi32(2 * kNearWords)) != 0;
#elif DPK_VECTOR_BYTES == 32
  return _mm256_movemask_ps((__m256)(least < 2 * kNearWords)) != 0;
#else
  uint64_t halves[2];
  store(halves, found);
  return (halves[0] | halves[1]) != 0;
#endif
}

// The 64 normals of one tile: block b of the tile writes normal k to z[k * kBlocks + b].
DPK_INLINE void normals_of_tile(int64_t tile, const PhiloxKeys<WordLanes>& keys, uint64_t key,
                                uint64_t counter, float* z) {
  const uint64_t first = uint64_t(tile) * kBlocks;
  TileLanes::U block;
  for (int i = 0; i < kBlocks; ++i) block.v[i / kLanes][i % kLanes] = i;
  block = block + uint32_t(first);  // a tile never straddles 2^32
  WordLanes::U c0;
  for (int n = 0; n < kVectors; ++n) c0.v[n] = split(block.v[n]);
  WordLanes::U c1 = WordLanes::broadcast(uint32_t(first >> 32));
  WordLanes::U c2 = WordLanes::broadcast(uint32_t(counter));
  WordLanes::U c3 = WordLanes::broadcast(uint32_t(counter >> 32));
  philox_rounds<WordLanes>(c0, c1, c2, c3, keys);
  const TileLanes::U w0 = joined(c0), w1 = joined(c1), w2 = joined(c2), w3 = joined(c3);
  TileLanes::F z0, z1, z2, z3;
  box_muller_lanes<TileLanes>(w0, w1, z0, z1);
  box_muller_lanes<TileLanes>(w2, w3, z2, z3);
  store(z + 0 * kBlocks, z0);
  store(z + 1 * kBlocks, z1);
  store(z + 2 * kBlocks, z2);
  store(z + 3 * kBlocks, z3);
  if (__builtin_expect(some_are_continued(w0, w1, w2, w3), 0)) {
    uint32_t words[kTile];
    store(words + 0 * kBlocks, w0);
    store(words + 1 * kBlocks, w1);
    store(words + 2 * kBlocks, w2);
    store(words + 3 * kBlocks, w3);
    continue_normals(first, words, key, counter, z);
  }
}

// x <- scale * (x + std * z) on elements [64 begin, min(64 end, n)) of a buffer of n.
template <class T>
void add_noise_to_tiles(T* x, int64_t n, int64_t begin, int64_t end, double std, double scale,
                        uint64_t key, uint64_t counter) {
  const PhiloxKeys<WordLanes> keys(key);
  const T sigma = T(std), factor = T(scale);
  for (int64_t tile = begin; tile < end; ++tile) {
    alignas(64) float z[kTile];
    normals_of_tile(tile, keys, key, counter, z);
    T* target = x + tile * kTile;
    if (n - tile * kTile >= kTile) {
      for (int i = 0; i < kTile; ++i) target[i] = (target[i] + sigma * T(z[i])) * factor;
    } else {
      for (int i = 0; i < n - tile * kTile; ++i) {
        target[i] = (target[i] + sigma * T(z[i])) * factor;
      }
    }
  }
}
