// What one thread works in while it trains its clients, out of one piece of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "network_sgd/passes.h"

namespace dpk {

// Hands out aligned parts; with no memory it only counts.
class Parts {
 public:
  explicit Parts(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class U>
  U* take(int64_t count) {
    char* const begin = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(U)), 64);
    return reinterpret_cast<U*>(begin);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

template <class T>
struct ImageBuffers {
  T *frames, *outputs;         // inputs, and outputs before dropout, of a batch
  T *weights, *sums, *panels;  // packed weights and their gradient, for the passes
  T* bias_sums;
  uint8_t* which;  // place in its window of every pooled output
};

template <class T>
struct FlatBuffers {
  T *inputs, *outputs, *back;  // outputs before dropout; back: what comes back to inputs
};

template <class T>
struct Buffers {
  T* parameters;
  std::vector<ImageBuffers<T>> images;
  std::vector<FlatBuffers<T>> flats;
  T *z, *d, *frame_back;  // of one record in any image layer
  int32_t *begin, *output, *entry_at, *output_end, *output_at;
  T *value, *output_value;
  Parts parts;

  Buffers(void* memory, const Network& network, const std::vector<ImageLayer>& layers)
      : parts(memory) {
    const int64_t batch = network.batch_size;
    parameters = parts.take<T>(network.parameters);
    int64_t z_size = 0, d_size = 0, frame = 0, lists = 0, outputs = 0;
    for (const ImageLayer& image : layers) {
      const NetLayer& layer = image.layer;
      const bool is_conv = layer.kind == LayerKind::convolution;
      // Patches, and what is made of them, end with a whole vector: 64 bytes past it at most.
      images.push_back({parts.take<T>(batch * image.frame + kSlack),
                        parts.take<T>(batch * layer.features() + kSlack),
                        parts.take<T>(is_conv ? image.packed : 0),
                        parts.take<T>(is_conv ? image.packed : 0),
                        parts.take<T>(is_conv ? image.panels : 0), parts.take<T>(layer.outputs),
                        parts.take<uint8_t>(batch * layer.features() + kSlack)});
      // A record is turned to channels last here, too.
      const int64_t taken = layer.channels * layer.height * layer.width;
      z_size = std::max({z_size, layer.positions() * layer.outputs, taken});
      d_size = std::max(d_size, layer.features());
      frame = std::max(frame, image.frame);
      lists = std::max(lists, layer.pooled() * layer.window());
      outputs = std::max(outputs, layer.outputs);
    }
    const int64_t first = static_cast<int64_t>(layers.size());
    for (int64_t l = first; l < network.depth; ++l) {
      const int64_t size = batch * network.layers[l].channels;
      T* const inputs = parts.take<T>(size);
      T* const outputs = parts.take<T>(batch * network.layers[l].outputs);
      flats.push_back({inputs, outputs, parts.take<T>(size)});
    }
    z = parts.take<T>(z_size + kSlack);
    d = parts.take<T>(d_size);
    frame_back = parts.take<T>(frame + kSlack);
    begin = parts.take<int32_t>(lists + 1);
    output = parts.take<int32_t>(d_size + kSlack);
    value = parts.take<T>(d_size + kSlack);
    entry_at = parts.take<int32_t>(d_size + kSlack);
    output_end = parts.take<int32_t>(outputs);
    output_at = parts.take<int32_t>(d_size);
    output_value = parts.take<T>(d_size);
  }

 private:
  static constexpr int64_t kSlack = 64 / static_cast<int64_t>(sizeof(T));
};

}  // namespace dpk
