// Patches of a convolution's input, some rows at a time.
//
// An image is brought into the order [depth, height, width, channel], with its zero padding, so
// that a row of the kernel is one run of memory; a patch has that order too. Both triangles of a
// second moment come out in it, and are put into the weight's order, channel first, at the very
// end.
#pragma once

#include <cstdint>
#include <cstring>

#include "kron/kron.h"

namespace dpk {

// place[i] is where element i of a patch is in the weight.
inline void patch_order(const Convolution& shape, int64_t* place) {
  const int64_t channels = shape.channels / shape.groups, taps = shape.taps();
  for (int64_t tap = 0; tap < taps; ++tap) {
    for (int64_t c = 0; c < channels; ++c) place[tap * channels + c] = c * taps + tap;
  }
}

template <class T>
class Patches {
 public:
  // `buffer` holds elements(shape, rows).
  Patches(const Convolution& shape, int64_t rows, T* buffer)
      : shape_(shape),
        channels_(shape.channels / shape.groups),
        capacity_(rows),
        rows_(buffer),
        image_(buffer + rows * shape.patch()) {
    for (int axis = 0; axis < 3; ++axis) padded_[axis] = shape.size[axis] + 2 * shape.padding[axis];
    // Only the inside is ever written again.
    std::memset(image_, 0, image_elements(shape) * sizeof(T));
  }

  static int64_t elements(const Convolution& shape, int64_t rows) {
    return rows * shape.patch() + image_elements(shape);
  }

  int64_t row_stride() const { return shape_.patch(); }

  // Collects the patches of one sample and group; calls use(rows, count) whenever all rows are
  // full.
  template <class Use>
  void add_sample(const T* x, int64_t sample, int64_t group, Use&& use) {
    load_image(x + (sample * shape_.channels + group * channels_) * pixels());
    for (int64_t z = 0; z < shape_.out[0]; ++z) {
      for (int64_t y = 0; y < shape_.out[1]; ++y) {
        for (int64_t w = 0; w < shape_.out[2]; ++w) {
          copy_patch(z * shape_.stride[0], y * shape_.stride[1], w * shape_.stride[2],
                     rows_ + filled_ * shape_.patch());
          if (++filled_ == capacity_) flush(use);
        }
      }
    }
  }

  // Hands over the rows that are left.
  template <class Use>
  void flush(Use&& use) {
    if (filled_ > 0) use(static_cast<const T*>(rows_), filled_);
    filled_ = 0;
  }

 private:
  static int64_t image_elements(const Convolution& shape) {
    int64_t elements = shape.channels / shape.groups;
    for (int axis = 0; axis < 3; ++axis) elements *= shape.size[axis] + 2 * shape.padding[axis];
    return elements;
  }

  int64_t pixels() const { return shape_.size[0] * shape_.size[1] * shape_.size[2]; }

  T* pixel(int64_t z, int64_t y, int64_t w) const {
    return image_ + ((z * padded_[1] + y) * padded_[2] + w) * channels_;
  }

  void load_image(const T* x) {
    const int64_t* const size = shape_.size;
    for (int64_t z = 0; z < size[0]; ++z) {
      for (int64_t y = 0; y < size[1]; ++y) {
        T* const to = pixel(z + shape_.padding[0], y + shape_.padding[1], shape_.padding[2]);
        for (int64_t c = 0; c < channels_; ++c) {
          const T* const from = x + c * pixels() + (z * size[1] + y) * size[2];
          for (int64_t w = 0; w < size[2]; ++w) to[w * channels_ + c] = from[w];
        }
      }
    }
  }

  void copy_patch(int64_t z, int64_t y, int64_t w, T* to) const {
    const int64_t* const kernel = shape_.kernel;
    const int64_t* const dilation = shape_.dilation;
    // Neighbouring taps of a row are neighbours in memory, unless there are holes between them.
    const int64_t runs = dilation[2] == 1 ? 1 : kernel[2];
    const int64_t run = kernel[2] / runs * channels_;
    for (int64_t i = 0; i < kernel[0]; ++i) {
      for (int64_t j = 0; j < kernel[1]; ++j) {
        for (int64_t k = 0; k < runs; ++k, to += run) {
          const T* const from =
              pixel(z + i * dilation[0], y + j * dilation[1], w + k * dilation[2]);
          std::memcpy(to, from, run * sizeof(T));
        }
      }
    }
  }

  const Convolution& shape_;
  int64_t channels_, capacity_, padded_[3];
  int64_t filled_ = 0;
  T* rows_;
  T* image_;
};

}  // namespace dpk
