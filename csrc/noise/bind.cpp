// dpkernels::add_gaussian_noise_ and add_row_noise_ on CPU tensors.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <bit>
#include <utility>
#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "noise/noise.h"

namespace {

template <class T>
void add_noise(const std::vector<dpk::NoiseTarget<T>>& targets, double std, double scale) {
  dpk::add_gaussian_noise(targets.data(), static_cast<int64_t>(targets.size()), std, scale,
                          dpk::torch_executor());
}

template <class T>
void add_noise(const std::vector<at::Tensor>& xs, double std, int64_t key, int64_t counter,
               double scale) {
  std::vector<dpk::NoiseTarget<T>> targets;
  uint64_t next = counter;
  for (const at::Tensor& x : xs) {
    targets.push_back({x.mutable_data_ptr<T>(), x.numel(), static_cast<uint64_t>(key), next++});
  }
  add_noise(targets, std, scale);
}

void add_gaussian_noise_(at::TensorList xs, double std, int64_t key, int64_t counter,
                         double scale) {
  // The stream runs in logical order; a tensor with other strides goes through a copy.
  std::vector<at::Tensor> contiguous;
  for (const at::Tensor& x : xs) {
    TORCH_CHECK_VALUE(x.scalar_type() == xs[0].scalar_type() && x.is_cpu(),
                      "add_gaussian_noise_: xs must share one dtype and be on the CPU");
    contiguous.push_back(x.contiguous());
  }
  if (contiguous.empty()) return;
  dpk::check_disjoint(xs, {});
  if (xs[0].scalar_type() == at::kDouble) {
    add_noise<double>(contiguous, std, key, counter, scale);
  } else {
    TORCH_CHECK_VALUE(xs[0].scalar_type() == at::kFloat,
                      "add_gaussian_noise_: xs must be float32 or float64, got ",
                      xs[0].scalar_type());
    add_noise<float>(contiguous, std, key, counter, scale);
  }
  for (size_t i = 0; i < xs.size(); ++i) {
    if (!xs[i].is_contiguous()) xs[i].copy_(contiguous[i]);
  }
}

using Stream = std::pair<int64_t, int64_t>;  // key, counter

// Scatters streams over all 64 bits, neighbouring keys and counters too (the end of SplitMix64).
uint64_t hash_of(const Stream& stream) {
  uint64_t h = static_cast<uint64_t>(stream.first) +
               static_cast<uint64_t>(stream.second) * 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}

// Whether two streams are the same. Measured for 10,000 streams: 35 us; sorting them took 370.
bool some_repeat(const std::vector<Stream>& streams) {
  const size_t slots = std::bit_ceil(2 * streams.size() + 1);
  std::vector<int64_t> table(slots, -1);  // at most half full, so that a search is short
  for (size_t i = 0; i < streams.size(); ++i) {
    size_t slot = hash_of(streams[i]) & (slots - 1);
    for (; table[slot] >= 0; slot = (slot + 1) & (slots - 1)) {
      if (streams[table[slot]] == streams[i]) return true;
    }
    table[slot] = static_cast<int64_t>(i);
  }
  return false;
}

// The stream of each row. Throws unless all counters are >= 0 and no two streams are the same.
// Messages are without values: a key would tell the noise.
std::vector<Stream> streams_of(const at::Tensor& keys, const at::Tensor& counters, int64_t rows) {
  for (const at::Tensor& each : {keys, counters}) {
    TORCH_CHECK_VALUE(each.is_cpu() && each.layout() == at::kStrided &&
                          each.scalar_type() == at::kLong && each.dim() == 1 &&
                          each.numel() == rows,
                      "add_row_noise_: keys and counters must be int64 [", rows,
                      "] on the CPU, got ", each.scalar_type(), " ", each.sizes());
  }
  const int64_t* const key = keys.const_data_ptr<int64_t>();
  const int64_t* const counter = counters.const_data_ptr<int64_t>();
  std::vector<Stream> streams(rows);
  for (int64_t i = 0; i < rows; ++i) {
    streams[i] = {key[i * keys.stride(0)], counter[i * counters.stride(0)]};
    TORCH_CHECK_VALUE(streams[i].second >= 0,
                      "add_row_noise_: counters must be in [0, 2^63), got a negative one; RowKeys "
                      "makes them");
  }
  TORCH_CHECK_VALUE(!some_repeat(streams),
                    "add_row_noise_: two rows have the same key and counter, so that their "
                    "difference would show the data without noise; RowKeys hands out each pair "
                    "once");
  return streams;
}

template <class T>
void add_noise(const at::Tensor& x, double std, const std::vector<Stream>& streams, double scale) {
  T* const first = x.mutable_data_ptr<T>();
  const int64_t rows = x.size(0), stride = x.stride(0), n = x.numel() / rows;
  std::vector<dpk::NoiseTarget<T>> targets(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const auto [key, counter] = streams[i];
    targets[i] = {first + i * stride, n, static_cast<uint64_t>(key),
                  static_cast<uint64_t>(counter)};
  }
  add_noise(targets, std, scale);
}

void add_row_noise_(const at::Tensor& x, double std, const at::Tensor& keys,
                    const at::Tensor& counters, double scale) {
  TORCH_CHECK_VALUE(x.is_cpu() && x.layout() == at::kStrided && x.dim() > 0,
                    "add_row_noise_: x must be [k, ...] on the CPU, got ", x.sizes());
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble,
                    "add_row_noise_: x must be float32 or float64, got ", x.scalar_type());
  const std::vector<Stream> streams = streams_of(keys, counters, x.size(0));
  if (x.numel() == 0) return;
  TORCH_CHECK_VALUE(
      x.select(0, 0).is_contiguous() && (x.size(0) == 1 || x.stride(0) >= x.numel() / x.size(0)),
      "add_row_noise_: x must have contiguous rows that do not overlap, got strides ", x.strides());
  dpk::check_disjoint({x}, {keys, counters});
  if (x.scalar_type() == at::kDouble) {
    add_noise<double>(x, std, streams, scale);
  } else {
    add_noise<float>(x, std, streams, scale);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) {
  m.impl("add_gaussian_noise_", add_gaussian_noise_);
  m.impl("add_row_noise_", add_row_noise_);
}
