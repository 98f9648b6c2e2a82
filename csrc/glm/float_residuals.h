// Clipped residuals of float32 records: what their gradients are summed from.
#pragma once

#include <cstdint>
#include <memory>

namespace dpk {

// Records that are transposed and multiplied at a time: two vectors of floats. The transposed
// features of 64, theta and the logits are 12 KiB then, and stay in the first cache.
constexpr int64_t kResidualGroup = 32;

// Some records of one client, and where their residuals go.
struct ResidualJob {
  const float* x;  // rows of `features`, `row_stride` apart
  int64_t row_stride;
  int64_t count;
  int64_t features;
  int64_t classes;
  const float* theta;  // [classes, features]
  const int64_t* labels;
  double bound;
  float* residuals;  // [classes, ld]: w of w x^T, a record's clipped gradient
  int64_t ld;
  double* sq_norms;  // [count]: |gradient|^2 before the clip
};

// The memory that one thread needs.
class FloatResiduals {
 public:
  FloatResiduals(int64_t classes, int64_t features)
      : xt_(new float[features * kResidualGroup]), logits_(new float[classes * kResidualGroup]) {}

  // Returns whether all features are finite. A record that has others, or a norm that is not
  // finite, has zeros for its residuals.
  bool clip(const ResidualJob& job);

 private:
  std::unique_ptr<float[]> xt_, logits_;
};

}  // namespace dpk
