// A kernel on the host and device headers, as later ones will be.
#include "common/gaussian.h"

__global__ void draw_normals(float* out, uint32_t blocks, uint64_t key, uint64_t counter) {
  const uint32_t block = blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  dpk::normals_of_block(block, key, counter, out + 4 * size_t(block));
}
