// Products of matrices in one thread, for kernels that split their own work over the threads and
// want the product's operands and result to stay in that thread's cache.
//
// Operands have any strides, so that a transpose, a slice or a patch matrix needs no copy.
#pragma once

#include <cstdint>

namespace dpk {

// Element (i, j) is data[i * row_stride + j * col_stride].
template <class T>
struct MatrixView {
  const T* data;
  int64_t row_stride;
  int64_t col_stride;

  MatrixView transposed() const { return {data, col_stride, row_stride}; }
};

// What is packed at a time: kRows x kDepth of a (210 KiB, so that it stays in a second-level cache
// of 512 KiB), kDepth x kCols of b. kRows is a multiple of every tile's rows (6 and 14), kCols of
// its columns. A panel of b, kDepth x 16 floats, takes 20 of 32 KiB of the first-level cache.
template <class T>
struct GemmBlocks {
  static constexpr int64_t kRows = sizeof(T) == 4 ? 168 : 84;
  static constexpr int64_t kDepth = 320;
  static constexpr int64_t kCols = 1024;
  static constexpr int64_t kPackedA = kRows * kDepth;
  static constexpr int64_t kPackedB = kDepth * kCols;
};

// How many bytes of workspace the functions below need, whatever the sizes. Without one they take
// memory that the thread keeps from its first call to its end: pages that are new in every call
// cost as much as a small product.
template <class T>
int64_t gemm_workspace_bytes();

// c = a b, or c += a b: c is m x n, row-major, rows ldc apart; a is m x k, b is k x n.
// T is float or double. Does not read c unless `accumulate`; k may be 0.
template <class T>
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c, int64_t ldc,
          bool accumulate, void* workspace = nullptr);

// The upper triangle of c = a b (n x n), for products that are known to be symmetric; elements
// below the diagonal are left as they are, except inside the tiles that the diagonal crosses,
// whose values there are unspecified. Half of the work.
template <class T>
void gemm_upper(int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c, int64_t ldc,
                bool accumulate, void* workspace = nullptr);

}  // namespace dpk
