#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "clip/clip.h"
#include "glm/glm.h"
#include "glm/gram.h"
#include "glm/records.h"
#include "glm/thin_product.h"

namespace dpk {
namespace {

struct RowBlock {
  int64_t client, begin, end;
};

// The records of all clients in blocks, so that few large clients share the threads as well as
// many small ones.
template <class T>
std::vector<RowBlock> row_blocks(const ClientRecords<T>& records) {
  std::vector<RowBlock> blocks;
  for (int64_t client = 0; client < records.clients; ++client) {
    const int64_t end = records.spans[2 * client + 1];
    for (int64_t row = records.spans[2 * client]; row < end; row += kRecordBlock) {
      blocks.push_back({client, row, std::min(end, row + kRecordBlock)});
    }
  }
  return blocks;
}

// Calls body(i, scratch) for i in [0, count), whichever thread is free; make() gives the scratch of
// a thread.
template <class Make, class Body>
void share_out(int64_t count, const Executor& executor, Make&& make, Body&& body) {
  std::atomic<int64_t> next{0};
  const int tasks = static_cast<int>(std::clamp<int64_t>(count, 1, executor.threads));
  for_each_task(executor, tasks, [&](int) {
    auto scratch = make();
    for (int64_t i = next++; i < count; i = next++) body(i, scratch);
  });
}

template <class T>
void tabulate_all(const ClientRecords<T>& records, ClipBounds bounds, const RecordTable<T>& table,
                  const Executor& executor) {
  const std::vector<RowBlock> blocks = row_blocks(records);
  const auto make = [&] { return RecordScratch<T>(records.classes, records.features); };
  share_out(static_cast<int64_t>(blocks.size()), executor, make,
            [&](int64_t i, RecordScratch<T>& scratch) {
              const RowBlock& block = blocks[i];
              tabulate_records(records, block.client, block.begin, block.end, bounds,
                               table.from(block.begin), scratch);
            });
}

template <class T>
std::vector<FiniteRows<T>> finite_rows(const ClientRecords<T>& records) {
  std::vector<FiniteRows<T>> rows;
  rows.reserve(records.clients);
  for (int64_t i = 0; i < records.clients; ++i) {
    rows.emplace_back(records, records.spans[2 * i], records.spans[2 * i + 1]);
  }
  return rows;
}

// gradient of one client = residuals [classes, ld] times x [records, features].
template <class T>
void sum_gradient(const ClientRecords<T>& records, int64_t client, const FiniteRows<T>& x,
                  const T* residuals, int64_t ld, T* gradients) {
  few_rows_product<T>(records.classes, records.features, x.count, residuals, ld, x.data,
                      x.row_stride, /*padded=*/false,
                      gradients + client * records.classes * records.features, records.features,
                      /*workspace=*/nullptr);
}

template <class T>
void sum_gradients(const ClientRecords<T>& records, const RecordTable<T>& table, T* gradients,
                   const Executor& executor) {
  const auto make = [] { return 0; };
  share_out(records.clients, executor, make, [&](int64_t i, int) {
    const int64_t begin = records.spans[2 * i];
    const FiniteRows<T> x(records, begin, records.spans[2 * i + 1]);
    sum_gradient(records, i, x, table.residuals + begin, table.ld, gradients);
  });
}

// Whether giving out whole clients keeps the threads about equally busy: the last one to finish
// works at most a quarter longer than the first, if no client has more than that of a thread's
// part.
template <class T>
bool clients_share_evenly(const ClientRecords<T>& records, const Executor& executor) {
  int64_t all = 0;
  for (int64_t i = 0; i < records.clients; ++i) {
    all += records.spans[2 * i + 1] - records.spans[2 * i];
  }
  return executor.threads == 1 || 4 * executor.threads * most_records(records) <= all;
}

// Gradients alone, one client at a time in each thread: its records are read once, and its
// residuals never leave the cache. The same numbers as those of tabulate_all and sum_gradients.
template <class T>
void sum_gradients_by_client(const ClientRecords<T>& records, const ClippedSums<T>& sums,
                             const Executor& executor) {
  struct Scratch {
    RecordScratch<T> records;
    std::unique_ptr<T[]> residuals;
  };
  const int64_t ld = padded_records(most_records(records));
  const auto make = [&] {
    return Scratch{RecordScratch<T>(records.classes, records.features),
                   std::unique_ptr<T[]>(new T[records.classes * ld])};
  };
  share_out(records.clients, executor, make, [&](int64_t client, Scratch& scratch) {
    const int64_t begin = records.spans[2 * client], end = records.spans[2 * client + 1];
    RecordTable<T> table;
    table.ld = ld;
    table.residuals = scratch.residuals.get();
    table.gradient_sq_norms = sums.gradient_sq_norms + begin;
    const ClipBounds bounds{sums.gradient_bound, sums.hessian_bound};
    const bool finite =
        tabulate_records(records, client, begin, end, bounds, table, scratch.records);
    const FiniteRows<T> x(records, begin, end, finite);
    sum_gradient(records, client, x, table.residuals, ld, sums.gradients);
  });
}

// Every block of a Hessian is symmetric, and block (b, a) equals block (a, b): a quarter is
// computed, the rest is copied.
template <class T>
void sum_hessians(const ClientRecords<T>& records, const std::vector<FiniteRows<T>>& x,
                  const RecordTable<T>& table, T* hessians, const Executor& executor) {
  const int64_t features = records.features, n = records.classes * features;
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t a = 0; a < records.classes; ++a) {
    for (int64_t b = a; b < records.classes; ++b) pairs.emplace_back(a, b);
  }
  const int64_t count = static_cast<int64_t>(pairs.size());
  const auto make = [&] { return WeightedGram<T>(features); };
  share_out(records.clients * count, executor, make, [&](int64_t i, WeightedGram<T>& gram) {
    const int64_t client = i / count, first = records.spans[2 * client];
    const auto [a, b] = pairs[i % count];
    const ClassPair<T> pair{
        table.hessian_factors + first, table.p + first, table.q + first, table.ld, a, b};
    const auto weigh = [&](int64_t begin, int64_t end, T* weights) {
      hessian_weights(pair, begin, end, weights);
    };
    T* const hessian = hessians + client * n * n;
    T* const block = hessian + a * features * n + b * features;
    gram.sum(x[client].data, x[client].row_stride, x[client].count, weigh, block, n, true);
    if (a == b) return;
    T* const twin = hessian + b * features * n + a * features;
    for (int64_t r = 0; r < features; ++r) {
      std::copy(block + r * n, block + r * n + features, twin + r * n);
    }
  });
}

}  // namespace

template <class T>
void glm_record_norms(const ClientRecords<T>& records, double* gradient_sq_norms,
                      double* hessian_sq_norms, const Executor& executor) {
  std::fill(gradient_sq_norms, gradient_sq_norms + records.rows, 0.0);
  std::fill(hessian_sq_norms, hessian_sq_norms + records.rows, 0.0);
  RecordTable<T> table;
  table.gradient_sq_norms = gradient_sq_norms;
  table.hessian_sq_norms = hessian_sq_norms;
  tabulate_all(records, {1.0, 1.0}, table, executor);
}

template <class T>
void glm_clipped_sums(const ClientRecords<T>& records, const ClippedSums<T>& sums,
                      const Executor& executor) {
  const int64_t rows = records.rows, cells = rows * records.classes;
  const bool gradient = sums.gradients != nullptr, hessian = sums.hessians != nullptr;
  if (gradient) std::fill(sums.gradient_sq_norms, sums.gradient_sq_norms + rows, 0.0);
  if (hessian) std::fill(sums.hessian_sq_norms, sums.hessian_sq_norms + rows, 0.0);
  const auto memory = [](int64_t count) { return std::unique_ptr<T[]>(new T[count]); };
  if (gradient && !hessian && clients_share_evenly(records, executor)) {
    sum_gradients_by_client(records, sums, executor);
    return;
  }
  const auto p = memory(hessian ? cells : 0), q = memory(hessian ? cells : 0);
  const auto residuals = memory(gradient ? cells : 0), factors = memory(hessian ? rows : 0);
  const RecordTable<T> table{rows,
                             hessian ? p.get() : nullptr,
                             hessian ? q.get() : nullptr,
                             gradient ? residuals.get() : nullptr,
                             hessian ? factors.get() : nullptr,
                             gradient ? sums.gradient_sq_norms : nullptr,
                             hessian ? sums.hessian_sq_norms : nullptr};
  tabulate_all(records, {sums.gradient_bound, sums.hessian_bound}, table, executor);
  if (gradient) sum_gradients(records, table, sums.gradients, executor);
  if (hessian) sum_hessians(records, finite_rows(records), table, sums.hessians, executor);
}

template <class T>
void glm_feature_covariance(const ClientRecords<T>& records, double bound, T* covariances,
                            double* sq_norms, const Executor& executor) {
  std::fill(sq_norms, sq_norms + records.rows, 0.0);
  const int64_t features = records.features;
  const auto make = [&] { return WeightedGram<T>(features); };
  share_out(records.clients, executor, make, [&](int64_t client, WeightedGram<T>& gram) {
    const int64_t first = records.spans[2 * client];
    const FiniteRows<T> x(records, first, records.spans[2 * client + 1]);
    row_squares(records.x + first * records.row_stride, records.row_stride, x.count, features,
                sq_norms + first);
    for (int64_t i = first; i < first + x.count; ++i) sq_norms[i] *= sq_norms[i];
    const auto weigh = [&](int64_t begin, int64_t end, T* weights) {
      for (int64_t i = begin; i < end; ++i) {
        weights[i - begin] = clip_factor_of<T>(sq_norms[first + i], bound);
      }
    };
    gram.sum(x.data, x.row_stride, x.count, weigh, covariances + client * features * features,
             features, true);
  });
}

#define DPK_INSTANTIATE(T)                                                                       \
  template void glm_record_norms<T>(const ClientRecords<T>&, double*, double*, const Executor&); \
  template void glm_clipped_sums<T>(const ClientRecords<T>&, const ClippedSums<T>&,              \
                                    const Executor&);                                            \
  template void glm_feature_covariance<T>(const ClientRecords<T>&, double, T*, double*,          \
                                          const Executor&);
DPK_INSTANTIATE(float)
DPK_INSTANTIATE(double)
#undef DPK_INSTANTIATE

}  // namespace dpk
