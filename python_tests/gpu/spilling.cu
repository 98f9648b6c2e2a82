// Spills: 128 values a thread are alive across a barrier, and the bounds leave 32 registers.
__global__ void __launch_bounds__(1024, 2) hold_too_much(const float* in, float* out) {
  float values[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[127 - i];
}
