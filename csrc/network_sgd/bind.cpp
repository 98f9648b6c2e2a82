// dpkernels::network_epoch_ on CPU tensors.
//
// Friendly messages come from the Python function; the checks here keep a direct call of the
// operator from reading or writing memory that is not its own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "network_sgd/network_sgd.h"

namespace {

struct Arguments {
  const at::Tensor& parameters;
  const std::optional<at::Tensor>& velocity;
  const at::Tensor &theta, &records, &rows, &labels;
  at::IntArrayRef counts;
  at::TensorList masks;
  at::IntArrayRef layers;
  int64_t batch_size;
  double lr, momentum;
  bool first, last;
};

// How many numbers say what a layer is, in the order of NetLayer.
constexpr int64_t kNumbers = 22;
// Sizes of a layer, and of what it makes for one record: 32-bit places in a frame are enough.
constexpr int64_t kMost = int64_t(1) << 28;

dpk::Window window_of(const int64_t* n) { return {{n[0], n[1]}, {n[2], n[3]}, {n[4], n[5]}}; }

void check_window(const dpk::Window& w, int64_t height, int64_t width, const char* name) {
  const int64_t sizes[2] = {height, width};
  for (int axis = 0; axis < 2; ++axis) {
    TORCH_CHECK_VALUE(w.size[axis] >= 1 && w.size[axis] <= kMost && w.stride[axis] >= 1 &&
                          w.padding[axis] >= 0 && w.padding[axis] <= kMost &&
                          sizes[axis] + 2 * w.padding[axis] >= w.size[axis],
                      "network_epoch_: layers: a ", name, " does not fit its image");
  }
}

// Raises unless a x b x c is at most kMost; all are.
void check_product(int64_t a, int64_t b, int64_t c) {
  TORCH_CHECK_VALUE(a * b <= kMost && a * b * c <= kMost, "network_epoch_: layers: too large");
}

void check_layer(const dpk::NetLayer& layer, int64_t parameters) {
  const bool is_conv = layer.kind == dpk::LayerKind::convolution;
  const bool is_linear = layer.kind == dpk::LayerKind::linear;
  TORCH_CHECK_VALUE(is_conv || is_linear || layer.kind == dpk::LayerKind::pass,
                    "network_epoch_: layers: no such kind");
  for (const int64_t size : {layer.channels, layer.height, layer.width, layer.outputs}) {
    TORCH_CHECK_VALUE(size >= 1 && size <= kMost, "network_epoch_: layers: no such size");
  }
  TORCH_CHECK_VALUE(is_conv || is_linear || layer.outputs == layer.channels,
                    "network_epoch_: layers: a pass makes as many channels as it takes");
  TORCH_CHECK_VALUE(!is_linear || (layer.height == 1 && layer.width == 1),
                    "network_epoch_: layers: a linear one takes flat records");
  check_window(layer.kernel, layer.height, layer.width, "kernel");
  TORCH_CHECK_VALUE(is_conv || (layer.kernel.size[0] == 1 && layer.kernel.size[1] == 1 &&
                                layer.kernel.stride[0] == 1 && layer.kernel.stride[1] == 1 &&
                                layer.kernel.padding[0] == 0 && layer.kernel.padding[1] == 0),
                    "network_epoch_: layers: only convolutions have kernels");
  check_product(layer.height + 2 * layer.kernel.padding[0],
                layer.width + 2 * layer.kernel.padding[1], layer.channels);
  check_product(layer.conv_size(0), layer.conv_size(1), layer.outputs);
  check_window(layer.pool, layer.conv_size(0), layer.conv_size(1), "pool");
  TORCH_CHECK_VALUE(layer.pool.size[0] <= 255 && layer.pool.size[1] <= 255 &&
                        layer.window() <= 255 && 2 * layer.pool.padding[0] <= layer.pool.size[0] &&
                        2 * layer.pool.padding[1] <= layer.pool.size[1],
                    "network_epoch_: layers: a pool must have at most 255 places and padding of "
                    "at most half its size");
  TORCH_CHECK_VALUE(!is_linear || layer.window() == 1,
                    "network_epoch_: layers: a linear one has no pool");
  check_product(layer.pool_size(0), layer.pool_size(1), layer.outputs * layer.window());
  const int64_t kind = static_cast<int64_t>(layer.activation);
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, "network_epoch_: layers: no such activation");
  TORCH_CHECK_VALUE(layer.levels == 0 || ((layer.levels == 256 || layer.levels == 65536) &&
                                          layer.kept >= 0 && layer.kept <= layer.levels),
                    "network_epoch_: layers: levels must be 0, 256 or 65536, kept at most that");
  if (layer.kind == dpk::LayerKind::pass) return;
  check_product(layer.channels * layer.outputs <= kMost ? layer.channels * layer.outputs : kMost,
                layer.kernel.size[0], layer.kernel.size[1]);
  const int64_t size = layer.channels * layer.outputs * layer.kernel.size[0] * layer.kernel.size[1];
  TORCH_CHECK_VALUE(layer.weight >= 0 && layer.weight <= parameters - size && layer.bias >= -1 &&
                        (layer.bias < 0 || layer.bias <= parameters - layer.outputs),
                    "network_epoch_: layers: weights lie outside of the parameters");
}

std::vector<dpk::NetLayer> layers_of(const Arguments& args) {
  const int64_t depth = static_cast<int64_t>(args.layers.size()) / kNumbers;
  TORCH_CHECK_VALUE(depth >= 1 && static_cast<int64_t>(args.layers.size()) == depth * kNumbers,
                    "network_epoch_: layers must have ", kNumbers,
                    " numbers for each of at least one layer");
  std::vector<dpk::NetLayer> layers;
  for (int64_t l = 0; l < depth; ++l) {
    const int64_t* const n = args.layers.data() + l * kNumbers;
    layers.push_back({static_cast<dpk::LayerKind>(n[0]), n[1], n[2], n[3], n[4], window_of(n + 5),
                      n[11], n[12], static_cast<dpk::Activation>(n[13]), window_of(n + 14), n[20],
                      n[21]});
    const dpk::NetLayer& own = layers.back();
    check_layer(own, args.parameters.size(1));
    if (l == 0) continue;
    const dpk::NetLayer& below = layers[l - 1];
    const bool same = own.channels == below.outputs && own.height == below.pool_size(0) &&
                      own.width == below.pool_size(1);
    const bool flattens = own.channels == below.features() && own.height == 1 && own.width == 1;
    TORCH_CHECK_VALUE((same && own.kind != dpk::LayerKind::linear) || flattens,
                      "network_epoch_: layers: layer ", l, " does not take what comes before");
    TORCH_CHECK_VALUE(own.kind != dpk::LayerKind::convolution || same,
                      "network_epoch_: layers: a convolution after a flat layer");
  }
  const dpk::NetLayer& last = layers.back();
  TORCH_CHECK_VALUE(last.kind == dpk::LayerKind::linear &&
                        last.activation == dpk::Activation::none && last.levels == 0,
                    "network_epoch_: layers: the last must be linear, with nothing after it");
  return layers;
}

void check_table(const at::Tensor& tensor, at::ScalarType type, int64_t dim, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == type && tensor.dim() == dim &&
                        tensor.is_contiguous(),
                    "network_epoch_: ", name, " must be contiguous ", type, " of ", dim,
                    " dimensions on the CPU");
}

void check_range(const at::Tensor& table, int64_t row, int64_t count, int64_t end,
                 const char* name) {
  const int64_t* const values = table.const_data_ptr<int64_t>() + row * table.size(1);
  for (int64_t j = 0; j < count; ++j) {
    TORCH_CHECK_VALUE(values[j] >= 0 && values[j] < end, "network_epoch_: ", name,
                      " must be in [0, ", end, ")");
  }
}

std::vector<dpk::NetLayer> check(const Arguments& args) {
  const at::ScalarType type = args.parameters.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble,
                    "network_epoch_: parameters must be float32 or float64");
  check_table(args.parameters, type, 2, "parameters");
  check_table(args.theta, type, 2, "theta");
  check_table(args.records, type, 2, "records");
  check_table(args.rows, at::kLong, 2, "rows");
  check_table(args.labels, at::kLong, 2, "labels");
  const int64_t k = args.parameters.size(0), most = args.rows.size(1);
  TORCH_CHECK_VALUE((args.theta.size(0) == 1 || args.theta.size(0) == k) &&
                        args.theta.size(1) == args.parameters.size(1),
                    "network_epoch_: theta must be [1, D] or [k, D]");
  TORCH_CHECK_VALUE(args.rows.size(0) == k && args.labels.sizes() == args.rows.sizes() &&
                        static_cast<int64_t>(args.counts.size()) == k && args.batch_size >= 1,
                    "network_epoch_: rows, labels and counts must have one for each client, and "
                    "batch_size must be >= 1");
  TORCH_CHECK_VALUE(args.momentum >= 0 && args.momentum < 1,
                    "network_epoch_: momentum must be in [0, 1), got ", args.momentum);
  TORCH_CHECK_VALUE(args.velocity.has_value() == (args.momentum > 0),
                    "network_epoch_: velocity must be given with momentum, and only with it");
  if (args.velocity) {
    check_table(*args.velocity, type, 2, "velocity");
    TORCH_CHECK_VALUE(args.velocity->sizes() == args.parameters.sizes(),
                      "network_epoch_: velocity must be ", args.parameters.sizes(),
                      ", as parameters are");
  }
  std::vector<dpk::NetLayer> layers = layers_of(args);
  const int64_t record = layers[0].channels * layers[0].height * layers[0].width;
  TORCH_CHECK_VALUE(args.records.size(1) == record, "network_epoch_: records must be [N, ", record,
                    "]");
  for (int64_t i = 0; i < k; ++i) {
    const int64_t n = args.counts[i];
    TORCH_CHECK_VALUE(n >= 0 && n <= most, "network_epoch_: counts must be in [0, ", most, "]");
    check_range(args.rows, i, n, args.records.size(0), "rows");
    check_range(args.labels, i, n, layers.back().outputs, "labels");
  }
  size_t given = 0;
  for (const dpk::NetLayer& layer : layers) {
    if (layer.levels == 0) continue;
    TORCH_CHECK_VALUE(given < args.masks.size(), "network_epoch_: masks: too few");
    const at::Tensor& mask = args.masks[given++];
    // Clients may lie apart: their levels are drawn in whole words.
    TORCH_CHECK_VALUE(
        mask.is_cpu() && mask.scalar_type() == (layer.levels == 256 ? at::kByte : at::kUInt16) &&
            mask.dim() == 3 && mask.size(0) == k && mask.size(1) == most &&
            mask.size(2) == layer.features() && (k == 0 || mask[0].is_contiguous()) &&
            mask.stride(0) >= 0,
        "network_epoch_: masks must be [k, n, features] uint8 or uint16, dense for each client");
  }
  TORCH_CHECK_VALUE(given == args.masks.size(), "network_epoch_: masks: too many");
  std::vector<at::Tensor> outputs{args.parameters};
  if (args.velocity) outputs.push_back(*args.velocity);
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(
        !output.requires_grad() && (!output.is_inference() || c10::InferenceMode::is_enabled()),
        "network_epoch_: what is written must be writable: no grad, no inference tensors");
  }
  std::vector<at::Tensor> inputs{args.theta, args.records, args.rows, args.labels};
  inputs.insert(inputs.end(), args.masks.begin(), args.masks.end());
  dpk::check_disjoint(outputs, inputs);
  return layers;
}

template <class T>
void run(const Arguments& args, const std::vector<dpk::NetLayer>& layers) {
  const int64_t k = args.parameters.size(0), size = args.parameters.size(1);
  const int64_t most = args.rows.size(1);
  std::vector<const void*> masks;
  for (int64_t i = 0; i < k; ++i) {
    size_t given = 0;
    for (const dpk::NetLayer& layer : layers) {
      if (layer.levels == 0) {
        masks.push_back(nullptr);
        continue;
      }
      const at::Tensor& mask = args.masks[given++];
      masks.push_back(static_cast<const char*>(mask.const_data_ptr()) +
                      i * mask.stride(0) * mask.element_size());
    }
  }
  std::vector<dpk::NetClient<T>> clients;
  T* const parameters = args.parameters.mutable_data_ptr<T>();
  T* const velocity = args.velocity ? args.velocity->mutable_data_ptr<T>() : nullptr;
  for (int64_t i = 0; i < k; ++i) {
    T* const own = parameters + i * size;
    const T* const theta =
        args.theta.const_data_ptr<T>() + (args.theta.size(0) == 1 ? 0 : i * size);
    clients.push_back({args.counts[i], args.rows.const_data_ptr<int64_t>() + i * most,
                       args.labels.const_data_ptr<int64_t>() + i * most,
                       masks.data() + i * layers.size(), args.first ? theta : own, own,
                       args.last ? theta : nullptr,
                       velocity == nullptr ? nullptr : velocity + i * size, args.first});
  }
  int64_t longest = 1;
  for (const int64_t count : args.counts) longest = std::max(longest, count);
  const dpk::Network network{layers.data(), static_cast<int64_t>(layers.size()),
                             size,          std::min(args.batch_size, longest),
                             args.lr,       args.momentum};
  const dpk::Executor executor = dpk::torch_executor();
  const int64_t bytes = dpk::network_workspace<T>(k, network, executor);
  const at::Tensor workspace = at::empty({bytes}, args.parameters.options().dtype(at::kByte));
  dpk::network_epoch(clients.data(), k, network, args.records.const_data_ptr<T>(),
                     workspace.mutable_data_ptr(), executor);
}

void network_epoch_(const at::Tensor& parameters, const std::optional<at::Tensor>& velocity,
                    const at::Tensor& theta, const at::Tensor& records, const at::Tensor& rows,
                    const at::Tensor& labels, at::IntArrayRef counts, at::TensorList masks,
                    at::IntArrayRef layers, int64_t batch_size, double lr, double momentum,
                    bool first, bool last) {
  const Arguments args{parameters, velocity, theta,      records, rows,     labels, counts,
                       masks,      layers,   batch_size, lr,      momentum, first,  last};
  const std::vector<dpk::NetLayer> checked = check(args);
  if (parameters.scalar_type() == at::kDouble) {
    run<double>(args, checked);
  } else {
    run<float>(args, checked);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("network_epoch_", network_epoch_); }
