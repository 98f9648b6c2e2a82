// The normals of the noise stream, one block at a time, for host and device. The stream is defined
// in dpkernels/ops/noise/reference.py.
#pragma once

#include "common/philox.h"

namespace dpk {

#include "common/gaussian.inl"

// Words this near to a place where 32 bits are too few go on in another block.
constexpr uint32_t kNearWords = 1u << 12;
// Where such blocks begin, in the upper word of a block's index: of words (0, 1) and of (2, 3).
constexpr uint32_t kTailOfFirstPair = 0x80000000u;
constexpr uint32_t kTailOfSecondPair = 0xc0000000u;

// Whether a pair of words goes on in another block.
DPK_HOST_DEVICE bool is_continued(uint32_t w0, uint32_t w1) {
  return w0 + kNearWords < 2 * kNearWords || (w1 << 2) + kNearWords < 2 * kNearWords;
}

// Two normals from words of which one at least goes on in the words v. Distances from the places
// are so small that one or two terms of the series of log, sin and cos are right to 1e-11.
DPK_HOST_DEVICE void continued_box_muller(uint32_t w0, uint32_t w1, const uint32_t* v, float& z0,
                                          float& z1) {
  const bool near_one = w0 >> 31 != 0;
  const uint32_t whole = near_one ? ~w0 : w0;
  float square;
  if (whole < kNearWords) {
    const double d = whole * 0x1p-32 + v[0] * 0x1p-64 + (v[1] + 0.5) * 0x1p-96;
    const float distance = float(d);
    square = near_one ? distance * (2.0f + distance) : minus_two_log<ScalarLanes>(distance);
  } else {
    square = minus_two_log<ScalarLanes>(uniform_of_word<ScalarLanes>(w0));
  }
  const float radius = sqrtf(square);
  float cosine, sine;
  if ((w1 << 2) + kNearWords < 2 * kNearWords) {
    const int32_t offset = int32_t(w1 << 2) >> 2;
    const float small = float(offset + (v[2] + 0.5) * 0x1p-32) * (3.141592654f * 0x1p-31f);
    const uint32_t quarter = (w1 + (1u << 29)) >> 30;
    const float sign = quarter & 2 ? -1.0f : 1.0f;
    cosine = sign * (quarter & 1 ? -small : 1.0f);
    sine = sign * (quarter & 1 ? 1.0f : small);
  } else {
    cos_sin_pi<ScalarLanes>(turn_of_word<ScalarLanes>(w1), cosine, sine);
  }
  z0 = radius * cosine;
  z1 = radius * sine;
}

// Normals 2 pair and 2 pair + 1 of a block whose words w[2 pair], w[2 pair + 1] are continued.
DPK_HOST_DEVICE void continued_normals(uint64_t block, int pair, uint32_t w0, uint32_t w1,
                                       uint64_t key, uint64_t counter, float& z0, float& z1) {
  const uint32_t tail = pair == 0 ? kTailOfFirstPair : kTailOfSecondPair;
  const PhiloxBlock more =
      philox4x32_10(uint32_t(block), uint32_t(block >> 32) | tail, uint32_t(counter),
                    uint32_t(counter >> 32), uint32_t(key), uint32_t(key >> 32));
  continued_box_muller(w0, w1, more.w, z0, z1);
}

// The four normals of a block.
DPK_HOST_DEVICE void normals_of_block(uint64_t block, uint64_t key, uint64_t counter, float* z) {
  const PhiloxBlock words =
      philox4x32_10(uint32_t(block), uint32_t(block >> 32), uint32_t(counter),
                    uint32_t(counter >> 32), uint32_t(key), uint32_t(key >> 32));
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t w0 = words.w[2 * pair], w1 = words.w[2 * pair + 1];
    if (is_continued(w0, w1)) {
      continued_normals(block, pair, w0, w1, key, counter, z[2 * pair], z[2 * pair + 1]);
    } else {
      box_muller_lanes<ScalarLanes>(w0, w1, z[2 * pair], z[2 * pair + 1]);
    }
  }
}

}  // namespace dpk
