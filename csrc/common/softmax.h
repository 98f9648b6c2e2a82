// What the cross-entropy of logits gives back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dpk {

// logits = scale (softmax(logits) - one-hot), [classes].
template <class T>
void softmax_residuals(int64_t classes, int64_t label, T scale, T* logits) {
  T top = logits[0];
  for (int64_t c = 1; c < classes; ++c) top = std::max(top, logits[c]);
  T total = T(0);
  for (int64_t c = 0; c < classes; ++c) total += logits[c] = std::exp(logits[c] - top);
  const T factor = scale / total;
  for (int64_t c = 0; c < classes; ++c) logits[c] *= factor;
  logits[label] -= scale;
}

}  // namespace dpk
