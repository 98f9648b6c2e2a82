// dpkernels::two_layer_epoch_ on CPU tensors.
//
// Friendly messages come from the Python function; the checks here keep a direct call of the
// operator from reading or writing memory that is not its own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "common/torch_executor.h"
#include "common/torch_overlap.h"
#include "local_sgd/local_sgd.h"

namespace {

struct Arguments {
  const at::Tensor &coefficients, &weight;
  const std::optional<at::Tensor>&hidden_bias, &bias;
  at::TensorList grams;
  const at::Tensor &start, &order, &labels;
  const std::optional<at::Tensor>& mask;
  at::IntArrayRef counts;
  int64_t batch_size;
  double lr;
};

void check_table(const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType type,
                 const char* name) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == type && tensor.sizes() == sizes &&
                        tensor.is_contiguous(),
                    "two_layer_epoch_: ", name, " must be contiguous ", sizes, " ", type,
                    " on the CPU");
}

void check_range(const at::Tensor& table, int64_t row, int64_t count, int64_t end,
                 const char* name) {
  const int64_t* const values = table.const_data_ptr<int64_t>() + row * table.size(1);
  for (int64_t j = 0; j < count; ++j) {
    TORCH_CHECK_VALUE(values[j] >= 0 && values[j] < end, "two_layer_epoch_: ", name,
                      " must be in [0, ", end, ")");
  }
}

void check(const Arguments& args) {
  const at::ScalarType type = args.coefficients.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble,
                    "two_layer_epoch_: coefficients must be float32 or float64");
  TORCH_CHECK_VALUE(args.coefficients.dim() == 3 && args.weight.dim() == 3,
                    "two_layer_epoch_: coefficients and weight must be [k, ., .]");
  const int64_t k = args.coefficients.size(0), most = args.coefficients.size(1);
  const int64_t hidden = args.coefficients.size(2), classes = args.weight.size(1);
  TORCH_CHECK_VALUE(classes >= 1 && args.batch_size >= 1,
                    "two_layer_epoch_: classes and batch_size must be >= 1");
  check_table(args.coefficients, {k, most, hidden}, type, "coefficients");
  check_table(args.weight, {k, classes, hidden}, type, "weight");
  check_table(args.start, {k, most, hidden}, type, "start");
  check_table(args.order, {k, most}, at::kLong, "order");
  check_table(args.labels, {k, most}, at::kLong, "labels");
  std::vector<at::Tensor> outputs{args.coefficients, args.weight};
  std::vector<at::Tensor> inputs(args.grams.begin(), args.grams.end());
  inputs.insert(inputs.end(), {args.start, args.order, args.labels});
  if (args.mask) {
    check_table(*args.mask, {k, most, hidden}, type, "mask");
    inputs.push_back(*args.mask);
  }
  if (args.hidden_bias) {
    check_table(*args.hidden_bias, {k, hidden}, type, "hidden_bias");
    outputs.push_back(*args.hidden_bias);
  }
  if (args.bias) {
    check_table(*args.bias, {k, classes}, type, "bias");
    outputs.push_back(*args.bias);
  }
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(args.grams.size()) == k && static_cast<int64_t>(args.counts.size()) == k,
      "two_layer_epoch_: grams and counts must have one for each client");
  for (int64_t i = 0; i < k; ++i) {
    const int64_t n = args.counts[i];
    TORCH_CHECK_VALUE(n >= 0 && n <= most, "two_layer_epoch_: counts must be in [0, ", most, "]");
    check_table(args.grams[i], {n, n}, type, "grams");
    check_range(args.order, i, n, n, "order");
    check_range(args.labels, i, n, classes, "labels");
  }
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(
        !output.requires_grad() && (!output.is_inference() || c10::InferenceMode::is_enabled()),
        "two_layer_epoch_: what is written must be writable: no grad, no inference tensors");
  }
  dpk::check_disjoint(outputs, inputs);
}

template <class T>
T* row_of(const at::Tensor& tensor, int64_t i) {
  return tensor.mutable_data_ptr<T>() + i * tensor.stride(0);
}

template <class T>
void run(const Arguments& args) {
  const int64_t k = args.coefficients.size(0);
  std::vector<dpk::TwoLayerClient<T>> clients;
  for (int64_t i = 0; i < k; ++i) {
    clients.push_back(
        {args.counts[i], args.grams[i].const_data_ptr<T>(),
         args.start.const_data_ptr<T>() + i * args.start.stride(0),
         args.order.const_data_ptr<int64_t>() + i * args.order.stride(0),
         args.labels.const_data_ptr<int64_t>() + i * args.labels.stride(0),
         args.mask ? args.mask->const_data_ptr<T>() + i * args.mask->stride(0) : nullptr,
         row_of<T>(args.coefficients, i), row_of<T>(args.weight, i),
         args.hidden_bias ? row_of<T>(*args.hidden_bias, i) : nullptr,
         args.bias ? row_of<T>(*args.bias, i) : nullptr});
  }
  const dpk::TwoLayerEpoch epoch{args.coefficients.size(2), args.weight.size(1), args.batch_size,
                                 args.lr};
  const dpk::Executor executor = dpk::torch_executor();
  const int64_t elements = dpk::two_layer_workspace<T>(k, epoch, executor);
  const at::Tensor workspace = at::empty({elements}, args.coefficients.options());
  dpk::two_layer_epoch(clients.data(), k, epoch, workspace.mutable_data_ptr<T>(), executor);
}

void two_layer_epoch_(const at::Tensor& coefficients, const at::Tensor& weight,
                      const std::optional<at::Tensor>& hidden_bias,
                      const std::optional<at::Tensor>& bias, at::TensorList grams,
                      const at::Tensor& start, const at::Tensor& order, const at::Tensor& labels,
                      const std::optional<at::Tensor>& mask, at::IntArrayRef counts,
                      int64_t batch_size, double lr) {
  const Arguments args{coefficients, weight, hidden_bias, bias,   grams,      start,
                       order,        labels, mask,        counts, batch_size, lr};
  check(args);
  if (coefficients.scalar_type() == at::kDouble) {
    run<double>(args);
  } else {
    run<float>(args);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(dpkernels, CPU, m) { m.impl("two_layer_epoch_", two_layer_epoch_); }
