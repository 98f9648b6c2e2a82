#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/element.h"
#include "common/gemm.h"
#include "tsvd/hermitian.h"
#include "tsvd/scratch.h"
#include "tsvd/slice_solver.h"
#include "tsvd/tsvd.h"
#define DPK_KERNELS "tsvd/kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Rows that are transformed and multiplied by the operators at a time. Measured on 784 x 64 x 10,
// one thread: the way back takes 2.4 ms with 24, and 2.0 to 2.3 with 48 to 384, of which the
// smaller ones share out better.
constexpr int64_t kRowsPerBlock = 96;
// The widest vector: 16 floats.
constexpr int64_t kMostLanes = 16;

SliceKernels slice_kernels() {
  const Isa isa = active_isa();
  return {DPK_FOR_ISA(isa, to_double),
          {DPK_FOR_ISA(isa, tridiagonalise<false>), DPK_FOR_ISA(isa, tridiagonalise<true>)},
          DPK_FOR_ISA(isa, solve_tridiagonal),
          {DPK_FOR_ISA(isa, apply_reflections<false>), DPK_FOR_ISA(isa, apply_reflections<true>)}};
}

// cos and sin of 2 pi s k / clients for s, k in [0, clients / 2].
struct Twiddles {
  std::vector<float> cosines, sines;

  explicit Twiddles(int64_t clients) {
    const double turn = 2 * std::acos(-1.0) / static_cast<double>(clients);
    std::vector<double> c(clients), s(clients);
    for (int64_t k = 0; k < clients; ++k) {
      c[k] = std::cos(turn * static_cast<double>(k));
      s[k] = std::sin(turn * static_cast<double>(k));
    }
    for (int64_t row = 0; row <= clients / 2; ++row) {
      for (int64_t k = 0; k <= clients / 2; ++k) {
        cosines.push_back(static_cast<float>(c[row * k % clients]));
        sines.push_back(static_cast<float>(s[row * k % clients]));
      }
    }
  }
};

// Twiddles of every layer; layers with as many clients as the one before share them.
class TwiddlesOfLayers {
 public:
  TwiddlesOfLayers(const ClientTensor* layers, int64_t count) {
    for (int64_t l = 0; l < count; ++l) {
      if (l == 0 || layers[l].clients != layers[l - 1].clients) {
        tables_.emplace_back(layers[l].clients);
      }
      table_of_.push_back(tables_.size() - 1);
    }
  }
  const Twiddles& operator[](int64_t l) const { return tables_[table_of_[l]]; }

 private:
  std::vector<Twiddles> tables_;
  std::vector<size_t> table_of_;
};

// Rows [begin, end) of a layer.
struct RowBlock {
  int64_t layer;
  int64_t begin;
  int64_t end;
};

std::vector<RowBlock> row_blocks(const ClientTensor* layers, int64_t count) {
  std::vector<RowBlock> blocks;
  for (int64_t l = 0; l < count; ++l) {
    for (int64_t r = 0; r < layers[l].rows; r += kRowsPerBlock) {
      blocks.push_back({l, r, std::min(r + kRowsPerBlock, layers[l].rows)});
    }
  }
  return blocks;
}

// A slice of a layer.
struct SliceIndex {
  int64_t layer;
  int64_t slice;
};

// All slices, the most expensive first, so that the threads end at about the same time.
std::vector<SliceIndex> slices_by_cost(const ClientTensor* layers, int64_t count) {
  std::vector<SliceIndex> slices;
  for (int64_t l = 0; l < count; ++l) {
    for (int64_t s = 0; s < layers[l].slices(); ++s) slices.push_back({l, s});
  }
  const auto cost = [layers](SliceIndex index) {
    const ClientTensor& layer = layers[index.layer];
    // An eigendecomposition takes as long as the Gram matrix of 9 n rows (measured for n of 64 and
    // of 120).
    const int64_t width = layer.width(index.slice);
    return width * width * (layer.rows + 9 * layer.cols);
  };
  std::stable_sort(slices.begin(), slices.end(),
                   [&](SliceIndex a, SliceIndex b) { return cost(a) > cost(b); });
  return slices;
}

// What transform_clients and transform_back work in: vectors of all clients and slices, the
// products of a block of rows with the operators of all slices, and where to find their rows.
struct RowMemory {
  float* stage;
  float* products;
  const float** slices;
  char* workspace;
  int64_t bytes;

  RowMemory(const ClientTensor* layers, int64_t count, Scratch scratch) {
    int64_t clients = 0, columns = 0;
    for (int64_t l = 0; l < count; ++l) {
      clients = std::max(clients, layers[l].clients);
      columns = std::max(columns, layers[l].slices() * 2 * layers[l].cols);
    }
    stage = scratch.take<float>((2 * clients + 2) * kMostLanes);
    products = scratch.take<float>(columns * kRowsPerBlock);
    slices = scratch.take<const float*>(clients);
    workspace = scratch.take<char>(gemm_workspace_bytes<float>());
    bytes = scratch.used();
  }
};

int64_t task_bytes(const ClientTensor* layers, int64_t count) {
  return std::max(RowMemory(layers, count, Scratch()).bytes,
                  SliceSolver(slice_kernels(), layers, count, Scratch()).bytes());
}

// Calls work(memory, i) for i in [0, items); each task makes a memory of its own from its part of
// the workspace, then takes items as it gets to them.
template <class MakeMemory, class Work>
void deal_out(const ClientTensor* layers, int64_t count, int64_t items, void* workspace,
              const Executor& executor, MakeMemory&& make_memory, Work&& work) {
  const int64_t bytes = task_bytes(layers, count);
  const int tasks = static_cast<int>(std::clamp<int64_t>(items, 1, executor.threads));
  std::atomic<int64_t> next{0};
  for_each_task(executor, tasks, [&](int task) {
    auto memory = make_memory(Scratch(static_cast<char*>(workspace) + task * bytes));
    for (int64_t i = next++; i < items; i = next++) work(memory, i);
  });
}

template <class Work>
void for_each_row_block(const ClientTensor* layers, int64_t count,
                        const std::vector<RowBlock>& blocks, void* workspace,
                        const Executor& executor, Work&& work) {
  deal_out(
      layers, count, static_cast<int64_t>(blocks.size()), workspace, executor,
      [&](Scratch scratch) { return RowMemory(layers, count, scratch); }, work);
}

template <class Work>
void for_each_slice(const ClientTensor* layers, int64_t count, void* workspace,
                    const Executor& executor, Work&& work) {
  const SliceKernels kernels = slice_kernels();
  const std::vector<SliceIndex> slices = slices_by_cost(layers, count);
  deal_out(
      layers, count, static_cast<int64_t>(slices.size()), workspace, executor,
      [&](Scratch scratch) { return SliceSolver(kernels, layers, count, scratch); },
      [&](SliceSolver& solver, int64_t i) {
        work(solver, layers[slices[i].layer], slices[i].slice);
      });
}

// Where rows [begin, end) of the shrunk slices are: memory.slices.
void multiply_slices(const ClientTensor& layer, int64_t begin, int64_t end, RowMemory& memory) {
  const int64_t stride = 2 * layer.cols, size = (end - begin) * stride;
  for (int64_t s = 0; s < layer.slices(); ++s) {
    const float* const rows = layer.plane(s) + begin * stride;
    float* const product = memory.products + s * size;
    const int64_t width = layer.width(s);
    const Outcome outcome = layer.results[s].outcome;
    if (outcome == Outcome::vanished) {
      std::memset(product, 0, size * sizeof(float));
    } else if (outcome == Outcome::multiplied) {
      gemm<float>(end - begin, width, width, {rows, stride, 1}, {layer.slice_operator(s), width, 1},
                  product, stride, false, memory.workspace);
    }
    memory.slices[s] = outcome == Outcome::replaced ? rows : product;
  }
}

}  // namespace

int64_t tsvd_workspace_bytes(const ClientTensor* layers, int64_t count, const Executor& executor) {
  return executor.threads * task_bytes(layers, count);
}

int64_t transform_clients(const ClientTensor* layers, int64_t count, void* workspace,
                          const Executor& executor) {
  auto* const kernel = DPK_FOR_ISA(active_isa(), rows_to_slices);
  const TwiddlesOfLayers twiddles(layers, count);
  const std::vector<RowBlock> blocks = row_blocks(layers, count);
  std::vector<char> finite(blocks.size());
  for_each_row_block(layers, count, blocks, workspace, executor, [&](RowMemory& memory, int64_t i) {
    const auto [l, begin, end] = blocks[i];
    finite[i] = kernel(layers[l], twiddles[l].cosines.data(), twiddles[l].sines.data(), begin, end,
                       memory.stage);
  });
  const auto bad = std::find(finite.begin(), finite.end(), 0);
  return bad == finite.end() ? -1 : blocks[bad - finite.begin()].layer;
}

void shrink_operators(const ClientTensor* layers, int64_t count, void* workspace,
                      const Executor& executor) {
  for_each_slice(
      layers, count, workspace, executor,
      [](SliceSolver& solver, const ClientTensor& layer, int64_t s) { solver.shrink(layer, s); });
}

void slice_singular_values(const ClientTensor* layers, int64_t count, void* workspace,
                           const Executor& executor) {
  for_each_slice(layers, count, workspace, executor,
                 [](SliceSolver& solver, const ClientTensor& layer, int64_t s) {
                   solver.singular_values(layer, s);
                 });
}

void transform_back(const ClientTensor* layers, int64_t count, void* workspace,
                    const Executor& executor) {
  auto* const kernel = DPK_FOR_ISA(active_isa(), rows_from_slices);
  const TwiddlesOfLayers twiddles(layers, count);
  const std::vector<RowBlock> blocks = row_blocks(layers, count);
  for_each_row_block(layers, count, blocks, workspace, executor, [&](RowMemory& memory, int64_t i) {
    const auto [l, begin, end] = blocks[i];
    multiply_slices(layers[l], begin, end, memory);
    kernel(layers[l], twiddles[l].cosines.data(), twiddles[l].sines.data(), begin, end,
           memory.slices, memory.stage);
  });
}

}  // namespace dpk
