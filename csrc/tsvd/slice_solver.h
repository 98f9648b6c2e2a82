// The eigendecomposition of one slice's Gram matrix, and the operator that shrinks the slice.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/gemm.h"
#include "tsvd/hermitian.h"
#include "tsvd/scratch.h"
#include "tsvd/tsvd.h"

namespace dpk {

// What cpu.cpp compiles for each instruction set.
struct SliceKernels {
  void (*to_double)(const float* x, int64_t n, double* to);
  void (*tridiagonalise[2])(const Hermitian&);  // real, complex
  bool (*solve_tridiagonal)(const Hermitian&, bool with_vectors);
  void (*apply_reflections[2])(const Hermitian&, double* v_re, double* v_im, int64_t columns,
                               int64_t stride);
};

// The operator comes from the Gram matrix G = M^H M in double if the cut is at least this part of
// |M|_F. The computed G is off by E, |E|_F <= c 2^-53 |M|_F^2, and the error of the result M P is
// at most |E|_F / (2 cut) for the soft threshold, and (L + 1) |E|_F / cut for a curve with slopes
// up to L: see dpkernels/ops/tsvd/__init__.py. At this bound that is c 2^-30 |M|_F, or c 2^-29 (L +
// 1) |M|_F, where an SVD in float32 errs by L 2^-24 |M|_F.
constexpr double kGramBound = 0x1p-24;

// Solves slices one after the other, in one thread, in memory for the largest of them.
class SliceSolver {
 public:
  SliceSolver(const SliceKernels& kernels, const ClientTensor* layers, int64_t count,
              Scratch scratch)
      : kernels_(kernels), problem_(most_cols(layers, count), scratch) {
    const int64_t cols = problem_.n;
    int64_t block = 0;
    for (int64_t l = 0; l < count; ++l) {
      block = std::max(block, std::min(layers[l].rows, kBlockRows) * 2 * layers[l].cols);
    }
    block_ = scratch.take<double>(block);
    gram_ = scratch.take<double>(4 * cols * cols);
    vectors_ = scratch.take<double>(2 * cols * hermitian_stride(cols));
    workspace_ = scratch.take<char>(gemm_workspace_bytes<double>());
    bytes_ = scratch.used();
  }

  // How much it has taken of the scratch memory.
  int64_t bytes() const { return bytes_; }

  // Writes slice s's operator and result.
  void shrink(const ClientTensor& layer, int64_t s) {
    SliceResult& result = layer.results[s];
    const ShrinkCurve& curve = layer.curves[s];
    result = {Outcome::replaced, layer.cols};
    if (curve.changes_nothing()) return;
    result = {Outcome::vanished, 0};
    load_gram(layer, s);
    const double norm = std::sqrt(trace_);
    if (norm <= curve.cut) return;
    if (curve.cut < kGramBound * norm || !solve(layer, s, true)) {
      result.outcome = Outcome::needs_svd;
      return;
    }
    result.kept = keep_above(curve);
    if (result.kept == 0) return;
    result.outcome = Outcome::multiplied;
    kernels_.apply_reflections[complex_](problem_, vectors_, vectors_ + problem_.n * kept_stride_,
                                         result.kept, kept_stride_);
    const MatrixView<double> v{vectors_, kept_stride_, 1};
    gemm_upper(width_, result.kept, v, v.transposed(), gram_, width_, false, workspace_);
    store_operator(layer.slice_operator(s));
  }

  // Writes slice s's singular values, largest first.
  void singular_values(const ClientTensor& layer, int64_t s) {
    float* const values = layer.values + s * layer.cols;
    layer.results[s] = {Outcome::replaced, 0};
    load_gram(layer, s);
    if (trace_ == 0.0) {
      std::fill_n(values, layer.cols, 0.0f);
      return;
    }
    if (!solve(layer, s, false)) {
      layer.results[s].outcome = Outcome::needs_svd;
      return;
    }
    for (int64_t k = 0; k < problem_.n; ++k) values[k] = static_cast<float>(singular_value(k));
    std::sort(values, values + layer.cols, std::greater<float>());
  }

 private:
  static int64_t most_cols(const ClientTensor* layers, int64_t count) {
    int64_t cols = 1;
    for (int64_t l = 0; l < count; ++l) cols = std::max(cols, layers[l].cols);
    return cols;
  }

  // Rows that are widened at a time. Measured on 784 x 64 x 10, one thread: the operators take 3.5
  // ms with 128, 3.6 with 256, 3.8 with 1024.
  static constexpr int64_t kBlockRows = 128;

  // gram_ = X^T X in double, upper triangle, for X = M or X = [Re M, Im M]; trace_ = |M|_F^2.
  void load_gram(const ClientTensor& layer, int64_t s) {
    complex_ = !layer.slice_is_real(s);
    width_ = layer.width(s);
    const int64_t stride = 2 * layer.cols;
    for (int64_t begin = 0; begin < layer.rows; begin += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, layer.rows - begin);
      const float* const plane = layer.plane(s) + begin * stride;
      for (int64_t r = 0; r < rows; ++r) {
        kernels_.to_double(plane + r * stride, width_, block_ + r * width_);
      }
      const MatrixView<double> x{block_, width_, 1};
      gemm_upper(width_, rows, x.transposed(), x, gram_, width_, begin > 0, workspace_);
    }
    trace_ = 0.0;
    for (int64_t i = 0; i < width_; ++i) trace_ += gram_[i * width_ + i];
  }

  // Eigenvalues of G / trace_ and, if asked for, the eigenvectors of its tridiagonal form. A trace
  // of 1 keeps squares of elements in range, whatever the scale of M is.
  bool solve(const ClientTensor& layer, int64_t s, bool with_vectors) {
    const int64_t n = layer.cols;
    const double scale = 1.0 / trace_;
    const double* const g = gram_;
    problem_.clear(n);
    for (int64_t i = 0; i < n; ++i) {
      double* const re = problem_.re + i * problem_.stride;
      double* const im = problem_.im + i * problem_.stride;
      const auto real_part = [&](int64_t j) {
        return g[j * width_ + i] + (complex_ ? g[(n + j) * width_ + n + i] : 0.0);
      };
      for (int64_t j = 0; j < i; ++j) {
        re[j] = real_part(j) * scale;
        if (complex_) im[j] = (g[i * width_ + n + j] - g[j * width_ + n + i]) * scale;
      }
      problem_.values[i] = real_part(i) * scale;
    }
    kernels_.tridiagonalise[!layer.slice_is_real(s)](problem_);
    return kernels_.solve_tridiagonal(problem_, with_vectors);
  }

  double singular_value(int64_t k) const {
    return std::sqrt(std::max(0.0, problem_.values[k]) * trace_);
  }

  // vectors_ = the columns z sqrt(factor(s)) with s above the cut, z the eigenvectors of the
  // tridiagonal form, and zeros for the imaginary part; returns how many.
  int64_t keep_above(const ShrinkCurve& curve) {
    const int64_t n = problem_.n;
    int64_t kept = 0;
    for (int64_t k = 0; k < n; ++k) kept += singular_value(k) > curve.cut;
    kept_stride_ = hermitian_stride(kept);
    std::fill_n(vectors_, 2 * n * kept_stride_, 0.0);
    int64_t column = 0;
    for (int64_t k = 0; k < n; ++k) {
      const double s = singular_value(k);
      if (s <= curve.cut) continue;
      const double factor = std::sqrt(curve.factor(s));
      const double* const z = problem_.vectors + k * problem_.stride;
      for (int64_t i = 0; i < n; ++i) vectors_[i * kept_stride_ + column] = factor * z[i];
      ++column;
    }
    return kept;
  }

  // P from gram_ = B B^T, B = [Re V; Im V]. A row [Re M, Im M] times [[Re P, Im P], [-Im P, Re P]]
  // is the row of M P.
  void store_operator(float* to) const {
    const int64_t n = problem_.n;
    const double* const g = gram_;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const int64_t low = std::min(i, j), high = std::max(i, j);
        if (!complex_) {
          to[i * n + j] = static_cast<float>(g[low * n + high]);
          continue;
        }
        const double re = g[low * width_ + high] + g[(n + low) * width_ + n + high];
        const double im = g[j * width_ + n + i] - g[i * width_ + n + j];
        to[i * width_ + j] = to[(n + i) * width_ + n + j] = static_cast<float>(re);
        to[i * width_ + n + j] = static_cast<float>(im);
        to[(n + i) * width_ + j] = static_cast<float>(-im);
      }
    }
  }

  SliceKernels kernels_;
  Hermitian problem_;
  double* block_;    // rows of the slice in double
  double* gram_;     // [width_, width_]
  double* vectors_;  // what is kept: real parts [n, kept_stride_], then imaginary parts
  char* workspace_;
  int64_t bytes_;
  int64_t width_ = 0, kept_stride_ = 0;
  double trace_ = 0.0;
  bool complex_ = false;
};

}  // namespace dpk
