// Counter-based Gaussian noise. The stream is defined in dpkernels/ops/noise/reference.py.
#pragma once

#include <cstdint>

#include "common/executor.h"

namespace dpk {

// Elements that one round of the kernel makes: 16 blocks of Philox, 4 normals each.
constexpr int64_t kNoiseTile = 64;

// A buffer of n elements and the stream of its noise.
template <class T>
struct NoiseTarget {
  T* x;
  int64_t n;
  uint64_t key;
  uint64_t counter;
};

// x <- scale * (x + std * z) for each target, z being its stream. T is float or double; z is
// computed in float.
template <class T>
void add_gaussian_noise(const NoiseTarget<T>* targets, int64_t count, double std, double scale,
                        const Executor& executor);

inline void add_gaussian_noise(float* x, int64_t n, double std, double scale, uint64_t key,
                               uint64_t counter, const Executor& executor = serial_executor()) {
  const NoiseTarget<float> target{x, n, key, counter};
  add_gaussian_noise(&target, 1, std, scale, executor);
}

}  // namespace dpk
