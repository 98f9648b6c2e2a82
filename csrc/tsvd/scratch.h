// Memory of one task, handed out piece by piece.
#pragma once

#include <cstdint>

namespace dpk {

// Without a buffer it only counts: whatever takes its memory in its constructor is made once
// without, to learn how much it takes.
class Scratch {
 public:
  explicit Scratch(char* buffer = nullptr) : buffer_(buffer) {}

  // Room for `count` of T, at the start of a cache line (if the buffer is); not initialised.
  template <class T>
  T* take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return buffer_ == nullptr ? nullptr : reinterpret_cast<T*>(buffer_ + at);
  }

  int64_t used() const { return used_; }

 private:
  char* buffer_;
  int64_t used_ = 0;
};

}  // namespace dpk
