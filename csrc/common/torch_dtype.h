// Element types of tensors. For binding code.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/element.h"

namespace dpk {

inline Dtype dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::f32;
    case at::kBFloat16:
      return Dtype::bf16;
    case at::kHalf:
      return Dtype::f16;
    case at::kDouble:
      return Dtype::f64;
    default:
      TORCH_CHECK_VALUE(false, name, " must be float32, bfloat16, float16 or float64, got ",
                        tensor.scalar_type());
  }
}

inline at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kDouble ? type : at::kFloat;
}

}  // namespace dpk
