#include "ghost/conv.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ghost/conv_layout.h"
#include "ghost/rounding.h"
#define DPK_KERNELS "ghost/conv_kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Flops that make a second thread worth its start. Measured with 3 x 3 kernels, two threads against
// one: 56,448 flops take 12.5 us and 11.8, 147,456 take 14.2 and 14.0, 294,912 take 16.7 and 19.5.
constexpr int64_t kFlopsPerTask = 1 << 17;
// What looking up and adding a product of pixels costs in flops: ops/ghost/conv_shape.py.
constexpr int64_t kFlopsPerLookup = 33;

// What bounds the error of a sample's norm. `terms`: sum over t of |patch_t| |error_t|, or more,
// under the scale of the columns. error_squares: sum over t of |error_t|^2. With products of
// positions also their reach (see gram), and the sums of the lengths of patches and of errors.
struct Terms {
  double terms = 0.0, error_squares = 0.0, patches = 0.0, errors = 0.0;
  double reach[2] = {0.0, 0.0};
};

// [channels]: what to multiply the squares of a channel's pixels with for those of its column of
// patches, scaled. A tap meets a pixel once at most, so a channel's columns are no longer than it.
std::vector<double> channel_weights(const ConvShape& shape, const Layout& layout,
                                    const double* scale) {
  const int64_t taps = shape.taps();
  const double meetings =
      double(layout.axes[0].meetings * layout.axes[1].meetings * layout.axes[2].meetings);
  std::vector<double> weights(shape.channels, meetings);
  for (int64_t c = 0; scale != nullptr && c < shape.channels; ++c) {
    double total = 0.0, largest = 0.0;
    for (int64_t k = 0; k < taps; ++k) {
      const double gain = scale[c % (shape.channels / shape.groups) * taps + k];
      total += gain * gain;
      largest = std::max(largest, gain * gain);
    }
    weights[c] = std::min(total, largest * meetings);
  }
  return weights;
}

// What one task keeps for its samples of type In, computing in T.
template <class In, class T>
class GradientPass {
  using Types = Conversion<In, T>;

 public:
  GradientPass(const ConvProblem& problem, const Layout& layout)
      : problem_(problem),
        layout_(layout),
        weights_(channel_weights(problem.shape, layout, problem.scale)),
        // Zeros: fringes and ends of rows stay so, whatever sample is in them.
        planes_(layout.plane_elements(), T(0)),
        errors_(problem.shape.out_channels * layout.window, T(0)) {}

  // Returns the squared norm of the weight's gradient; bias_sums is the gradient of the bias.
  double operator()(const In* input, const In* errors, T* grads, double* bias_sums, Terms& terms) {
    const ConvShape& shape = problem_.shape;
    const Isa isa = active_isa();
    const double inputs = DPK_FOR_ISA(isa, spread_input<Types>)(layout_.planes, input,
                                                                weights_.data(), planes_.data());
    terms.error_squares = DPK_FOR_ISA(isa, spread_errors<Types>)(
        layout_.planes, errors, errors_.data(), layout_.window, bias_sums);
    terms.terms = std::sqrt(inputs * terms.error_squares);
    double sq_norm = 0.0;
    const int64_t group_channels = shape.channels / shape.groups, rows = shape.rows();
    for (int64_t g = 0; g < shape.groups; ++g) {
      sq_norm += DPK_FOR_ISA(isa, gradient<T>)(
          errors_.data() + g * rows * layout_.window, layout_.window, rows,
          planes_.data() + g * group_channels * layout_.planes.channel, layout_.offsets.data(),
          shape.columns(), layout_.window, problem_.scale,
          grads == nullptr ? nullptr : grads + g * rows * shape.columns());
    }
    return sq_norm;
  }

 private:
  const ConvProblem& problem_;
  const Layout& layout_;
  const std::vector<double> weights_;
  std::vector<T> planes_, errors_;
};

template <class In, class T>
class GramPass {
  using Types = Conversion<In, T>;

 public:
  GramPass(const ConvProblem& problem, const std::vector<int32_t>& met)
      : shape_(problem.shape),
        met_(met),
        input_pitch_(padded(shape_.channels / shape_.groups)),
        error_pitch_(padded(shape_.rows())),
        input_(shape_.pixels() * input_pitch_, T(0)),
        errors_(shape_.positions() * error_pitch_, T(0)),
        // One more for the padding, which stays zero.
        pixels_(shape_.pixels() + 1, 0.0),
        patch_lengths_(shape_.positions()),
        error_lengths_(shape_.positions()),
        products_((shape_.pixels() + 1) * (shape_.pixels() + 1), 0.0) {}

  double operator()(const In* input, const In* errors, double* bias_sums, Terms& terms) {
    const int64_t channels = shape_.channels / shape_.groups, rows = shape_.rows();
    const int64_t pixels = shape_.pixels(), positions = shape_.positions();
    const Isa isa = active_isa();
    double sq_norm = 0.0;
    for (int64_t g = 0; g < shape_.groups; ++g) {
      DPK_FOR_ISA(isa, transpose<Types>)(input + g * channels * pixels, channels, pixels,
                                         input_.data(), input_pitch_, pixels_.data(), nullptr);
      terms.error_squares += DPK_FOR_ISA(isa, transpose<Types>)(
          errors + g * rows * positions, rows, positions, errors_.data(), error_pitch_,
          error_lengths_.data(), bias_sums + g * rows);
      measure(terms);
      sq_norm +=
          DPK_FOR_ISA(isa, gram<T>)(input_.data(), pixels, input_pitch_, errors_.data(), positions,
                                    error_pitch_, met_.data(), shape_.taps(), patch_lengths_.data(),
                                    error_lengths_.data(), products_.data(), terms.reach);
    }
    return sq_norm;
  }

 private:
  // Makes lengths of squares, of the patches and of the errors, and adds them to the terms. Every
  // pixel counts, whether a patch meets it or not: 0 times what is not finite is NaN.
  void measure(Terms& terms) {
    const int64_t positions = shape_.positions();
    for (const double square : pixels_) terms.terms += 0.0 * square;
    for (int64_t t = 0; t < positions; ++t) {
      double square = 0.0;
      for (int64_t k = 0; k < shape_.taps(); ++k) square += pixels_[met_[k * positions + t]];
      patch_lengths_[t] = std::sqrt(square);
      error_lengths_[t] = std::sqrt(error_lengths_[t]);
      terms.terms += patch_lengths_[t] * error_lengths_[t];
      terms.patches += patch_lengths_[t];
      terms.errors += error_lengths_[t];
    }
  }

  const ConvShape& shape_;
  const std::vector<int32_t>& met_;
  int64_t input_pitch_, error_pitch_;
  std::vector<T> input_, errors_;
  std::vector<double> pixels_, patch_lengths_, error_lengths_;
  std::vector<double> products_;
};

// Roundings of a dot product before it is in double (dot_tile of sums.inl): 32 in a lane, and for
// the sum of the lanes four in float (of sixteen, in pairs; of four, in a row) or seven in double.
template <class T>
constexpr int64_t kRoundings = std::is_same_v<T, double> ? 39 : 36;
// Products that go to double at a time: 32 in each of at least two lanes.
constexpr int64_t kProducts = 64;

// What the gradient may be off by at most.
template <class T>
double gradient_error(const ConvProblem& problem, const Layout& layout, double terms) {
  const ConvShape& shape = problem.shape;
  double largest = 1.0;
  for (int64_t i = 0; problem.scale != nullptr && i < shape.columns(); ++i) {
    largest = std::max(largest, std::abs(problem.scale[i]));
  }
  const double elements = double(shape.out_channels) * double(shape.columns());
  return dot_error<T>(shape.positions(), kRoundings<T>, layout.window / kProducts + 1) * terms +
         kUnderflow<T> * double(shape.positions()) * std::sqrt(elements) * largest;
}

// What the sum of products of positions may be off by at most. It is added up one pair after the
// other.
template <class T>
double gram_error(const ConvShape& shape, const Terms& terms) {
  const int64_t channels = shape.channels / shape.groups, rows = shape.rows();
  const int64_t pairs = shape.positions() * shape.positions() / 2;
  const auto product_error = [&](int64_t width) {
    return dot_error<T>(width, kRoundings<T>, width / kProducts + shape.taps() + pairs);
  };
  const double patch_error = product_error(channels), error_error = product_error(rows);
  const double lost = double(channels * shape.taps()) * terms.errors * terms.errors +
                      double(rows) * terms.patches * terms.patches;
  return error_error * terms.reach[0] + patch_error * terms.reach[1] +
         error_error * patch_error * terms.terms * terms.terms + kUnderflow<T> * lost;
}

// The norms of samples of type In in T, and in double where T is not enough. Memory for the formula
// that is not used, and for the rare second look, is not taken.
template <class In, class T>
class SamplePass {
 public:
  SamplePass(const ConvProblem& problem, const Layout& layout, const std::vector<int32_t>& met)
      : problem_(problem), layout_(layout) {
    if (problem.gram) {
      by_products_.emplace_back(problem, met);
    } else {
      direct_.emplace_back(problem, layout);
    }
  }

  // The squared norm of the weight's gradient, with what it may be off by; NaN for a sample with a
  // value that is not finite. grads, unless null, and bias_sums are the gradients.
  double operator()(const In* input, const In* errors, T* grads, double* bias_sums, Terms& terms) {
    const double limit = norm_limit<T>(problem_.shape.positions());
    double square = 0.0, error = 0.0;
    if (problem_.gram) {
      square = by_products_[0](input, errors, bias_sums, terms);
      error = gram_error<T>(problem_.shape, terms);
    } else {
      square = direct_[0](input, errors, grads, bias_sums, terms);
      error = gradient_error<T>(problem_, layout_, terms.terms);
    }
    if (!std::isfinite(terms.terms)) return std::numeric_limits<double>::quiet_NaN();
    if (problem_.gram && square_within(square, error, limit)) return square + error;
    const bool best = std::is_same_v<T, double>;
    if (!problem_.gram && (best || norm_within(std::sqrt(square), error, limit))) {
      return raised(square, error);
    }
    return again(input, errors, grads, bias_sums);
  }

 private:
  double again(const In* input, const In* errors, T* grads, double* bias_sums) {
    if (in_double_.empty()) in_double_.emplace_back(problem_, layout_);
    const int64_t size = problem_.shape.out_channels * problem_.shape.columns();
    wide_grads_.resize(grads == nullptr ? 0 : size);
    Terms terms;
    const double square = in_double_[0](
        input, errors, grads == nullptr ? nullptr : wide_grads_.data(), bias_sums, terms);
    for (size_t i = 0; i < wide_grads_.size(); ++i) grads[i] = static_cast<T>(wide_grads_[i]);
    // Gradients that are kept are rounded once.
    const double of_rows = grads == nullptr ? 0.0 : rounding_error<T>(1) * std::sqrt(square);
    return raised(square, gradient_error<double>(problem_, layout_, terms.terms) + of_rows);
  }

  const ConvProblem& problem_;
  const Layout& layout_;
  std::vector<GradientPass<In, T>> direct_;
  std::vector<GradientPass<In, double>> in_double_;
  std::vector<GramPass<In, T>> by_products_;
  std::vector<double> wide_grads_;
};

template <class In, class T>
void norms_of_samples(const ConvProblem& problem, const Layout& layout,
                      const std::vector<int32_t>& met, const ConvOutputs& outputs, int64_t begin,
                      int64_t end) {
  const ConvShape& shape = problem.shape;
  const int64_t input_size = shape.channels * shape.pixels();
  const int64_t error_size = shape.out_channels * shape.positions();
  const int64_t grad_size = shape.out_channels * shape.columns();
  const double bias_scale = problem.scale == nullptr ? 1.0 : problem.scale[shape.columns()];
  std::vector<double> bias_sums(shape.out_channels);
  SamplePass<In, T> pass(problem, layout, met);
  for (int64_t b = begin; b < end; ++b) {
    const In* input = static_cast<const In*>(problem.activations) + b * input_size;
    const In* errors = static_cast<const In*>(problem.errors) + b * error_size;
    T* grads = outputs.grads == nullptr ? nullptr : static_cast<T*>(outputs.grads) + b * grad_size;
    Terms terms;
    double sq_norm = pass(input, errors, grads, bias_sums.data(), terms);
    double bias_square = 0.0;
    for (int64_t o = 0; o < shape.out_channels; ++o) {
      bias_square += bias_sums[o] * bias_sums[o];
      if (outputs.bias_grads != nullptr) {
        static_cast<T*>(outputs.bias_grads)[b * shape.out_channels + o] =
            static_cast<T>(bias_sums[o]);
      }
    }
    // A sum of as many errors as there are positions, in double: their magnitudes add up to no more
    // than the root of so many squares.
    const double bias_error = rounding_error<double>(shape.positions()) *
                              std::sqrt(double(shape.positions()) * terms.error_squares);
    if (problem.bias) sq_norm += bias_scale * bias_scale * raised(bias_square, bias_error);
    outputs.sq_norms[b] = sq_norm;
  }
}

int64_t flops_of(const ConvShape& shape, bool gram) {
  const int64_t positions = shape.positions(), pixels = shape.pixels();
  if (!gram) return 2 * positions * shape.out_channels * shape.columns();
  const int64_t lookups = kFlopsPerLookup * shape.groups * shape.taps();
  return pixels * pixels * shape.channels + positions * positions * (shape.out_channels + lookups);
}

template <class In, class T>
void norms(const ConvProblem& problem, const ConvOutputs& outputs, const Executor& executor) {
  const Layout layout(problem.shape);
  const std::vector<int32_t> met =
      problem.gram ? pixels_met(problem.shape) : std::vector<int32_t>();
  const int64_t batch = problem.shape.batch;
  const int64_t most = std::clamp<int64_t>(batch, 1, executor.threads);
  const int64_t useful = batch * flops_of(problem.shape, problem.gram) / kFlopsPerTask;
  const int tasks = static_cast<int>(std::clamp<int64_t>(useful, 1, most));
  for_each_task(executor, tasks, [&](int task) {
    norms_of_samples<In, T>(problem, layout, met, outputs, batch * task / tasks,
                            batch * (task + 1) / tasks);
  });
}

}  // namespace

void conv_norms(const ConvProblem& problem, const ConvOutputs& outputs, const Executor& executor) {
  switch (problem.dtype) {
    case Dtype::bf16:
      return norms<BFloat16, float>(problem, outputs, executor);
    case Dtype::f16:
      return norms<Float16, float>(problem, outputs, executor);
    case Dtype::f64:
      return norms<double, double>(problem, outputs, executor);
    default:
      return norms<float, float>(problem, outputs, executor);
  }
}

}  // namespace dpk
