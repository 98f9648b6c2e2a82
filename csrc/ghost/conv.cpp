#include "ghost/conv.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#define DPK_KERNELS "ghost/conv_kernels.inl"
#include "common/for_each_isa.h"

namespace dpk {
namespace {

// Rows end on whole vectors of any instruction set, and windows may run this far over the end.
constexpr int64_t kPadding = 16;

// Flops that make a second thread worth its start. Measured with 3 x 3 kernels, two threads against
// one: 56,448 flops take 12.5 us and 11.8, 147,456 take 14.2 and 14.0, 294,912 take 16.7 and 19.5.
constexpr int64_t kFlopsPerTask = 1 << 17;
// What looking up and adding a product of pixels costs in flops: ops/ghost/conv_shape.py.
constexpr int64_t kFlopsPerLookup = 33;

int64_t padded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// One axis: which planes its taps need, and where in them each tap begins.
struct AxisLayout {
  int64_t extent;
  std::vector<ConvPhase> phases;
  std::vector<int64_t> tap_phase, tap_offset;

  explicit AxisLayout(const ConvAxis& axis) {
    std::vector<int64_t> residues;
    int64_t furthest = 0;
    for (int64_t k = 0; k < axis.kernel; ++k) {
      const int64_t at = k * axis.dilation, residue = at % axis.stride;
      auto found = std::find(residues.begin(), residues.end(), residue);
      if (found == residues.end()) found = residues.insert(found, residue);
      tap_phase.push_back(found - residues.begin());
      tap_offset.push_back(at / axis.stride);
      furthest = std::max(furthest, at / axis.stride);
    }
    extent = axis.out + furthest;
    for (const int64_t residue : residues) {
      const int64_t shift = residue - axis.padding;
      const int64_t begin = std::max<int64_t>(0, -floor_divide(shift, axis.stride));
      const int64_t end = floor_divide(axis.in - 1 - shift, axis.stride) + 1;
      phases.push_back({shift, begin, std::max(begin, std::min(end, extent))});
    }
  }
};

struct Layout {
  AxisLayout axes[3];
  ConvPlanes planes;
  int64_t window;                // from the first to the last position of an error plane, padded
  std::vector<int64_t> offsets;  // [columns]: where the window of a column of the gradient begins

  explicit Layout(const ConvShape& shape)
      : axes{AxisLayout(shape.axes[0]), AxisLayout(shape.axes[1]), AxisLayout(shape.axes[2])} {
    planes.plane = planes.channel = 1;
    int64_t last = 0;
    for (int a = 0; a < 3; ++a) {
      const ConvAxis& axis = shape.axes[a];
      planes.extent[a] = axes[a].extent;
      planes.in[a] = axis.in;
      planes.out[a] = axis.out;
      planes.stride[a] = axis.stride;
      planes.phase_count[a] = static_cast<int64_t>(axes[a].phases.size());
      planes.phases[a] = axes[a].phases.data();
      planes.plane *= axes[a].extent;
      planes.channel *= planes.phase_count[a];
      last = last * axes[a].extent + axis.out - 1;
    }
    planes.channel *= planes.plane;
    planes.channels = shape.channels;
    planes.out_channels = shape.out_channels;
    planes.pixels = shape.pixels();
    planes.positions = shape.positions();
    window = padded(last + 1);
    add_offsets(shape);
  }
  Layout(const Layout&) = delete;

  int64_t plane_elements() const { return planes.channels * planes.channel + kPadding; }

 private:
  void add_offsets(const ConvShape& shape) {
    for (int64_t c = 0; c < shape.channels / shape.groups; ++c) {
      for (int64_t z = 0; z < shape.axes[0].kernel; ++z) {
        for (int64_t y = 0; y < shape.axes[1].kernel; ++y) {
          for (int64_t x = 0; x < shape.axes[2].kernel; ++x) {
            const int64_t taps[3] = {z, y, x};
            int64_t phase = 0, offset = 0;
            for (int a = 0; a < 3; ++a) {
              phase = phase * planes.phase_count[a] + axes[a].tap_phase[taps[a]];
              offset = offset * planes.extent[a] + axes[a].tap_offset[taps[a]];
            }
            offsets.push_back(c * planes.channel + phase * planes.plane + offset);
          }
        }
      }
    }
  }
};

// [taps, positions]: the pixel under a tap at a position, or `pixels` where that is padding.
std::vector<int32_t> pixels_met(const ConvShape& shape) {
  const auto place = [&shape](int a, int64_t tap, int64_t position) {
    const ConvAxis& axis = shape.axes[a];
    const int64_t at = position * axis.stride + tap * axis.dilation - axis.padding;
    return at < axis.in ? at : -1;
  };
  std::vector<int32_t> met;
  const ConvAxis* axes = shape.axes;
  for (int64_t tap = 0; tap < shape.taps(); ++tap) {
    const int64_t kx = tap % axes[2].kernel, ky = tap / axes[2].kernel % axes[1].kernel;
    const int64_t kz = tap / axes[2].kernel / axes[1].kernel;
    for (int64_t p = 0; p < shape.positions(); ++p) {
      const int64_t x = place(2, kx, p % axes[2].out);
      const int64_t y = place(1, ky, p / axes[2].out % axes[1].out);
      const int64_t z = place(0, kz, p / axes[2].out / axes[1].out);
      const bool inside = x >= 0 && y >= 0 && z >= 0;
      met.push_back(
          static_cast<int32_t>(inside ? (z * axes[1].in + y) * axes[2].in + x : shape.pixels()));
    }
  }
  return met;
}

// What one task keeps for its samples of type In, computing in T.
template <class In, class T>
class GradientPass {
  using Types = Conversion<In, T>;

 public:
  GradientPass(const ConvProblem& problem, const Layout& layout)
      : problem_(problem),
        layout_(layout),
        // Zeros: fringes and ends of rows stay so, whatever sample is in them.
        planes_(layout.plane_elements(), T(0)),
        errors_(problem.shape.out_channels * layout.window, T(0)) {}

  // Returns the squared norm of the weight's gradient; `bound` is that of its terms, bias_sums the
  // gradient of the bias.
  double operator()(const In* input, const In* errors, T* grads, double* bias_sums, double& bound) {
    const ConvShape& shape = problem_.shape;
    const Isa isa = active_isa();
    bound = DPK_FOR_ISA(isa, spread_input<Types>)(layout_.planes, input, planes_.data());
    bound *= static_cast<double>(shape.taps()) *
             DPK_FOR_ISA(isa, spread_errors<Types>)(layout_.planes, errors, errors_.data(),
                                                    layout_.window, bias_sums);
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
        products_((shape_.pixels() + 1) * (shape_.pixels() + 1), 0.0) {}

  double operator()(const In* input, const In* errors, double* bias_sums, double& bound) {
    const int64_t channels = shape_.channels / shape_.groups, rows = shape_.rows();
    const int64_t pixels = shape_.pixels(), positions = shape_.positions();
    const Isa isa = active_isa();
    double inputs = 0.0, outputs = 0.0, sq_norm = 0.0;
    for (int64_t g = 0; g < shape_.groups; ++g) {
      inputs += DPK_FOR_ISA(isa, transpose<Types>)(input + g * channels * pixels, channels, pixels,
                                                   input_.data(), input_pitch_, nullptr);
      outputs +=
          DPK_FOR_ISA(isa, transpose<Types>)(errors + g * rows * positions, rows, positions,
                                             errors_.data(), error_pitch_, bias_sums + g * rows);
      sq_norm +=
          DPK_FOR_ISA(isa, gram<T>)(input_.data(), pixels, input_pitch_, errors_.data(), positions,
                                    error_pitch_, met_.data(), shape_.taps(), products_.data());
    }
    bound = inputs * outputs * static_cast<double>(shape_.taps());
    return sq_norm;
  }

 private:
  const ConvShape& shape_;
  const std::vector<int32_t>& met_;
  int64_t input_pitch_, error_pitch_;
  std::vector<T> input_, errors_;
  std::vector<double> products_;
};

// Whether float products, which err by up to 1e-7 of their terms each and in either direction, may
// be off by more than 5e-7 of the norm. `bound` is an upper bound of (sum_t |patch_t| |error_t|)^2.
// The gradient's elements err independently, in proportion to the root of the positions that each
// adds up; products of positions err in proportion to |patch_s| |patch_t| |error_s| |error_t|.
// Uncorrelated positions are far from either limit, by the number of elements and by four.
bool cancels(const ConvShape& shape, bool gram, double sq_norm, double bound) {
  const int64_t points = std::max(shape.positions(), shape.pixels());
  const int64_t elements = shape.out_channels * shape.columns();
  return !(sq_norm * static_cast<double>(points) * static_cast<double>(gram ? 4 : elements) >=
           bound);
}

template <class In, class T>
void norms_of_samples(const ConvProblem& problem, const Layout& layout,
                      const std::vector<int32_t>& met, const ConvOutputs& outputs, int64_t begin,
                      int64_t end) {
  const ConvShape& shape = problem.shape;
  const int64_t input_size = shape.channels * shape.pixels();
  const int64_t error_size = shape.out_channels * shape.positions();
  const int64_t grad_size = shape.out_channels * shape.columns();
  std::vector<double> bias_sums(shape.out_channels);
  // Memory for the formula that is not used, and for the rare second look, is not taken.
  std::vector<GradientPass<In, T>> direct;
  std::vector<GradientPass<In, double>> in_double;
  std::vector<GramPass<In, T>> by_products;
  if (problem.gram) {
    by_products.emplace_back(problem, met);
  } else {
    direct.emplace_back(problem, layout);
  }
  std::vector<double> wide_grads;
  for (int64_t b = begin; b < end; ++b) {
    const In* input = static_cast<const In*>(problem.activations) + b * input_size;
    const In* errors = static_cast<const In*>(problem.errors) + b * error_size;
    T* grads = outputs.grads == nullptr ? nullptr : static_cast<T*>(outputs.grads) + b * grad_size;
    double bound = 0.0;
    double sq_norm = problem.gram ? by_products[0](input, errors, bias_sums.data(), bound)
                                  : direct[0](input, errors, grads, bias_sums.data(), bound);
    const bool exact = std::is_same_v<T, double> && !problem.gram;
    if (!std::isfinite(bound)) {
      sq_norm = std::numeric_limits<double>::quiet_NaN();
    } else if (!exact && cancels(shape, problem.gram, sq_norm, bound)) {
      if (in_double.empty()) in_double.emplace_back(problem, layout);
      wide_grads.resize(grads == nullptr ? 0 : grad_size);
      sq_norm = in_double[0](input, errors, grads == nullptr ? nullptr : wide_grads.data(),
                             bias_sums.data(), bound);
      for (size_t i = 0; i < wide_grads.size(); ++i) grads[i] = static_cast<T>(wide_grads[i]);
    }
    for (int64_t o = 0; o < shape.out_channels; ++o) {
      const double sum =
          problem.scale == nullptr ? bias_sums[o] : bias_sums[o] * problem.scale[shape.columns()];
      if (problem.bias) sq_norm += sum * sum;
      if (outputs.bias_grads != nullptr) {
        static_cast<T*>(outputs.bias_grads)[b * shape.out_channels + o] =
            static_cast<T>(bias_sums[o]);
      }
    }
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
