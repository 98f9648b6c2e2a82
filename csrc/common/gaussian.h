// Two normals from two words of Philox, for host and device.
#pragma once

#include "common/philox.h"

namespace dpk {

#include "common/gaussian.inl"

DPK_HOST_DEVICE void box_muller(uint32_t w0, uint32_t w1, float& z0, float& z1) {
  box_muller_lanes<ScalarLanes>(w0, w1, z0, z1);
}

}  // namespace dpk
