// Vectors of DPK_VECTOR_BYTES for the kernels. Included by for_each_isa.h, inside the namespace of
// each instruction set, so there is no include guard and nothing is included from here.
//
// GCC's and Clang's vector extensions give arithmetic, comparisons and conversions for any width
// on any CPU; intrinsics appear only where the compilers do not find the instruction themselves.

constexpr int kLanes = DPK_VECTOR_BYTES / 4;

typedef float vf __attribute__((vector_size(DPK_VECTOR_BYTES)));
typedef double vd __attribute__((vector_size(DPK_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(DPK_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(DPK_VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(DPK_VECTOR_BYTES / 2)));
typedef float vf_half __attribute__((vector_size(DPK_VECTOR_BYTES / 2)));
typedef uint32_t vu_half __attribute__((vector_size(DPK_VECTOR_BYTES / 2)));
typedef uint16_t vh_half __attribute__((vector_size(DPK_VECTOR_BYTES / 4)));

#define DPK_INLINE inline __attribute__((always_inline))

template <class V, class T>
DPK_INLINE V load_as(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V, class T>
DPK_INLINE void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// In pairs, which errs less than one after the other.
DPK_INLINE double sum_of_lanes(vd v) {
  for (int half = kLanes / 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  }
  return v[0];
}

// float16 bits to float without F16C: the exponent is rebiased by a multiplication, which brings
// subnormals out right; infinities and NaNs get the exponent that they need.
template <class VF, class VU>
DPK_INLINE VF float16_bits_to_float(VU bits) {
  const VU magnitude = (bits & 0x7fffu) << 13;
  const VF scaled = (VF)magnitude * 0x1p112f;
  const VU special = (VU)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (VF)((VU)scaled | special | ((bits & 0x8000u) << 16));
}

// kLanes elements, as float.
DPK_INLINE vf load_float(const float* p) { return load_as<vf>(p); }
DPK_INLINE vf load_float(const BFloat16* p) {
  return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
}
DPK_INLINE vf load_float(const Float16* p) {
#if DPK_VECTOR_BYTES == 64
  return (vf)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif DPK_VECTOR_BYTES == 32
  return (vf)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
  return float16_bits_to_float<vf>(__builtin_convertvector(load_as<vh>(p), vu));
#endif
}

// kLanes / 2 elements, as double. (GCC 12 converts generic float vectors to double in pieces.)
DPK_INLINE vd widen(vf_half x) {
#if DPK_VECTOR_BYTES == 64
  return (vd)_mm512_cvtps_pd((__m256)x);
#elif DPK_VECTOR_BYTES == 32
  return (vd)_mm256_cvtps_pd((__m128)x);
#else
  return __builtin_convertvector(x, vd);
#endif
}
DPK_INLINE vd load_double(const double* p) { return load_as<vd>(p); }
DPK_INLINE vd load_double(const float* p) { return widen(load_as<vf_half>(p)); }
DPK_INLINE vd load_double(const BFloat16* p) {
  return widen((vf_half)(__builtin_convertvector(load_as<vh_half>(p), vu_half) << 16));
}
DPK_INLINE vd load_double(const Float16* p) {
#if DPK_VECTOR_BYTES == 64
  return widen((vf_half)_mm256_cvtph_ps(load_as<__m128i>(p)));
#elif DPK_VECTOR_BYTES == 32
  return widen((vf_half)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
#else
  const vu_half bits = __builtin_convertvector(load_as<vh_half>(p), vu_half);
  return widen(float16_bits_to_float<vf_half>(bits));
#endif
}

// One element.
DPK_INLINE float to_float(float x) { return x; }
DPK_INLINE double to_float(double x) { return x; }
DPK_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
DPK_INLINE float to_float(Float16 x) {
  typedef uint32_t one_u __attribute__((vector_size(4)));
  typedef float one_f __attribute__((vector_size(4)));
  return float16_bits_to_float<one_f>(one_u{x.bits})[0];
}

// kLanes of what philox.inl and gaussian.inl work on.
struct VectorLanes {
  using F = vf;
  using I = vi;
  using U = vu;

  // The 64-bit products of each lane with a constant, as their high and low halves.
  static DPK_INLINE void multiply_wide(U a, uint32_t b, U& high, U& low) {
#if DPK_VECTOR_BYTES == 64
    const __m512i factor = _mm512_set1_epi64(b);
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    high = (U)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = (U)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif DPK_VECTOR_BYTES == 32
    const __m256i factor = _mm256_set1_epi64x(b);
    const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    high = (U)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = (U)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t product = uint64_t(a[i]) * b;
      high[i] = uint32_t(product >> 32);
      low[i] = uint32_t(product);
    }
#endif
  }

  static DPK_INLINE U broadcast(uint32_t x) { return U{} + x; }

  static DPK_INLINE I as_signed(U x) { return (I)x; }
  static DPK_INLINE F from_signed(I x) { return __builtin_convertvector(x, F); }
  static DPK_INLINE F float_of_bits(I x) { return (F)x; }
  static DPK_INLINE I bits_of_float(F x) { return (I)x; }
  static DPK_INLINE F select(I condition, F yes, F no) { return condition ? yes : no; }
  static DPK_INLINE F square_root(F x) {
#if DPK_VECTOR_BYTES == 64
    return (F)_mm512_sqrt_ps((__m512)x);
#elif DPK_VECTOR_BYTES == 32
    return (F)_mm256_sqrt_ps((__m256)x);
#else
    F y;
    for (int i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
  }
};
