#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/element.h"
#include "common/gaussian.h"
#include "noise/noise.h"

namespace dpk {
namespace {

// Replaces those normals of a tile, z[k * blocks + b], whose words, in the same places, are
// continued. One tile in 8,192 has any, so that this is compiled once, for no instruction set.
__attribute__((noinline, cold)) void continue_normals(uint64_t first_block, const uint32_t* words,
                                                      uint64_t key, uint64_t counter, float* z) {
  constexpr int64_t blocks = kNoiseTile / 4;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int pair = 0; pair < 2; ++pair) {
      const int64_t at = 2 * pair * blocks + b;
      const uint32_t w0 = words[at], w1 = words[at + blocks];
      if (!is_continued(w0, w1)) continue;
      continued_normals(first_block + b, pair, w0, w1, key, counter, z[at], z[at + blocks]);
    }
  }
}

}  // namespace
}  // namespace dpk

#define DPK_KERNELS "noise/kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Where a second thread pays. Measured: 16,384 values take 25.3 us on one thread and 15.6 on two.
constexpr int64_t kTilesPerTask = 8192 / kNoiseTile;

}  // namespace

template <class T>
void add_gaussian_noise(const NoiseTarget<T>* targets, int64_t count, double std, double scale,
                        const Executor& executor) {
  auto* const kernel = DPK_FOR_ISA(active_isa(), add_noise_to_tiles<T>);
  // The tiles of all targets in one row, so that many small buffers share the threads well.
  std::vector<int64_t> first_tile(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    first_tile[i + 1] = first_tile[i] + (targets[i].n + kNoiseTile - 1) / kNoiseTile;
  }
  const int64_t tiles = first_tile[count];
  const int64_t useful = (tiles + kTilesPerTask - 1) / kTilesPerTask;
  const int tasks = static_cast<int>(std::clamp<int64_t>(useful, 1, executor.threads));
  for_each_task(executor, tasks, [&](int task) {
    const int64_t begin = tiles * task / tasks, end = tiles * (task + 1) / tasks;
    int64_t i =
        std::upper_bound(first_tile.begin(), first_tile.end(), begin) - first_tile.begin() - 1;
    for (; i < count && first_tile[i] < end; ++i) {
      const NoiseTarget<T>& target = targets[i];
      kernel(target.x, target.n, std::max(begin, first_tile[i]) - first_tile[i],
             std::min(end, first_tile[i + 1]) - first_tile[i], std, scale, target.key,
             target.counter);
    }
  });
}

template void add_gaussian_noise<float>(const NoiseTarget<float>*, int64_t, double, double,
                                        const Executor&);
template void add_gaussian_noise<double>(const NoiseTarget<double>*, int64_t, double, double,
                                         const Executor&);

}  // namespace dpk
