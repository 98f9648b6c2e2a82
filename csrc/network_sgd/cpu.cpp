#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/element.h"
#include "common/gemm.h"
#include "common/softmax.h"
#include "network_sgd/buffers.h"
#include "network_sgd/network_sgd.h"
#include "network_sgd/passes.h"
#define DPK_KERNELS "network_sgd/kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// The kernels of the instruction set that runs.
template <class T>
struct Kernels {
  Isa isa = active_isa();
  decltype(&portable::conv_forward<T>) conv_forward = DPK_FOR_ISA(isa, conv_forward<T>);
  decltype(&portable::add_patches_back<T>) patches_back = DPK_FOR_ISA(isa, add_patches_back<T>);
  decltype(&portable::add_weights_back<T>) weights_back = DPK_FOR_ISA(isa, add_weights_back<T>);
  decltype(&portable::max_pool<T>) max_pool = DPK_FOR_ISA(isa, max_pool<T>);
  decltype(&portable::by_output<T>) by_output = DPK_FOR_ISA(isa, by_output<T>);
  decltype(&portable::list_by_output<T>) list_by_output = DPK_FOR_ISA(isa, list_by_output<T>);
  decltype(&portable::lanes_for<T>) lanes_for = DPK_FOR_ISA(isa, lanes_for<T>);
  decltype(&portable::panel_columns<T>) panel_columns = DPK_FOR_ISA(isa, panel_columns<T>);
  decltype(&portable::add_bias<T>) add_bias = DPK_FOR_ISA(isa, add_bias<T>);
  decltype(&portable::relu_back<T>) relu_back = DPK_FOR_ISA(isa, relu_back<T>);
  decltype(&portable::tanh_back<T>) tanh_back = DPK_FOR_ISA(isa, tanh_back<T>);
  decltype(&portable::drop_by_bytes<T>) drop_by_bytes = DPK_FOR_ISA(isa, drop_by_bytes<T>);
  decltype(&portable::drop_by_words<T>) drop_by_words = DPK_FOR_ISA(isa, drop_by_words<T>);
  decltype(&portable::add_rows<T>) add_rows = DPK_FOR_ISA(isa, add_rows<T>);
  decltype(&portable::linear_forward<T>) linear_forward = DPK_FOR_ISA(isa, linear_forward<T>);
  decltype(&portable::list_by_place<T>) list_by_place = DPK_FOR_ISA(isa, list_by_place<T>);
  decltype(&portable::turn<T>) turn = DPK_FOR_ISA(isa, turn<T>);
  decltype(&portable::subtract<T>) subtract = DPK_FOR_ISA(isa, subtract<T>);
  decltype(&portable::linear_back<T>) linear_back = DPK_FOR_ISA(isa, linear_back<T>);
  decltype(&portable::keep_part<T>) keep_part = DPK_FOR_ISA(isa, keep_part<T>);
};

// The network as all clients share it.
template <class T>
struct Shared {
  const Network& network;
  Kernels<T> kernels;
  std::vector<ImageLayer> images;
  int64_t trained;  // the first layer with parameters: nothing goes back below it
  const T* records;

  Shared(const Network& given, const T* all) : network(given), records(all) {
    int64_t flat = network.depth;
    while (flat > 0 && network.layers[flat - 1].is_flat()) --flat;
    for (int64_t l = 0; l < flat; ++l) {
      const NetLayer& layer = network.layers[l];
      images.emplace_back(layer, kernels.lanes_for(layer.kernel.size[1] * layer.channels),
                          kernels.panel_columns(layer.outputs));
    }
    trained = 0;
    while (network.layers[trained].kind == LayerKind::pass) ++trained;
  }
  int64_t first_flat() const { return static_cast<int64_t>(images.size()); }
};

// One client's training, in the buffers of the thread that runs it.
template <class T>
class Training {
 public:
  Training(const Shared<T>& shared, void* memory)
      : s_(shared), k_(shared.kernels), buffers_(memory, shared.network, shared.images) {
    for (int64_t l = 0; l < s_.first_flat(); ++l) {
      // The frame's border is never written.
      std::fill_n(buffers_.images[l].frames, s_.network.batch_size * s_.images[l].frame, T(0));
      std::fill_n(buffers_.images[l].weights, packed_of(l), T(0));
    }
  }

  void run(const NetClient<T>& client) {
    const Network& network = s_.network;
    velocity_ = client.velocity;
    if (velocity_ != nullptr && client.first) std::fill_n(velocity_, network.parameters, T(0));
    if (client.count == 0) {
      for (int64_t j = 0; j < network.parameters; ++j) {
        client.after[j] = client.start == nullptr ? client.before[j] : T(0);
      }
      return;
    }
    std::copy_n(client.before, network.parameters, buffers_.parameters);
    for (int64_t l = 0; l < s_.first_flat(); ++l) unpack(l);
    for (int64_t begin = 0; begin < client.count; begin += network.batch_size) {
      step(client, begin, std::min(network.batch_size, client.count - begin));
    }
    for (int64_t l = 0; l < s_.first_flat(); ++l) pack(l);
    if (client.start == nullptr) {
      std::copy_n(buffers_.parameters, network.parameters, client.after);
    } else {
      k_.subtract(buffers_.parameters, client.start, network.parameters, client.after);
    }
  }

 private:
  const NetLayer& layer(int64_t l) const { return s_.network.layers[l]; }
  T* weight(int64_t l) { return buffers_.parameters + layer(l).weight; }
  T* bias(int64_t l) {
    return layer(l).kind == LayerKind::pass || layer(l).bias < 0
               ? nullptr
               : buffers_.parameters + layer(l).bias;
  }
  T momentum() const { return T(s_.network.momentum); }
  int64_t packed_of(int64_t l) const {
    return layer(l).kind == LayerKind::convolution ? s_.images[l].packed : 0;
  }

  // Calls body(index in torch's weight, run, index in the run, output) for all weights of layer l.
  template <class Body>
  void each_weight(int64_t l, Body&& body) {
    const NetLayer& own = layer(l);
    const int64_t rows = own.kernel.size[0], columns = own.kernel.size[1];
    for (int64_t o = 0; o < own.outputs; ++o) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          for (int64_t c = 0; c < own.channels; ++c) {
            const int64_t from = ((o * own.channels + c) * rows + row) * columns + column;
            body(from, (row * columns + column) * own.channels + c, o);
          }
        }
      }
    }
  }

  void unpack(int64_t l) {
    if (layer(l).kind != LayerKind::convolution) return;
    const ImageLayer& image = s_.images[l];
    const ImageBuffers<T>& own = buffers_.images[l];
    const int64_t each = image.pieces * image.lanes;
    const T* const from = weight(l);
    each_weight(l, [&](int64_t at, int64_t i, int64_t o) {
      own.weights[image.slots[i] + o * each] = from[at];
    });
    std::fill_n(own.panels, image.panels, T(0));
    fill_panels(l);
    if (velocity_ == nullptr) return;
    std::fill_n(own.sums, image.packed, T(0));
    const T* const last = velocity_ + layer(l).weight;
    each_weight(l, [&](int64_t at, int64_t i, int64_t o) {
      own.sums[image.slots[i] + o * each] = last[at];
    });
    if (bias(l) != nullptr) std::copy_n(velocity_ + layer(l).bias, layer(l).outputs, own.bias_sums);
  }

  void pack(int64_t l) {
    if (layer(l).kind != LayerKind::convolution) return;
    const ImageLayer& image = s_.images[l];
    const int64_t each = image.pieces * image.lanes;
    const ImageBuffers<T>& own = buffers_.images[l];
    T* const to = weight(l);
    each_weight(l, [&](int64_t at, int64_t i, int64_t o) {
      to[at] = own.weights[image.slots[i] + o * each];
    });
    if (velocity_ == nullptr) return;
    T* const last = velocity_ + layer(l).weight;
    each_weight(l, [&](int64_t at, int64_t i, int64_t o) {
      last[at] = own.sums[image.slots[i] + o * each];
    });
    if (bias(l) != nullptr) std::copy_n(own.bias_sums, layer(l).outputs, velocity_ + layer(l).bias);
  }

  void fill_panels(int64_t l) {
    const ImageLayer& image = s_.images[l];
    const ImageBuffers<T>& own = buffers_.images[l];
    const int64_t each = image.pieces * image.lanes, columns = image.columns;
    const int64_t length = static_cast<int64_t>(image.slots.size());
    for (int64_t o = 0; o < layer(l).outputs; ++o) {
      T* const to = own.panels + o / columns * columns * length + o % columns;
      const T* const from = own.weights + o * each;
      for (int64_t i = 0; i < length; ++i) to[i * columns] = from[image.slots[i]];
    }
  }

  void step(const NetClient<T>& client, int64_t begin, int64_t size) {
    const int64_t first = s_.first_flat(), depth = s_.network.depth;
    for (int64_t r = 0; r < size; ++r) {
      take_record(client.rows[begin + r], r);
      for (int64_t l = 0; l < first; ++l) image_forward(client, l, begin, r);
    }
    for (int64_t l = first; l < depth; ++l) flat_forward(client, l, begin, size);
    // What is added to parameters is minus lr over the batch's size times the gradient's sum.
    const T scale = T(-s_.network.lr / static_cast<double>(size));
    const int64_t classes = layer(depth - 1).outputs;
    for (int64_t r = 0; r < size; ++r) {
      T* const logits = buffers_.flats.back().outputs + r * classes;
      softmax_residuals(classes, client.labels[begin + r], scale, logits);
    }
    for (int64_t l = depth - 1; l >= std::max(first, s_.trained); --l) {
      flat_back(client, l, begin, size);
    }
    for (int64_t l = s_.trained; l < first; ++l) begin_sums(l);
    for (int64_t r = 0; r < size; ++r) {
      for (int64_t l = first - 1; l >= s_.trained; --l) image_back(client, l, begin, r);
    }
    for (int64_t l = s_.trained; l < first; ++l) image_step(l);
  }

  // Puts a record, [channels, height, width], where the first layer takes it.
  void take_record(int64_t row, int64_t r) {
    const NetLayer& own = layer(0);
    const int64_t pixels = own.height * own.width, size = own.channels * pixels;
    const T* const record = s_.records + row * size;
    if (s_.images.empty()) {
      std::copy_n(record, size, buffers_.flats[0].inputs + r * size);
      return;
    }
    k_.turn(record, own.channels, pixels, buffers_.z);
    into_frame(0, buffers_.z, r);
  }

  // Copies an image [height, width, channels] into record r's frame of layer l.
  void into_frame(int64_t l, const T* image, int64_t r) {
    const ImageLayer& to = s_.images[l];
    const int64_t row = to.layer.width * to.layer.channels;
    const Window& kernel = to.layer.kernel;
    T* frame = buffers_.images[l].frames + r * to.frame;
    frame += kernel.padding[0] * to.patch.apart + kernel.padding[1] * to.layer.channels;
    for (int64_t y = 0; y < to.layer.height; ++y) {
      std::copy_n(image + y * row, row, frame + y * to.patch.apart);
    }
  }

  void drop(const NetClient<T>& client, int64_t l, int64_t begin, int64_t rows, T* values) {
    const NetLayer& own = layer(l);
    if (own.levels == 0) return;
    const int64_t at = begin * own.features(), count = rows * own.features();
    const int32_t kept = static_cast<int32_t>(own.kept);
    const T scale = kept == 0 ? T(0) : T(static_cast<double>(own.levels) / kept);
    if (own.levels == 256) {
      k_.drop_by_bytes(static_cast<const uint8_t*>(client.masks[l]) + at, kept, scale, count,
                       values);
    } else {
      k_.drop_by_words(static_cast<const uint16_t*>(client.masks[l]) + at, kept, scale, count,
                       values);
    }
  }

  void activate(int64_t l, int64_t rows, T* z) {
    const NetLayer& own = layer(l);
    k_.add_bias(bias(l), own.activation == Activation::relu, rows, own.outputs, z);
    if (own.activation == Activation::tanh) {
      for (int64_t j = 0; j < rows * own.outputs; ++j) z[j] = std::tanh(z[j]);
    }
  }

  void activation_back(int64_t l, const T* outputs, int64_t count, T* d) {
    if (layer(l).activation == Activation::relu) k_.relu_back(outputs, count, d);
    if (layer(l).activation == Activation::tanh) k_.tanh_back(outputs, count, d);
  }

  void image_forward(const NetClient<T>& client, int64_t l, int64_t begin, int64_t r) {
    const ImageLayer& image = s_.images[l];
    const NetLayer& own = image.layer;
    const int64_t positions = own.positions(), features = own.features();
    T* const out = buffers_.images[l].outputs + r * features;
    const T* const frame = buffers_.images[l].frames + r * image.frame;
    const bool pools = own.window() > 1 || own.pooled() != positions;
    const T* z = frame;
    if (own.kind == LayerKind::convolution) {
      T* const made = pools ? buffers_.z : out;
      k_.conv_forward(image.patch, frame, image.at.data(), positions, buffers_.images[l].panels,
                      own.outputs, made);
      z = made;
    } else if (!pools) {
      std::copy_n(frame, features, out);
    }
    if (pools) {
      k_.max_pool(z, image.under_begin.data(), image.under.data(), image.names.data(), own.pooled(),
                  own.outputs, out, buffers_.images[l].which + r * features);
    }
    activate(l, own.pooled(), out);
    const T* made = out;
    if (own.levels != 0) {
      std::copy_n(out, features, buffers_.d);
      drop(client, l, begin + r, 1, buffers_.d);
      made = buffers_.d;
    }
    if (l + 1 < s_.first_flat()) {
      into_frame(l + 1, made, r);
    } else {
      k_.turn(made, own.pooled(), own.outputs, buffers_.flats[0].inputs + r * features);
    }
  }

  void flat_forward(const NetClient<T>& client, int64_t l, int64_t begin, int64_t size) {
    const NetLayer& own = layer(l);
    const FlatBuffers<T>& flat = buffers_.flats[l - s_.first_flat()];
    if (own.kind == LayerKind::linear) {
      k_.linear_forward(size, own.channels, own.outputs, flat.inputs, weight(l), flat.outputs);
    } else {
      std::copy_n(flat.inputs, size * own.channels, flat.outputs);
    }
    activate(l, size, flat.outputs);
    if (l + 1 == s_.network.depth) return;
    T* const next = buffers_.flats[l + 1 - s_.first_flat()].inputs;
    std::copy_n(flat.outputs, size * own.outputs, next);
    drop(client, l, begin, size, next);
  }

  void flat_back(const NetClient<T>& client, int64_t l, int64_t begin, int64_t size) {
    const NetLayer& own = layer(l);
    const int64_t at = l - s_.first_flat();
    const FlatBuffers<T>& flat = buffers_.flats[at];
    T* d = flat.outputs;
    if (l + 1 < s_.network.depth) {
      d = buffers_.flats[at + 1].back;
      drop(client, l, begin, size, d);
      activation_back(l, flat.outputs, size * own.outputs, d);
    }
    if (own.kind == LayerKind::pass) {
      std::copy_n(d, size * own.channels, flat.back);
      return;
    }
    // The block's part of inputs and of what comes back: 20 of 32 KiB of the first-level
    // cache. By size, not tuned.
    const int64_t fit = 20480 / static_cast<int64_t>(sizeof(T)) / (2 * size) / 32 * 32;
    T* const last = velocity_ == nullptr ? nullptr : velocity_ + own.weight;
    k_.linear_back(size, own.channels, own.outputs, d, flat.inputs,
                   l > s_.trained ? flat.back : nullptr, weight(l), last, momentum(),
                   std::clamp<int64_t>(fit, 32, 512));
    if (bias(l) == nullptr) return;
    if (last == nullptr) {
      k_.add_rows(d, size, own.outputs, bias(l));
      return;
    }
    T* const last_bias = velocity_ + own.bias;
    k_.keep_part(momentum(), own.outputs, last_bias);
    k_.add_rows(d, size, own.outputs, last_bias);
    k_.add_rows(last_bias, 1, own.outputs, bias(l));
  }

  void image_back(const NetClient<T>& client, int64_t l, int64_t begin, int64_t r) {
    const ImageLayer& image = s_.images[l];
    const NetLayer& own = image.layer;
    const ImageBuffers<T>& mine = buffers_.images[l];
    const int64_t features = own.features();
    T* const d = buffers_.d;
    if (l + 1 == s_.first_flat()) {
      k_.turn(buffers_.flats[0].back + r * features, own.outputs, own.pooled(), d);
    } else {
      out_of_frame(l + 1, d);
    }
    drop(client, l, begin + r, 1, d);
    activation_back(l, mine.outputs + r * features, features, d);
    const T* const frame = mine.frames + r * image.frame;
    if (l == s_.trained) {
      const ByOutput<T> all = k_.list_by_output(
          d, mine.which + r * features, own.pooled(), own.window(), own.outputs,
          image.list_at.data(), buffers_.output_end, buffers_.output_at, buffers_.output_value);
      add_gradient(l, d, all, frame);
      return;
    }
    const CameBack<T> back = listed(l, r);
    std::fill_n(buffers_.frame_back, image.frame, T(0));
    if (own.kind == LayerKind::pass) {
      for (int64_t q = 0; q < back.lists; ++q) {
        for (int32_t e = back.begin[q]; e < back.begin[q + 1]; ++e) {
          buffers_.frame_back[back.at[q] + back.output[e]] += back.value[e];
        }
      }
      return;
    }
    add_gradient(l, d,
                 k_.by_output(back, own.outputs, own.pooled(), buffers_.output_end,
                              buffers_.output_at, buffers_.output_value),
                 frame);
    const int64_t each = image.pieces * image.lanes * own.outputs;
    for (int64_t chunk = 0; chunk < image.chunks; ++chunk) {
      k_.weights_back(image.lanes, image.pieces, back, mine.weights + chunk * each,
                      image.piece_at.data() + chunk * image.pieces, buffers_.frame_back);
    }
  }

  // Adds a record's gradient to the sums of convolution l; d: what came back, [pooled, outputs].
  void add_gradient(int64_t l, const T* d, const ByOutput<T>& back, const T* frame) {
    const ImageLayer& image = s_.images[l];
    const NetLayer& own = image.layer;
    const ImageBuffers<T>& mine = buffers_.images[l];
    if (bias(l) != nullptr) k_.add_rows(d, own.pooled(), own.outputs, mine.bias_sums);
    const int64_t each = image.pieces * image.lanes * own.outputs;
    for (int64_t chunk = 0; chunk < image.chunks; ++chunk) {
      k_.patches_back(image.lanes, image.pieces, back, frame,
                      image.piece_at.data() + chunk * image.pieces, mine.sums + chunk * each);
    }
  }

  // Copies what came back to layer l's frame, without its border, to d.
  void out_of_frame(int64_t l, T* d) {
    const ImageLayer& from = s_.images[l];
    const int64_t row = from.layer.width * from.layer.channels;
    const Window& kernel = from.layer.kernel;
    const T* frame = buffers_.frame_back + kernel.padding[0] * from.patch.apart +
                     kernel.padding[1] * from.layer.channels;
    for (int64_t y = 0; y < from.layer.height; ++y) {
      std::copy_n(frame + y * from.patch.apart, row, d + y * row);
    }
  }

  // The numbers of d, [pooled, outputs], that are not zero, by the position that they belong to.
  CameBack<T> listed(int64_t l, int64_t r) {
    const ImageLayer& image = s_.images[l];
    const NetLayer& own = image.layer;
    const int64_t window = own.window();
    const int32_t* const at = image.list_at.data();
    k_.list_by_place(buffers_.d, buffers_.images[l].which + r * own.features(), own.pooled(),
                     window, own.outputs, at, buffers_.begin, buffers_.output, buffers_.entry_at,
                     buffers_.value);
    return {own.pooled() * window, at, buffers_.begin, buffers_.output, buffers_.entry_at,
            buffers_.value};
  }

  // What the last step added, times momentum: the batch's gradient is added up on top of it, and
  // the sum is the next step.
  void begin_sums(int64_t l) {
    if (layer(l).kind != LayerKind::convolution) return;
    k_.keep_part(momentum(), s_.images[l].packed, buffers_.images[l].sums);
    if (bias(l) != nullptr) {
      k_.keep_part(momentum(), layer(l).outputs, buffers_.images[l].bias_sums);
    }
  }

  // Adds a step to the weights. Only numbers of a patch: what fills up its vectors are
  // neighbours' numbers in the gradient, and must stay zero in the weights.
  void image_step(int64_t l) {
    if (layer(l).kind != LayerKind::convolution) return;
    const ImageLayer& image = s_.images[l];
    const ImageBuffers<T>& own = buffers_.images[l];
    const int64_t each = image.pieces * image.lanes;
    for (int64_t o = 0; o < layer(l).outputs; ++o) {
      T* const weights = own.weights + o * each;
      const T* const sums = own.sums + o * each;
      for (const int32_t slot : image.slots) weights[slot] += sums[slot];
    }
    if (bias(l) != nullptr) k_.add_rows(own.bias_sums, 1, layer(l).outputs, bias(l));
    fill_panels(l);
  }

  const Shared<T>& s_;
  const Kernels<T>& k_;
  Buffers<T> buffers_;
  T* velocity_ = nullptr;  // of the client; null without momentum
};

int tasks_for(int64_t count, const Executor& executor) {
  return static_cast<int>(std::min<int64_t>(executor.threads, count));
}

}  // namespace

template <class T>
int64_t network_workspace(int64_t count, const Network& network, const Executor& executor) {
  const Shared<T> shared(network, nullptr);
  return tasks_for(count, executor) * Buffers<T>(nullptr, network, shared.images).parts.used();
}

template <class T>
void network_epoch(const NetClient<T>* clients, int64_t count, const Network& network,
                   const T* records, void* workspace, const Executor& executor) {
  if (count == 0) return;
  const Shared<T> shared(network, records);
  const int64_t bytes = Buffers<T>(nullptr, network, shared.images).parts.used();
  // Whoever is free takes the next client, the longest first: a client's numbers do not depend on
  // the thread.
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return clients[i].count > clients[j].count; });
  std::atomic<int64_t> next{0};
  for_each_task(executor, tasks_for(count, executor), [&](int task) {
    Training<T> training(shared, static_cast<char*>(workspace) + task * bytes);
    for (int64_t i = next++; i < count; i = next++) training.run(clients[order[i]]);
  });
}

#define DPK_INSTANTIATE(T)                                                                      \
  template int64_t network_workspace<T>(int64_t, const Network&, const Executor&);              \
  template void network_epoch<T>(const NetClient<T>*, int64_t, const Network&, const T*, void*, \
                                 const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
