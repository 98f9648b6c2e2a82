// Whether what an operator writes is its own. For binding code.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

namespace dpk {

// Throws unless no tensor of `outputs` overlaps itself, another one, or one of `inputs`. Address
// ranges are compared: interleaved views of one buffer count as overlapping.
inline void check_disjoint(at::TensorList outputs, at::TensorList inputs) {
  struct Span {
    const char* begin;
    const char* end;
    bool written;
  };
  std::vector<Span> spans;
  const auto add = [&spans](const at::Tensor& tensor, bool written) {
    if (tensor.numel() == 0) return;
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const char* begin = static_cast<const char*>(tensor.const_data_ptr());
    spans.push_back({begin, begin + (last + 1) * tensor.element_size(), written});
  };
  for (const at::Tensor& output : outputs) {
    at::assert_no_internal_overlap(output);
    add(output, true);
  }
  for (const at::Tensor& input : inputs) add(input, false);
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const char* any_until = nullptr;
  const char* written_until = nullptr;
  for (const Span& span : spans) {
    TORCH_CHECK_VALUE(span.begin >= written_until && !(span.written && span.begin < any_until),
                      "an output shares memory with an input or another output; pass buffers of "
                      "their own");
    any_until = std::max(any_until, span.end);
    if (span.written) written_until = std::max(written_until, span.end);
  }
}

}  // namespace dpk
