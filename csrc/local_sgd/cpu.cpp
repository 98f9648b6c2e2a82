#include <algorithm>

#include "common/element.h"
#include "common/gemm.h"
#include "common/softmax.h"
#include "local_sgd/local_sgd.h"
#define DPK_KERNELS "local_sgd/kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

int tasks_for(int64_t count, const Executor& executor) {
  return static_cast<int>(std::min<int64_t>(executor.threads, count));
}

// What a task works in: what the hidden layer puts out, its residuals, and those of the logits.
template <class T>
struct Scratch {
  T *hidden, *back, *residuals;

  static int64_t elements(const TwoLayerEpoch& epoch) {
    return epoch.batch_size * (2 * epoch.hidden + epoch.classes);
  }
  Scratch(T* memory, const TwoLayerEpoch& epoch)
      : hidden(memory),
        back(hidden + epoch.batch_size * epoch.hidden),
        residuals(back + epoch.batch_size * epoch.hidden) {}
};

// The kernels of the instruction set that runs.
template <class T>
struct Kernels {
  Isa isa = active_isa();
  decltype(&portable::span_product<T>) span_product = DPK_FOR_ISA(isa, span_product<T>);
  decltype(&portable::relu_and_mask<T>) relu_and_mask = DPK_FOR_ISA(isa, relu_and_mask<T>);
  decltype(&portable::back_through<T>) back_through = DPK_FOR_ISA(isa, back_through<T>);
  decltype(&portable::add_row<T>) add_row = DPK_FOR_ISA(isa, add_row<T>);
};

// One batch, of `size` records from position `begin` of the epoch.
template <class T>
void step(const TwoLayerClient<T>& client, const TwoLayerEpoch& epoch, int64_t begin, int64_t size,
          const Kernels<T>& kernels, const Scratch<T>& scratch) {
  const int64_t hidden = epoch.hidden, classes = epoch.classes;
  const int64_t* const order = client.order + begin;
  const T* const mask = client.mask == nullptr ? nullptr : client.mask + begin * hidden;
  for (int64_t b = 0; b < size; ++b) {
    std::copy_n(client.start + order[b] * hidden, hidden, scratch.hidden + b * hidden);
    if (client.hidden_bias != nullptr) {
      kernels.add_row(client.hidden_bias, hidden, scratch.hidden + b * hidden);
    }
  }
  kernels.span_product(client.gram, client.count, order, size, client.coefficients, hidden,
                       scratch.hidden);
  kernels.relu_and_mask(mask, size * hidden, scratch.hidden);
  gemm<T>(size, classes, hidden, {scratch.hidden, hidden, 1}, {client.weight, 1, hidden},
          scratch.residuals, classes, false);
  // What is added to parameters is minus lr over the batch's size times the gradient's sum.
  const T scale = T(-epoch.lr / static_cast<double>(size));
  for (int64_t b = 0; b < size; ++b) {
    T* const logits = scratch.residuals + b * classes;
    if (client.bias != nullptr) kernels.add_row(client.bias, classes, logits);
    softmax_residuals(classes, client.labels[begin + b], scale, logits);
  }
  gemm<T>(size, hidden, classes, {scratch.residuals, classes, 1}, {client.weight, hidden, 1},
          scratch.back, hidden, false);
  kernels.back_through(scratch.hidden, mask, size * hidden, scratch.back);
  gemm<T>(classes, hidden, size, {scratch.residuals, 1, classes}, {scratch.hidden, hidden, 1},
          client.weight, hidden, true);
  for (int64_t b = 0; b < size; ++b) {
    const T* const back = scratch.back + b * hidden;
    kernels.add_row(back, hidden, client.coefficients + order[b] * hidden);
    if (client.hidden_bias != nullptr) kernels.add_row(back, hidden, client.hidden_bias);
    if (client.bias != nullptr) {
      kernels.add_row(scratch.residuals + b * classes, classes, client.bias);
    }
  }
}

}  // namespace

template <class T>
int64_t two_layer_workspace(int64_t count, const TwoLayerEpoch& epoch, const Executor& executor) {
  return tasks_for(count, executor) * Scratch<T>::elements(epoch);
}

template <class T>
void two_layer_epoch(const TwoLayerClient<T>* clients, int64_t count, const TwoLayerEpoch& epoch,
                     T* workspace, const Executor& executor) {
  if (count == 0) return;
  const Kernels<T> kernels;
  const int tasks = tasks_for(count, executor);
  for_each_task(executor, tasks, [&](int task) {
    const Scratch<T> scratch(workspace + task * Scratch<T>::elements(epoch), epoch);
    // In turn, because clients come sorted by size: so no task gets all the large ones.
    for (int64_t i = task; i < count; i += tasks) {
      for (int64_t begin = 0; begin < clients[i].count; begin += epoch.batch_size) {
        const int64_t size = std::min(epoch.batch_size, clients[i].count - begin);
        step(clients[i], epoch, begin, size, kernels, scratch);
      }
    }
  });
}

#define DPK_INSTANTIATE(T)                                                                      \
  template int64_t two_layer_workspace<T>(int64_t, const TwoLayerEpoch&, const Executor&);      \
  template void two_layer_epoch<T>(const TwoLayerClient<T>*, int64_t, const TwoLayerEpoch&, T*, \
                                   const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
