#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/gemm.h"
#include "ghost/linear.h"
#define DPK_KERNELS "ghost/linear_rows.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Rows that are scaled at a time: no more than the product packs at a time (320), so that it passes
// over the sums once for each.
constexpr int64_t kRowBlock = 256;
// Parts of the columns are multiples of this, so that tiles and cache lines are not cut.
constexpr int64_t kAlignment = 16;
// About 25 us of work for one thread at 80 GFLOP/s; not tuned.
constexpr double kFlopsPerTask = 2e6;
// Rows of a gradient in double that are formed at a time; not tuned, samples with one are rare.
constexpr int64_t kWideRows = 84;

int useful_tasks(double flops, int64_t extent, const Executor& executor) {
  const double most = double(std::min<int64_t>(executor.threads, extent / kAlignment));
  return static_cast<int>(std::clamp(flops / kFlopsPerTask, 1.0, std::max(1.0, most)));
}

// Where part `task` of `extent` columns begins.
int64_t part_begin(int64_t extent, int64_t task, int64_t tasks) {
  if (task == tasks) return extent;
  return extent * task / tasks / kAlignment * kAlignment;
}

// The function that copies a row of E as T, times a weight.
template <class E, class T>
auto row_scaler() {
  if constexpr (std::is_same_v<T, double>) return DPK_FOR_ISA(active_isa(), scale_to_double<E>);
  if constexpr (std::is_same_v<T, float>) return DPK_FOR_ISA(active_isa(), scale_to_float<E>);
}

// The weighted sum of a batch with elements of E, in T: a product of the scaled errors, transposed,
// and the activations.
template <class E>
class SumPass {
 public:
  using T = typename SumOf<E>::type;

  SumPass(const LinearBatch& batch, const void* factors, const bool* apart, bool homogeneous,
          void* out, void* bias_out, bool accumulate)
      : batch_(batch),
        factors_(static_cast<const T*>(factors)),
        apart_(apart),
        homogeneous_(homogeneous),
        inputs_(batch.activations.width - (homogeneous ? 1 : 0)),
        outputs_(batch.errors.width),
        out_(static_cast<T*>(out)),
        bias_out_(static_cast<T*>(bias_out)),
        accumulate_(accumulate) {}

  void run(const Executor& executor) const {
    const double flops =
        2.0 * double(batch_.batch * batch_.positions) * double(inputs_) * double(outputs_);
    // The longer side is cut: the operand of the other one is then packed by every task.
    const bool cut_outputs = outputs_ >= inputs_;
    const int64_t extent = cut_outputs ? outputs_ : inputs_;
    const int tasks = useful_tasks(flops, extent, executor);
    for_each_task(executor, tasks, [&](int task) {
      const int64_t begin = part_begin(extent, task, tasks),
                    end = part_begin(extent, task + 1, tasks);
      if (cut_outputs) {
        part(begin, end, 0, inputs_);
      } else {
        part(0, outputs_, begin, end);
      }
    });
  }

 private:
  // Up to kRowBlock rows whose factors are not zero.
  struct Rows {
    int64_t index[kRowBlock];
    int64_t count = 0;
    bool neighbours() const { return count == 0 || index[count - 1] - index[0] == count - 1; }
  };

  bool in_product(int64_t b) const { return factors_[b] != 0 && (apart_ == nullptr || !apart_[b]); }

  // Takes the next rows from row `next` on, and moves it behind them.
  Rows take(int64_t& next) const {
    Rows rows;
    for (; next < batch_.batch * batch_.positions && rows.count < kRowBlock; ++next) {
      if (in_product(next / batch_.positions)) rows.index[rows.count++] = next;
    }
    return rows;
  }

  // Rows [o, o_end) and columns [i, i_end) of the sum.
  void part(int64_t o, int64_t o_end, int64_t i, int64_t i_end) const {
    const int64_t rows_here = std::min(kRowBlock, batch_.batch * batch_.positions);
    const std::unique_ptr<T[]> scaled(new T[rows_here * (o_end - o)]);
    std::vector<T> copied;
    // Sums, and behind them what they round off.
    std::vector<double> bias(bias_out_ != nullptr && i == 0 ? 2 * (o_end - o) : 0, 0.0);
    bool add = accumulate_;
    int64_t next = 0;
    do {
      const Rows rows = take(next);
      scale(rows, o, o_end, scaled.get(), bias);
      gemm<T>(o_end - o, i_end - i, rows.count, {scaled.get(), 1, o_end - o},
              activations(rows, i, i_end, copied), out_ + o * inputs_ + i, inputs_, add);
      add = true;
    } while (next < batch_.batch * batch_.positions);
    for (int64_t b = 0; apart_ != nullptr && b < batch_.batch; ++b) {
      if (apart_[b] && factors_[b] != 0) add_apart(b, o, o_end, i, i_end, bias);
    }
    const int64_t half = static_cast<int64_t>(bias.size()) / 2;
    for (int64_t j = 0; j < half; ++j) {
      const double total = bias[j] + bias[half + j];
      bias_out_[o + j] = static_cast<T>(accumulate_ ? bias_out_[o + j] + total : total);
    }
  }

  // scaled [rows, o_end - o] = factor * error, and what that adds to the bias: in double, so that
  // nothing of it rounds before it cancels.
  void scale(const Rows& rows, int64_t o, int64_t o_end, T* scaled,
             std::vector<double>& bias) const {
    const auto scale_row = row_scaler<E, T>();
    for (int64_t r = 0; r < rows.count; ++r, scaled += o_end - o) {
      const int64_t row = rows.index[r];
      scale_row(scaled, errors_of(row) + o, factors_[row / batch_.positions], o_end - o);
      add_to_bias(row, o, o_end, bias);
    }
  }

  const E* errors_of(int64_t row) const {
    return static_cast<const E*>(batch_.errors.data) + row * batch_.errors.row_stride;
  }

  void add_to_bias(int64_t row, int64_t o, int64_t o_end, std::vector<double>& bias) const {
    if (bias.empty()) return;
    const auto add_row = DPK_FOR_ISA(active_isa(), add_row_compensated<E>);
    const double factor = factors_[row / batch_.positions];
    add_row(bias.data(), bias.data() + o_end - o, errors_of(row) + o, factor * bias_weight(row),
            o_end - o);
  }

  // Adds what sample b adds to a part of the sum, formed in double, and rounded once.
  void add_apart(int64_t b, int64_t o, int64_t o_end, int64_t i, int64_t i_end,
                 std::vector<double>& bias) const {
    const auto widen = row_scaler<E, double>();
    const int64_t positions = batch_.positions, first = b * positions, columns = i_end - i;
    const E* const activations = static_cast<const E*>(batch_.activations.data) + i;
    std::vector<double> a(positions * columns), d(positions * kWideRows), sum(kWideRows * columns);
    for (int64_t t = 0; t < positions; ++t) {
      widen(a.data() + t * columns, activations + (first + t) * batch_.activations.row_stride, 1.0,
            columns);
      add_to_bias(first + t, o, o_end, bias);
    }
    for (int64_t row = o; row < o_end; row += kWideRows) {
      const int64_t rows = std::min(kWideRows, o_end - row);
      for (int64_t t = 0; t < positions; ++t) {
        widen(d.data() + t * rows, errors_of(first + t) + row, factors_[b], rows);
      }
      gemm<double>(rows, columns, positions, {d.data(), 1, rows}, {a.data(), columns, 1},
                   sum.data(), columns, false);
      for (int64_t r = 0; r < rows; ++r) {
        T* const to = out_ + (row + r) * inputs_ + i;
        const double* const from = sum.data() + r * columns;
        for (int64_t j = 0; j < columns; ++j) to[j] += static_cast<T>(from[j]);
      }
    }
  }

  double bias_weight(int64_t row) const {
    if (!homogeneous_) return 1.0;
    const E* const data = static_cast<const E*>(batch_.activations.data);
    double weight;
    row_scaler<E, double>()(&weight, data + row * batch_.activations.row_stride + inputs_, 1.0, 1);
    return weight;
  }

  // Columns [i, i_end) of the activations, in place where they can be.
  MatrixView<T> activations(const Rows& rows, int64_t i, int64_t i_end,
                            std::vector<T>& copied) const {
    const E* const from = static_cast<const E*>(batch_.activations.data) + i;
    const int64_t stride = batch_.activations.row_stride;
    if constexpr (std::is_same_v<E, T>) {
      if (rows.count == 0) return {from, stride, 1};
      if (rows.neighbours()) return {from + rows.index[0] * stride, stride, 1};
    }
    const auto copy_row = row_scaler<E, T>();
    copied.resize(rows.count * (i_end - i));
    for (int64_t r = 0; r < rows.count; ++r) {
      copy_row(copied.data() + r * (i_end - i), from + rows.index[r] * stride, T(1), i_end - i);
    }
    return {copied.data(), i_end - i, 1};
  }

  const LinearBatch& batch_;
  const T* factors_;
  const bool* apart_;
  const bool homogeneous_;
  const int64_t inputs_, outputs_;
  T* out_;
  T* bias_out_;
  const bool accumulate_;
};

}  // namespace

void linear_weighted_sum(const LinearBatch& batch, const void* factors, const bool* apart,
                         bool homogeneous, void* out, void* bias_out, bool accumulate,
                         const Executor& executor) {
  const auto run = [&](auto element) {
    SumPass<decltype(element)>(batch, factors, apart, homogeneous, out, bias_out, accumulate)
        .run(executor);
  };
  switch (batch.dtype) {
    case Dtype::bf16:
      return run(BFloat16{});
    case Dtype::f16:
      return run(Float16{});
    case Dtype::f64:
      return run(double{});
    default:
      return run(float{});
  }
}

}  // namespace dpk
