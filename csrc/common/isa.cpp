#include "common/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace dpk {
namespace {

constexpr Isa kAll[] = {Isa::avx512, Isa::avx2, Isa::portable};

Isa initial_isa() {
  if (const char* wanted = std::getenv("DPKERNELS_CPU_ISA"); wanted != nullptr && *wanted != 0) {
    for (Isa isa : kAll) {
      if (std::string(wanted) == isa_name(isa) && isa_available(isa)) return isa;
    }
    throw std::invalid_argument(std::string("DPKERNELS_CPU_ISA: this CPU has no '") + wanted +
                                "'; use portable, avx2 or avx512 as available");
  }
  for (Isa isa : kAll) {
    if (isa_available(isa)) return isa;
  }
  return Isa::portable;
}

std::atomic<Isa>& selected() {
  static std::atomic<Isa> isa{initial_isa()};
  return isa;
}

}  // namespace

Isa active_isa() { return selected().load(std::memory_order_relaxed); }

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if DPK_X86
    // These are the features that for_each_isa.h compiles for.
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return isa_available(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

void set_isa(Isa isa) {
  if (!isa_available(isa)) {
    throw std::invalid_argument(std::string("set_isa: this CPU or build has no ") + isa_name(isa));
  }
  selected().store(isa, std::memory_order_relaxed);
}

}  // namespace dpk
