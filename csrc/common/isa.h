// Which instruction set the kernels run on: chosen once, at run time, inside one binary.
#pragma once

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define DPK_X86 1
#else
#define DPK_X86 0
#endif

namespace dpk {

enum class Isa { portable, avx2, avx512 };

// The best one that this CPU has, unless DPKERNELS_CPU_ISA names another or set_isa changed it.
Isa active_isa();

bool isa_available(Isa isa);

const char* isa_name(Isa isa);

// Throws std::invalid_argument when this CPU (or this build) does not have it.
void set_isa(Isa isa);

}  // namespace dpk
