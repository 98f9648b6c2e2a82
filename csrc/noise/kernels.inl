// The noise kernel of one instruction set: see common/for_each_isa.h.

#include "common/abreast.inl"
#include "common/gaussian.inl"
#include "common/philox.inl"

constexpr int64_t kTile = kNoiseTile;
constexpr int64_t kBlocks = kTile / 4;

constexpr int kVectors = kBlocks / kLanes;
using TileLanes = AbreastLanes<VectorLanes, kVectors>;

// The 64 normals of one tile: block b of the tile writes normal k to z[k * kBlocks + b].
DPK_INLINE void normals_of_tile(int64_t tile, const PhiloxKeys<TileLanes>& keys, uint64_t counter,
                                float* z) {
  const uint64_t first = uint64_t(tile) * kBlocks;
  TileLanes::U c0;
  for (int i = 0; i < kBlocks; ++i) c0.v[i / kLanes][i % kLanes] = i;
  c0 = c0 + uint32_t(first);  // a tile never straddles 2^32
  TileLanes::U c1 = TileLanes::broadcast(uint32_t(first >> 32));
  TileLanes::U c2 = TileLanes::broadcast(uint32_t(counter));
  TileLanes::U c3 = TileLanes::broadcast(uint32_t(counter >> 32));
  philox_rounds<TileLanes>(c0, c1, c2, c3, keys);
  TileLanes::F z0, z1, z2, z3;
  box_muller_lanes<TileLanes>(c0, c1, z0, z1);
  box_muller_lanes<TileLanes>(c2, c3, z2, z3);
  store(z + 0 * kBlocks, z0);
  store(z + 1 * kBlocks, z1);
  store(z + 2 * kBlocks, z2);
  store(z + 3 * kBlocks, z3);
}

// x <- scale * (x + std * z) on elements [64 begin, min(64 end, n)) of a buffer of n.
template <class T>
void add_noise_to_tiles(T* x, int64_t n, int64_t begin, int64_t end, double std, double scale,
                        uint64_t key, uint64_t counter) {
  const PhiloxKeys<TileLanes> keys(key);
  const T sigma = T(std), factor = T(scale);
  for (int64_t tile = begin; tile < end; ++tile) {
    alignas(64) float z[kTile];
    normals_of_tile(tile, keys, counter, z);
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
