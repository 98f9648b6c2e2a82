// Compiles the file DPK_KERNELS once for each instruction set, in the namespaces dpk::avx512,
// dpk::avx2 and dpk::portable of the including file. No include guard: one use for each cpu.cpp.
//
// The target pragmas come after every standard header, so no inline function of the standard
// library is compiled for an instruction set that the CPU may lack. (Flags for a whole file would
// do just that: the linker keeps one copy of each inline function, whichever it likes.) For the
// same reason the kernels live in anonymous namespaces and call nothing but each other.
#include "common/isa.h"

#if DPK_X86

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined operands inside its AVX-512 intrinsics for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
namespace dpk::avx512 {
namespace {
#define DPK_VECTOR_BYTES 64
#include "common/simd.h"
#include DPK_KERNELS
#undef DPK_VECTOR_BYTES
}  // namespace
}  // namespace dpk::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace dpk::avx2 {
namespace {
#define DPK_VECTOR_BYTES 32
#include "common/simd.h"
#include DPK_KERNELS
#undef DPK_VECTOR_BYTES
}  // namespace
}  // namespace dpk::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // DPK_X86

namespace dpk::portable {
namespace {
#define DPK_VECTOR_BYTES 16
#include "common/simd.h"
#include DPK_KERNELS
#undef DPK_VECTOR_BYTES
}  // namespace
}  // namespace dpk::portable

// DPK_FOR_ISA(isa, f) is the function f of the namespace of that instruction set.
#if DPK_X86
#define DPK_FOR_ISA(isa, name)                       \
  ((isa) == ::dpk::Isa::avx512 ? ::dpk::avx512::name \
   : (isa) == ::dpk::Isa::avx2 ? ::dpk::avx2::name   \
                               : ::dpk::portable::name)
#else
#define DPK_FOR_ISA(isa, name) (::dpk::portable::name)
#endif
