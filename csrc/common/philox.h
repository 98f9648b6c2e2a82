// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011): one block, for host and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define DPK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DPK_HOST_DEVICE inline __attribute__((always_inline))
#endif
// nvcc compiles a file for the device and for the host. On the host pass its front end warns of
// "GCC unroll", and the host compiler of "unroll".
#if defined(__CUDA_ARCH__) || defined(__HIPCC__)
#define DPK_UNROLL_10 _Pragma("unroll")
#elif defined(__CUDACC__)
#define DPK_UNROLL_10
#else
#define DPK_UNROLL_10 _Pragma("GCC unroll 10")
#endif

namespace dpk {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

// One lane: what philox.inl and gaussian.inl need of the types that they work on.
struct ScalarLanes {
  using F = float;
  using I = int32_t;
  using U = uint32_t;

  static DPK_HOST_DEVICE void multiply_wide(U a, U b, U& high, U& low) {
    const uint64_t product = uint64_t(a) * b;
    high = U(product >> 32);
    low = U(product);
  }
  static DPK_HOST_DEVICE U broadcast(uint32_t x) { return x; }
  static DPK_HOST_DEVICE I as_signed(U x) { return I(x); }
  static DPK_HOST_DEVICE F from_signed(I x) { return F(x); }
  static DPK_HOST_DEVICE F float_of_bits(I x) {
    F y;
    memcpy(&y, &x, sizeof(y));
    return y;
  }
  static DPK_HOST_DEVICE I bits_of_float(F x) {
    I y;
    memcpy(&y, &x, sizeof(y));
    return y;
  }
  static DPK_HOST_DEVICE F square_root(F x) { return sqrtf(x); }
  static DPK_HOST_DEVICE F select(bool condition, F yes, F no) { return condition ? yes : no; }
};

#include "common/philox.inl"

struct PhiloxBlock {
  uint32_t w[4];
};

DPK_HOST_DEVICE PhiloxBlock philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                          uint32_t k0, uint32_t k1) {
  philox_rounds<ScalarLanes>(c0, c1, c2, c3, PhiloxKeys<ScalarLanes>(uint64_t(k1) << 32 | k0));
  return {{c0, c1, c2, c3}};
}

}  // namespace dpk
