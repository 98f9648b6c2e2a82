// A kernel on the host and device headers, as later ones will be.
#include "common/gaussian.h"

__global__ void draw_normals(float* out, uint32_t blocks, uint32_t k0, uint32_t k1) {
  const uint32_t block = blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  const dpk::PhiloxBlock words = dpk::philox4x32_10(block, 0, 0, 0, k0, k1);
  float* to = out + 4 * size_t(block);
  dpk::box_muller(words.w[0], words.w[1], to[0], to[1]);
  dpk::box_muller(words.w[2], words.w[3], to[2], to[3]);
}
