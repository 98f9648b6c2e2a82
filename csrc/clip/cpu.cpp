#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "clip/clip.h"
#include "clip/columns.h"
#include "clip/row_adder.h"
#define DPK_KERNELS "clip/kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Where a second thread begins to pay. Measured: 32,768 elements take 13.7 us on one thread
// and 14.7 on two, 65,536 take 20.4 and 19.8, 131,072 take 33.6 and 30.6.
constexpr int64_t kElementsPerTask = 32768;
// A block of sums that stays in the second-level cache while rows are added to it: 128 KiB. Smaller
// blocks cut the rows into pieces that are over before the prefetchers have caught up.
constexpr int64_t kBlockColumns = 32768;
// Rows whose sums fit in this much are dealt out to the threads, each with sums of its own in its
// second-level cache; longer rows are cut, so that all threads share one set of sums. Measured on
// 20 million elements: sums of 39 / 78 / 156 / 234 / 390 KiB take 3.6 / 3.7 / 4.2 / 4.2 / 4.4 ms
// dealt out and 4.2 / 4.0 / 4.2 / 3.7 / 3.8 ms cut.
constexpr int64_t kPrivateSumBytes = 128 << 10;
// What a group of rows may take of a thread's second-level cache (rows dealt out) or of the shared
// last-level cache (rows cut), where it waits for its factors while the next group comes in.
// Measured with 512 KiB and 32 MiB: 1024 x 20,000 reads at 84% / 94% / 92% of the memory's rate
// with 80 / 160 / 320 KiB; 64 x 1,000,000 at 66% / 69% / 74% / 66% with 2 / 4 / 8 / 16 MiB.
constexpr int64_t kGroupBytesPrivate = 160 << 10;
constexpr int64_t kGroupBytesShared = 8 << 20;

template <class T>
Kernels kernels_of() {
  const Isa isa = active_isa();
  return {DPK_FOR_ISA(isa, sq_norm<T>), DPK_FOR_ISA(isa, add_rows<T>), sizeof(T),
          sizeof(typename SumOf<T>::type)};
}

Kernels kernels_for(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16:
      return kernels_of<BFloat16>();
    case Dtype::f16:
      return kernels_of<Float16>();
    case Dtype::f64:
      return kernels_of<double>();
    default:
      return kernels_of<float>();
  }
}

int useful_tasks(int64_t elements, const Executor& executor) {
  return static_cast<int>(std::clamp<int64_t>(elements / kElementsPerTask, 1, executor.threads));
}

void store_factors(const ClipRule& rule, const double* sq_norms, int64_t batch, int64_t row,
                   int64_t count, bool wide, void* factors) {
  for (int64_t b = row; b < row + count; ++b) {
    bool valid = true;
    for (int64_t s = 0; s < rule.bound_count; ++s) {
      const double sq_norm = sq_norms[s * batch + b];
      valid = valid && std::isfinite(sq_norm) && sq_norm >= 0.0;
    }
    for (int64_t s = 0; s < rule.bound_count; ++s) {
      const int64_t at = s * batch + b;
      const double factor =
          valid ? clip_factor(sq_norms[at], rule.bounds[s], rule.normalise, rule.gamma) : 0.0;
      if (wide) {
        static_cast<double*>(factors)[at] = std::min(factor, std::numeric_limits<double>::max());
      } else {
        static_cast<float*>(factors)[at] = round_factor_down(factor);
      }
    }
  }
}

// out (+)= the sums of all tasks, each `columns` long, one after the other in `partial`.
template <class Sum>
void reduce_typed(const Rows& rows, const Sum* partial, int64_t columns, int parts, bool accumulate,
                  const Executor& executor) {
  const int tasks = useful_tasks(columns * parts, executor);
  for_each_task(executor, tasks, [&](int task) {
    const auto reduce = [&](int64_t l, int64_t begin, int64_t end, int64_t first) {
      Sum* out = static_cast<Sum*>(rows.tensors[l].out);
      for (int64_t j = begin; j < end; ++j) {
        Sum total = accumulate ? out[j] : Sum(0);
        for (int p = 0; p < parts; ++p) total += partial[p * columns + first + j];
        out[j] = total;
      }
    };
    for_each_piece(rows, columns_of_task(columns, task, tasks), reduce);
  });
}

void reduce_sums(const Rows& rows, const void* partial, int64_t columns, int parts, bool accumulate,
                 const Executor& executor) {
  if (rows.dtype == Dtype::f64) {
    reduce_typed(rows, static_cast<const double*>(partial), columns, parts, accumulate, executor);
  } else {
    reduce_typed(rows, static_cast<const float*>(partial), columns, parts, accumulate, executor);
  }
}

// How a sum over rows is shared out: whole rows to each task, with sums of its own that are added
// up in the end, or a part of the columns of every row to each task.
struct SumPlan {
  int tasks;
  bool rows_dealt_out;
  int64_t workspace_bytes;
};

SumPlan plan_sum(const Rows& rows, bool with_norms, const Executor& executor) {
  const int64_t columns = total_columns(rows);
  const int64_t sum_bytes = columns * (rows.dtype == Dtype::f64 ? 8 : 4);
  const int tasks = useful_tasks(rows.batch * columns, executor);
  // Given factors, cut rows need no meeting of the threads: pieces of 16 cache lines are enough.
  const bool rows_dealt_out = with_norms ? sum_bytes <= kPrivateSumBytes || rows.batch == 0
                                         : columns < tasks * 16 * kColumnAlignment;
  return {tasks, rows_dealt_out, rows_dealt_out ? tasks * sum_bytes : 0};
}

// 4, 2 or 1 rows, as fit in `bytes`.
int64_t group_rows(const Rows& rows, int64_t row_bytes, int64_t bytes) {
  int64_t group = kMaxGroup;
  while (group > 1 && (group * row_bytes > bytes || group > rows.batch)) group /= 2;
  return group;
}

// Everything that the two ways of sharing out clip_and_sum have in common.
struct ClipPass {
  const Rows& rows;
  const ClipRule& rule;
  double* sq_norms;
  void* factors;
  RowAdder adder;
  int64_t columns;

  ClipPass(const Rows& rows, const ClipRule& rule, double* sq_norms, void* factors)
      : rows(rows),
        rule(rule),
        sq_norms(sq_norms),
        factors(factors),
        adder(rows, kernels_for(rows.dtype), factors, rule.bound_count),
        columns(total_columns(rows)) {}

  int64_t row_bytes() const { return columns * adder.kernels.element_bytes; }

  // Where the norms of tensor l go, among `group` norms for each bound.
  int64_t slot(int64_t l, int64_t group) const { return rule.bound_count > 1 ? l * group : 0; }

  // Writes norms and factors of a group from the parts that `parts` tasks have measured.
  void finish(Group group, const double* measured, int64_t parts, int64_t group_size) const {
    const int64_t slots = rule.bound_count;
    for (int64_t s = 0; s < slots; ++s) {
      for (int64_t i = 0; i < group.count; ++i) {
        double total = 0.0;
        for (int64_t p = 0; p < parts; ++p) total += measured[(p * slots + s) * group_size + i];
        sq_norms[s * rows.batch + group.row + i] = total;
      }
    }
    store_factors(rule, sq_norms, rows.batch, group.row, group.count, rows.dtype == Dtype::f64,
                  factors);
  }
};

// Each task takes whole rows, a group at a time: it adds up one group while it measures the next.
void clip_rows_dealt_out(const ClipPass& pass, bool accumulate, char* workspace, int tasks,
                         const Executor& executor) {
  const Rows& rows = pass.rows;
  const int64_t size = group_rows(rows, pass.row_bytes(), kGroupBytesPrivate);
  const int64_t sum_bytes = pass.adder.kernels.sum_bytes;
  for_each_task(executor, tasks, [&](int task) {
    char* const sums = workspace + task * pass.columns * sum_bytes;
    const int64_t begin = rows.batch * task / tasks, end = rows.batch * (task + 1) / tasks;
    if (begin == end) std::memset(sums, 0, pass.columns * sum_bytes);
    std::vector<double> measured(pass.rule.bound_count * size);
    Group now{begin, 0};
    for (Group next{begin, std::min(size, end - begin)}; now.count + next.count > 0;) {
      std::fill(measured.begin(), measured.end(), 0.0);
      char* sum = sums;
      for (int64_t l = 0; l < rows.count; ++l) {
        pass.adder.add_and_measure(sum, l, 0, rows.tensors[l].cols, now, now.row == begin, next,
                                   measured.data() + pass.slot(l, size));
        sum += rows.tensors[l].cols * sum_bytes;
      }
      pass.finish(next, measured.data(), 1, size);
      now = next;
      next = {now.row + now.count, std::min(size, end - now.row - now.count)};
    }
  });
  reduce_sums(rows, workspace, pass.columns, tasks, accumulate, executor);
}

// Each task takes a part of the columns of every row. The threads meet once for each group of rows,
// to put the norm of a row together.
void clip_rows_cut(const ClipPass& pass, bool accumulate, int tasks, const Executor& executor) {
  const Rows& rows = pass.rows;
  const int64_t size = group_rows(rows, pass.row_bytes(), kGroupBytesShared);
  const int64_t measured_size = pass.rule.bound_count * size;
  std::vector<double> measured(tasks * measured_size);
  bool backwards = false;
  Group now{0, 0};
  for (Group next{0, std::min(size, rows.batch)}; now.count + next.count > 0;) {
    for_each_task(executor, tasks, [&](int task) {
      double* const norms = measured.data() + task * measured_size;
      std::fill(norms, norms + measured_size, 0.0);
      for_each_piece(rows, columns_of_task(pass.columns, task, tasks),
                     [&](int64_t l, int64_t begin, int64_t end, int64_t) {
                       const int64_t blocks = (end - begin + kBlockColumns - 1) / kBlockColumns;
                       for (int64_t k = 0; k < blocks; ++k) {
                         // Every other time backwards: of rows longer than the cache, what was read
                         // last is there.
                         const int64_t from =
                             begin + (backwards ? blocks - 1 - k : k) * kBlockColumns;
                         pass.adder.add_and_measure(static_cast<char*>(rows.tensors[l].out), l,
                                                    from, std::min(end, from + kBlockColumns), now,
                                                    !accumulate && now.row == 0, next,
                                                    norms + pass.slot(l, size));
                       }
                     });
    });
    pass.finish(next, measured.data(), tasks, size);
    backwards = !backwards;
    now = next;
    next = {now.row + now.count, std::min(size, rows.batch - now.row - now.count)};
  }
}

// Adds rows block by block of columns, so that the sums stay in the second-level cache.
void add_in_blocks(const RowAdder& adder, char* sum, int64_t l, int64_t begin, int64_t end,
                   Group group, bool overwrite) {
  for (int64_t from = begin; from < end; from += kBlockColumns) {
    adder.add(sum, l, from, std::min(end, from + kBlockColumns), group, overwrite);
  }
}

}  // namespace

int64_t sum_workspace_bytes(const Rows& rows, bool with_norms, const Executor& executor) {
  return plan_sum(rows, with_norms, executor).workspace_bytes;
}

void clip_and_sum(const Rows& rows, const ClipRule& rule, bool accumulate, double* sq_norms,
                  void* factors, void* workspace, const Executor& executor) {
  const SumPlan plan = plan_sum(rows, true, executor);
  const ClipPass pass(rows, rule, sq_norms, factors);
  if (plan.rows_dealt_out) {
    clip_rows_dealt_out(pass, accumulate, static_cast<char*>(workspace), plan.tasks, executor);
  } else {
    clip_rows_cut(pass, accumulate, plan.tasks, executor);
  }
}

void weighted_row_sum(const Rows& rows, const void* factors, int64_t factor_rows, bool accumulate,
                      void* workspace, const Executor& executor) {
  const SumPlan plan = plan_sum(rows, false, executor);
  const RowAdder adder(rows, kernels_for(rows.dtype), factors, factor_rows);
  const int64_t columns = total_columns(rows), sum_bytes = adder.kernels.sum_bytes;
  if (!plan.rows_dealt_out) {
    for_each_task(executor, plan.tasks, [&](int task) {
      for_each_piece(rows, columns_of_task(columns, task, plan.tasks),
                     [&](int64_t l, int64_t begin, int64_t end, int64_t) {
                       add_in_blocks(adder, static_cast<char*>(rows.tensors[l].out), l, begin, end,
                                     {0, rows.batch}, !accumulate);
                     });
    });
    return;
  }
  for_each_task(executor, plan.tasks, [&](int task) {
    char* sum = static_cast<char*>(workspace) + task * columns * sum_bytes;
    const int64_t begin = rows.batch * task / plan.tasks;
    const Group group{begin, rows.batch * (task + 1) / plan.tasks - begin};
    for (int64_t l = 0; l < rows.count; ++l) {
      add_in_blocks(adder, sum, l, 0, rows.tensors[l].cols, group, true);
      sum += rows.tensors[l].cols * sum_bytes;
    }
  });
  reduce_sums(rows, workspace, columns, plan.tasks, accumulate, executor);
}

void row_sq_norms(const Rows& rows, bool per_tensor, double* sq_norms, const Executor& executor) {
  const Kernels kernels = kernels_for(rows.dtype);
  const int64_t columns = total_columns(rows), slots = per_tensor ? rows.count : 1;
  const int tasks = useful_tasks(rows.batch * columns, executor);
  // Few rows are cut into one piece for each task, many are dealt out whole: with four rows or more
  // for each, a task that has one more than another is at most a quarter behind.
  const int64_t pieces = rows.batch < 4 * tasks ? tasks : 1;
  std::vector<double> partial(pieces > 1 ? pieces * slots * rows.batch : 0);
  double* target = pieces > 1 ? partial.data() : sq_norms;
  for_each_task(executor, tasks, [&](int task) {
    // The task's share: all rows of its piece, or all pieces (one) of its rows.
    const int piece = pieces > 1 ? task : 0;
    const int64_t begin = pieces > 1 ? 0 : rows.batch * task / tasks;
    const int64_t end = pieces > 1 ? rows.batch : rows.batch * (task + 1) / tasks;
    const ColumnSpan span = columns_of_task(columns, piece, static_cast<int>(pieces));
    double* norms = target + piece * slots * rows.batch;
    for (int64_t s = 0; s < slots; ++s) {
      std::fill(norms + s * rows.batch + begin, norms + s * rows.batch + end, 0.0);
    }
    for_each_piece(rows, span, [&](int64_t l, int64_t from, int64_t to, int64_t) {
      for (int64_t b = begin; b < end; ++b) {
        norms[(per_tensor ? l : 0) * rows.batch + b] += kernels.sq_norm(
            row_address(rows.tensors[l], b, from, kernels.element_bytes), to - from);
      }
    });
  });
  if (pieces == 1) return;
  for (int64_t i = 0; i < slots * rows.batch; ++i) {
    sq_norms[i] = 0.0;
    for (int64_t p = 0; p < pieces; ++p) sq_norms[i] += partial[p * slots * rows.batch + i];
  }
}

void clip_factors(const double* sq_norms, int64_t batch, const ClipRule& rule, bool wide,
                  void* factors) {
  store_factors(rule, sq_norms, batch, 0, batch, wide, factors);
}

void layer_factors(const double* const* sq_norms, int64_t layers, int64_t batch, double scale,
                   const ClipRule& rule, bool wide, void* factors) {
  for (int64_t b = 0; b < batch; ++b) {
    double total = 0.0;
    for (int64_t l = 0; l < layers; ++l) total += sq_norms[l][b];
    total *= scale * scale;
    const bool valid = std::isfinite(total) && total >= 0.0;
    const double factor =
        valid ? scale * clip_factor(total, rule.bounds[0], rule.normalise, rule.gamma) : 0.0;
    if (wide) {
      static_cast<double*>(factors)[b] = std::min(factor, std::numeric_limits<double>::max());
    } else {
      static_cast<float*>(factors)[b] = round_factor_down(factor);
    }
  }
}

}  // namespace dpk
