#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/gemm.h"
#include "ghost/linear.h"
#include "ghost/rounding.h"
#define DPK_KERNELS "ghost/linear_norms.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Blocks that stay in a second-level cache of 512 KiB: kDepth x kGramCols packed elements and two
// tiles of sums. Rows are a multiple of every tile's (6 and 14). Measured on one core, GFLOP/s of
// Gram products for 256 positions of 768 + 768 and for 64 of 256 + 256: 67 and 47 as they are; 256
// deep, 65 and 42, with 128 columns 66 and 37, with 84 rows 66 and 44.
constexpr int64_t kDepth = 128;
constexpr int64_t kGramRows = 168;
constexpr int64_t kGramCols = 64;
// The same of gradients, for 1,024 positions of 256 + 256, 128 of 512 + 512 and 64 of 64 + 64: 68,
// 66 and 52 as they are; 42 rows 63, 63 and 50; 168 rows 64, 66 and 47; 64 columns 60, 61 and 55;
// 256 columns 70, 61 and 42.
constexpr int64_t kGradientRows = 84;
constexpr int64_t kGradientCols = 128;
// 30 us of work at those rates; starting a second thread takes about 3 (noise/cpu.cpp: 25.3 us
// became 15.6).
constexpr double kFlopsPerTask = 2e6;

// A sum that keeps what every addition rounds off (Neumaier 1974): there are as many terms as rows
// of a gradient, and the norms of double inputs are to be right to the last bits.
class Sum {
 public:
  void add(double x) {
    const double total = total_ + x;
    lost_ += std::abs(total_) >= std::abs(x) ? (total_ - total) + x : (x - total) + total_;
    total_ = total;
  }
  double value() const { return total_ + lost_; }

 private:
  double total_ = 0.0, lost_ = 0.0;
};

// The positions of one sample.
template <class T>
struct Sample {
  const T* a;
  int64_t a_stride;
  int64_t inputs;
  const T* d;
  int64_t d_stride;
  int64_t outputs;
  int64_t positions;
};

// The inner loops for elements of T on the instruction set in use.
template <class T>
struct NormKernels {
  const Isa isa = active_isa();
  decltype(&portable::add_dots<T>) add_dots = DPK_FOR_ISA(isa, add_dots<T>);
  decltype(&portable::add_products<T>) add_products = DPK_FOR_ISA(isa, add_products<T>);
  decltype(&portable::pack_columns<T>) pack_columns = DPK_FOR_ISA(isa, pack_columns<T>);
  decltype(&portable::pack_rows<T>) pack_rows = DPK_FOR_ISA(isa, pack_rows<T>);
  decltype(&portable::add_gram_row) add_gram_row = DPK_FOR_ISA(isa, add_gram_row);
  double (*sq_norm)(const double*, int64_t) = DPK_FOR_ISA(isa, sq_norm<double>);
};

// What is known of all samples before any product: |a_t|, |d_t| and |sum over t of d_t|^2.
struct Lengths {
  std::vector<double> a, d, bias;
  Lengths(int64_t batch, int64_t positions)
      : a(batch * positions), d(batch * positions), bias(batch) {}
};

// The function that copies a row of E as T, times a weight.
template <class E, class T>
auto row_scaler() {
  if constexpr (std::is_same_v<T, double>) return DPK_FOR_ISA(active_isa(), scale_to_double<E>);
  if constexpr (std::is_same_v<T, float>) return DPK_FOR_ISA(active_isa(), scale_to_float<E>);
}

template <class T>
T* uninitialised(std::unique_ptr<T[]>& owner, int64_t size) {
  if (!owner) owner.reset(new T[size]);
  return owner.get();
}

// The memory of one task; allocated when it is first used.
template <class T>
struct Scratch {
  std::unique_ptr<T[]> packed_rows, packed_cols;
  std::unique_ptr<double[]> tile, other_tile;
  std::vector<T> copy;
};

// Sums the products of block [first, last) of columns with all rows up to it, of both Gram
// matrices, and how far their errors reach. Rows below the diagonal count through those above; the
// diagonal is known from the lengths, in double.
template <class T>
class GramBlock {
 public:
  GramBlock(const Sample<T>& sample, const double* a_lengths, const double* d_lengths,
            Scratch<T>& scratch)
      : sample_(sample),
        a_lengths_(a_lengths),
        d_lengths_(d_lengths),
        packed_(uninitialised(scratch.packed_cols, kDepth * kGradientCols)),
        aa_(uninitialised(scratch.tile, kGramRows * kGradientCols)),
        dd_(uninitialised(scratch.other_tile, kGramRows * kGramCols)) {}

  void add(int64_t first, int64_t last, Sum* products, double* reach) const {
    for (int64_t row = 0; row < last; row += kGramRows) {
      const int64_t rows = std::min(kGramRows, last - row);
      add_dots(sample_.a, sample_.a_stride, sample_.inputs, row, rows, first, last - first, aa_);
      add_dots(sample_.d, sample_.d_stride, sample_.outputs, row, rows, first, last - first, dd_);
      for (int64_t s = row; s < row + rows; ++s) add_row(s, row, first, last, products, reach);
    }
  }

 private:
  void add_dots(const T* x, int64_t stride, int64_t width, int64_t row, int64_t rows, int64_t first,
                int64_t columns, double* tile) const {
    std::fill(tile, tile + kGramRows * kGramCols, 0.0);
    for (int64_t p = 0; p < width; p += kDepth) {
      const int64_t depth = std::min(kDepth, width - p);
      kernels_.pack_columns(columns, depth, x + first * stride + p, stride, 1, packed_);
      kernels_.add_dots(x + row * stride + p, stride, rows, packed_, columns, depth, first - row,
                        tile, kGramCols);
    }
  }

  void add_row(int64_t s, int64_t row, int64_t first, int64_t last, Sum* products,
               double* reach) const {
    const double a = a_lengths_[s], d = d_lengths_[s];
    const int64_t begin = std::max(first, s + 1), at = (s - row) * kGramCols + begin - first;
    double above = 0.0, above_reach = 0.0;
    if (begin < last) {
      kernels_.add_gram_row(aa_ + at, dd_ + at, a_lengths_ + begin, d_lengths_ + begin,
                            last - begin, a, d, &above, &above_reach);
    }
    products->add(2 * above + (s >= first ? a * a * d * d : 0.0));
    *reach += 2 * above_reach;
  }

  const NormKernels<T> kernels_;
  const Sample<T>& sample_;
  const double* a_lengths_;
  const double* d_lengths_;
  T* packed_;
  double* aa_;
  double* dd_;
};

// The sum of squares of rows [first, last) of the gradient.
template <class T>
double gradient_sq_norm(const Sample<T>& sample, int64_t first, int64_t last, Scratch<T>& scratch) {
  const NormKernels<T> kernels;
  T* const packed_d = uninitialised(scratch.packed_rows, kDepth * kGradientRows);
  T* const packed_a = uninitialised(scratch.packed_cols, kDepth * kGradientCols);
  double* const tile = uninitialised(scratch.tile, kGramRows * kGradientCols);
  Sum total;
  for (int64_t o = first; o < last; o += kGradientRows) {
    const int64_t rows = std::min(kGradientRows, last - o);
    for (int64_t i = 0; i < sample.inputs; i += kGradientCols) {
      const int64_t cols = std::min(kGradientCols, sample.inputs - i);
      std::fill(tile, tile + kGradientRows * kGradientCols, 0.0);
      for (int64_t t = 0; t < sample.positions; t += kDepth) {
        const int64_t depth = std::min(kDepth, sample.positions - t);
        kernels.pack_rows(rows, depth, sample.d + t * sample.d_stride + o, sample.d_stride,
                          packed_d);
        kernels.pack_columns(cols, depth, sample.a + t * sample.a_stride + i, 1, sample.a_stride,
                             packed_a);
        kernels.add_products(packed_d, rows, packed_a, cols, depth, tile, kGradientCols);
      }
      for (int64_t r = 0; r < rows; ++r) total.add(kernels.sq_norm(tile + r * kGradientCols, cols));
    }
  }
  return total.value();
}

// The squared norms of a batch with elements of E, computed in T.
template <class E>
class NormPass {
 public:
  using T = typename SumOf<E>::type;

  NormPass(const LinearBatch& batch, bool bias, LinearFormula formula, const Executor& executor)
      : batch_(batch),
        bias_(bias),
        gram_(formula == LinearFormula::gram),
        lengths_(batch.batch, batch.positions),
        executor_(executor) {
    const double i = double(batch.activations.width), o = double(batch.errors.width);
    const double t = double(batch.positions);
    const double flops = double(batch.batch) * (gram_ ? t * t * (i + o) : 2 * t * i * o);
    tasks_ = static_cast<int>(std::clamp(flops / kFlopsPerTask, 1.0, double(executor.threads)));
    // Whole samples are dealt out where there are enough of them, else blocks of samples.
    const int64_t extent = gram_ ? batch.positions : batch.errors.width;
    block_ = gram_ ? kGramCols : kGradientRows;
    splits_ = batch.batch >= 2 * tasks_ ? 1 : std::max<int64_t>(1, (extent + block_ - 1) / block_);
    if (splits_ == 1) block_ = std::max<int64_t>(1, extent);
  }

  void run(double* sq_norms, bool* apart) {
    measure();
    std::vector<double> sums(2 * batch_.batch * splits_, 0.0);
    std::atomic<int64_t> next{0};
    for_each_task(executor_, tasks_, [&](int) {
      Scratch<T> scratch;
      for (int64_t item; (item = next++) < batch_.batch * splits_;) {
        // The last block of a Gram matrix is the largest: it goes first.
        const int64_t b = item / splits_, split = splits_ - 1 - item % splits_;
        if (finite(b)) add_block(b, split * block_, scratch, &sums[2 * (b * splits_ + split)]);
      }
    });
    next = 0;
    for_each_task(executor_, tasks_, [&](int) {
      for (int64_t b; (b = next++) < batch_.batch;) {
        sq_norms[b] = settle(b, sums, &apart[b]);
      }
    });
  }

 private:
  // Over the positions of one sample: sums of |a_t|, of |d_t| and of |a_t| |d_t|.
  struct Totals {
    double a = 0.0, d = 0.0, terms = 0.0;
  };

  template <class To>
  Sample<To> sample(int64_t b, std::vector<To>& copy) const {
    const Positions &a = batch_.activations, &d = batch_.errors;
    const E* const from_a = static_cast<const E*>(a.data) + b * batch_.positions * a.row_stride;
    const E* const from_d = static_cast<const E*>(d.data) + b * batch_.positions * d.row_stride;
    if constexpr (std::is_same_v<E, To>) {
      return {from_a, a.row_stride, a.width, from_d, d.row_stride, d.width, batch_.positions};
    } else {
      const auto widen = row_scaler<E, To>();
      copy.resize(batch_.positions * (a.width + d.width));
      To* const to_d = copy.data() + batch_.positions * a.width;
      for (int64_t t = 0; t < batch_.positions; ++t) {
        widen(copy.data() + t * a.width, from_a + t * a.row_stride, To(1), a.width);
        widen(to_d + t * d.width, from_d + t * d.row_stride, To(1), d.width);
      }
      return {copy.data(), a.width, a.width, to_d, d.width, d.width, batch_.positions};
    }
  }

  // The lengths of all positions, and the bias gradients' squares.
  void measure() {
    const Isa isa = active_isa();
    const auto sq_norm = DPK_FOR_ISA(isa, sq_norm<E>);
    const auto add_row = DPK_FOR_ISA(isa, add_row_in_double<E>);
    const auto sum_sq_norm = DPK_FOR_ISA(isa, sq_norm<double>);
    const Positions &a = batch_.activations, &d = batch_.errors;
    const int64_t positions = batch_.positions;
    for_each_task(executor_, tasks_, [&](int task) {
      std::vector<double> sum(bias_ ? d.width : 0);
      const int64_t end = batch_.batch * (task + 1) / tasks_;
      for (int64_t b = batch_.batch * task / tasks_; b < end; ++b) {
        const E* a_row = static_cast<const E*>(a.data) + b * batch_.positions * a.row_stride;
        const E* d_row = static_cast<const E*>(d.data) + b * batch_.positions * d.row_stride;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int64_t t = 0; t < positions; ++t, a_row += a.row_stride, d_row += d.row_stride) {
          lengths_.a[b * positions + t] = std::sqrt(sq_norm(a_row, a.width));
          lengths_.d[b * positions + t] = std::sqrt(sq_norm(d_row, d.width));
          if (bias_) add_row(sum.data(), d_row, 1.0, d.width);
        }
        lengths_.bias[b] = bias_ ? sum_sq_norm(sum.data(), d.width) : 0.0;
      }
    });
  }

  bool finite(int64_t b) const {
    double total = 0.0;
    for (int64_t t = b * batch_.positions; t < (b + 1) * batch_.positions; ++t) {
      total += lengths_.a[t] + lengths_.d[t];
    }
    return std::isfinite(total);
  }

  void add_block(int64_t b, int64_t first, Scratch<T>& scratch, double* sums) const {
    const Sample<T> s = sample<T>(b, scratch.copy);
    if (gram_) {
      sums[0] = gram_sum(b, s, first, std::min(first + block_, s.positions), scratch, &sums[1]);
    } else {
      sums[0] = gradient_sq_norm(s, first, std::min(first + block_, s.outputs), scratch);
    }
  }

  template <class To>
  double gram_sum(int64_t b, const Sample<To>& s, int64_t first, int64_t last, Scratch<To>& scratch,
                  double* reach) const {
    const int64_t at = b * batch_.positions;
    const GramBlock<To> gram(s, lengths_.a.data() + at, lengths_.d.data() + at, scratch);
    Sum products;
    for (int64_t column = first; column < last; column += kGramCols) {
      gram.add(column, std::min(column + kGramCols, last), &products, reach);
    }
    return products.value();
  }

  // Puts a sample's norm together, its error included, and does it again in double where float is
  // not enough. *apart: whether its share of the sum must be, too.
  double settle(int64_t b, const std::vector<double>& sums, bool* apart) const {
    *apart = false;
    if (!finite(b)) return std::numeric_limits<double>::quiet_NaN();
    double square = 0.0, reach = 0.0;
    for (int64_t k = b * splits_; k < (b + 1) * splits_; ++k) {
      square += sums[2 * k];
      reach += sums[2 * k + 1];
    }
    const Totals totals = totals_of(b);
    const double limit = norm_limit<T>(batch_.positions);
    const double error = gram_ ? gram_error<T>(reach, totals) : gradient_error<T>(totals);
    if (gram_ && square_within(square, error, limit)) {
      square += error;
    } else if (!gram_ && norm_within(std::sqrt(square), error, limit)) {
      square = raised(square, error);
    } else {
      square = settle_in_double(b, totals, limit);
    }
    // The bias is a sum of as many rows as there are positions, in double; so is its sum over the
    // samples.
    const double bias_error = rounding_error<double>(batch_.positions) * totals.d;
    if (bias_) square += raised(lengths_.bias[b], bias_error);
    const double of_sum = sum_error<T>(batch_.positions) * totals.terms;
    *apart =
        !std::is_same_v<T, double> && !(of_sum <= sum_limit(batch_.positions) * std::sqrt(square));
    return *apart ? square : raised(square, of_sum);
  }

  // By the same formula, if it was in float, and by the gradient itself if even that cancels: sums
  // over positions of real networks often do too much for float, hardly ever for double.
  double settle_in_double(int64_t b, const Totals& totals, double limit) const {
    std::vector<double> copy;
    Scratch<double> scratch;
    const Sample<double> s = sample<double>(b, copy);
    if (gram_ && !std::is_same_v<T, double>) {
      double reach = 0.0;
      const double square = gram_sum(b, s, 0, s.positions, scratch, &reach);
      const double error = gram_error<double>(reach, totals);
      if (square_within(square, error, limit)) return square + error;
    }
    return raised(gradient_sq_norm(s, 0, s.outputs, scratch), gradient_error<double>(totals));
  }

  Totals totals_of(int64_t b) const {
    Totals totals;
    for (int64_t t = b * batch_.positions; t < (b + 1) * batch_.positions; ++t) {
      totals.a += lengths_.a[t];
      totals.d += lengths_.d[t];
      totals.terms += lengths_.a[t] * lengths_.d[t];
    }
    return totals;
  }

  // With a_s . a_t off by at most e |a_s| |a_t|, and d_s . d_t accordingly, the sum of their
  // products is off by e times the reach, and e^2 (sum over t of |a_t| |d_t|)^2.
  template <class Sums>
  double gram_error(double reach, const Totals& totals) const {
    const int64_t inputs = batch_.activations.width, outputs = batch_.errors.width;
    const int64_t width = std::max(inputs, outputs);
    const double e = dot_error<Sums>(width, kRoundings, width / kRoundings + 1);
    const double lost =
        double(inputs) * totals.d * totals.d + double(outputs) * totals.a * totals.a;
    return e * reach + e * e * totals.terms * totals.terms + kUnderflow<Sums> * lost;
  }

  // An element of the gradient is off by at most e times sum over t of |d_to| |a_ti|: the gradient,
  // by e times sum over t of |d_t| |a_t|.
  template <class Sums>
  double gradient_error(const Totals& totals) const {
    const double elements = double(batch_.activations.width) * double(batch_.errors.width);
    const int64_t positions = batch_.positions;
    return dot_error<Sums>(positions, kRoundings, positions / kRoundings + 1) * totals.terms +
           kUnderflow<Sums> * double(positions) * std::sqrt(elements);
  }

  // Of a chain of products: one for each. See linear_norms.inl.
  static constexpr int64_t kRoundings = portable::kChain;

  const LinearBatch& batch_;
  const bool bias_, gram_;
  Lengths lengths_;
  const Executor& executor_;
  int tasks_;
  int64_t block_, splits_;
};

}  // namespace

void linear_sq_norms(const LinearBatch& batch, bool bias, LinearFormula formula, double* sq_norms,
                     bool* apart, const Executor& executor) {
  switch (batch.dtype) {
    case Dtype::bf16:
      return NormPass<BFloat16>(batch, bias, formula, executor).run(sq_norms, apart);
    case Dtype::f16:
      return NormPass<Float16>(batch, bias, formula, executor).run(sq_norms, apart);
    case Dtype::f64:
      return NormPass<double>(batch, bias, formula, executor).run(sq_norms, apart);
    default:
      return NormPass<float>(batch, bias, formula, executor).run(sq_norms, apart);
  }
}

}  // namespace dpk
