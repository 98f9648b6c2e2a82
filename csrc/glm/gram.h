// sum_i w_i x_i x_i^T in one thread: the blocks of Hessians and covariances.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "common/gemm.h"

namespace dpk {

// The weight of record i in block (a, b) of a Hessian, from the columns of the record tables.
template <class T>
struct ClassPair {
  const T* factors;  // [records]
  const T* p;        // [classes, ld]
  const T* q;
  int64_t ld;
  int64_t a, b;
};

// weights [end - begin] = factor * A[a, b] with A = diag p - p p^T.
template <class T>
void hessian_weights(const ClassPair<T>& pair, int64_t begin, int64_t end, T* weights);

// The same for Q^T A Q: columns of Q [classes, classes - 1] are an orthonormal basis of the vectors
// that sum to zero. Q is the Householder reflection of the last unit vector onto the constants, so
// with t = 1 / (sqrt(classes) - 1) and l the last class,
//   (Q^T A Q)[a, b] = A[a, b] + t (A[a, l] + A[b, l]) + t^2 A[l, l].
template <class T>
void reduced_hessian_weights(const ClassPair<T>& pair, int64_t classes, int64_t begin, int64_t end,
                             T* weights);

// out [count, features], contiguous = weights[i] times row i of x.
template <class T>
void scale_rows(const T* x, int64_t row_stride, int64_t count, int64_t features, const T* weights,
                T* out);

// block[j, i] = block[i, j] for i < j.
template <class T>
void mirror_upper(T* block, int64_t ld, int64_t n);

// Records that are weighted at a time; as deep as the product packs at once, so that cutting here
// costs it nothing.
template <class T>
constexpr int64_t kGramRows = GemmBlocks<T>::kDepth;

// The weighted sums of one thread.
template <class T>
class WeightedGram {
 public:
  explicit WeightedGram(int64_t features)
      : features_(features),
        weights_(new T[kGramRows<T>]),
        scaled_(new T[kGramRows<T> * features]),
        gemm_(new char[gemm_workspace_bytes<T>()]) {}

  // block [features, features], rows ld apart = sum of w_i x_i x_i^T over `count` rows of x.
  // weigh(begin, end, weights) gives the weights. Below the diagonal it is written if `mirror`.
  template <class Weigh>
  void sum(const T* x, int64_t row_stride, int64_t count, Weigh&& weigh, T* block, int64_t ld,
           bool mirror) {
    for (int64_t row = 0; row == 0 || row < count; row += kGramRows<T>) {
      const int64_t rows = std::min(kGramRows<T>, count - row);
      const T* const from = x + row * row_stride;
      weigh(row, row + rows, weights_.get());
      scale_rows(from, row_stride, rows, features_, weights_.get(), scaled_.get());
      gemm_upper<T>(features_, rows, {scaled_.get(), 1, features_}, {from, row_stride, 1}, block,
                    ld, /*accumulate=*/row > 0, gemm_.get());
    }
    if (mirror) mirror_upper(block, ld, features_);
  }

 private:
  int64_t features_;
  std::unique_ptr<T[]> weights_, scaled_;
  std::unique_ptr<char[]> gemm_;
};

}  // namespace dpk
