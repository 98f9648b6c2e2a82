// The scale at which every method of this room works, for host and device.
#pragma once

#include <cmath>

#include "common/philox.h"

namespace dpk {

// The power of two that brings `largest` into [1/2, 1); 1 for 0. Subnormal float64 numbers are
// brought as near as a float64 power of two can.
DPK_HOST_DEVICE double power_of_two_scale(double largest) {
  if (largest == 0.0) return 1.0;
  int exponent = 0;
  std::frexp(largest, &exponent);
  return std::ldexp(1.0, exponent < -1022 ? 1022 : -exponent);
}

}  // namespace dpk
