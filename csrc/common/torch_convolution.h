// The numbers of a convolution as a caller gives them, so small that no size computed from them
// overflows. For binding code.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace dpk {

// With 2^40 elements in its largest part, 320 rows of patches of 8 bytes each for 256 threads are
// 2^60 bytes.
constexpr int64_t kLargestConvNumber = INT32_MAX;
constexpr int64_t kLargestConvPart = int64_t{1} << 40;

// Throws in the name of the operator unless kernel, stride, padding and dilation of every axis, and
// groups, are numbers that a convolution can have. Each list has one number for each axis;
// `channels` counts all groups.
inline void check_conv_numbers(const char* op, c10::IntArrayRef kernel, c10::IntArrayRef stride,
                               c10::IntArrayRef padding, c10::IntArrayRef dilation, int64_t groups,
                               int64_t channels) {
  const auto within = [](c10::IntArrayRef numbers, int64_t least) {
    return std::all_of(numbers.begin(), numbers.end(), [least](int64_t number) {
      return number >= least && number <= kLargestConvNumber;
    });
  };
  TORCH_CHECK_VALUE(within(kernel, 1) && within(stride, 1) && within(dilation, 1), op,
                    ": kernel_size, stride and dilation must be in [1, 2^31), got ", kernel, ", ",
                    stride, " and ", dilation);
  TORCH_CHECK_VALUE(within(padding, 0), op, ": padding must be in [0, 2^31), got ", padding);
  TORCH_CHECK_VALUE(
      groups >= 1 && groups <= std::max<int64_t>(channels, 1) && channels % groups == 0, op,
      ": groups must divide the ", channels, " channels, got ", groups);
}

// Multiplies the sizes of one part of a convolution; throws where the product passes 2^40. An empty
// axis counts as one element: other parts may be without it.
class ConvPart {
 public:
  explicit ConvPart(int64_t size) { *this *= size; }

  ConvPart& operator*=(int64_t size) {
    size = std::max<int64_t>(size, 1);
    TORCH_CHECK_VALUE(elements_ <= kLargestConvPart / size,
                      "kernel_size, stride, padding and dilation make a convolution with more than "
                      "2^40 elements in one of its parts; no memory holds that");
    elements_ *= size;
    return *this;
  }

 private:
  int64_t elements_ = 1;
};

}  // namespace dpk
