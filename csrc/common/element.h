// Element types of the buffers that kernels read.
#pragma once

#include <cstdint>

namespace dpk {

enum class Dtype { f32, bf16, f16, f64 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// The dtype of factors and sums for elements of T: float, or double for double.
template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};

}  // namespace dpk
