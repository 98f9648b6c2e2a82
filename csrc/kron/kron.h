// Kronecker preconditioning: factors onto rows and matrices, and the second moments they come from.
//
// All arithmetic is products of common/gemm.h, which has the instruction sets, and copies; so there
// are no kernels of this room's own. T is float or double.
#pragma once

#include <cstdint>

#include "common/executor.h"

namespace dpk {

// One side of a preconditioner: a symmetric operator on vectors of `size` elements.
enum class Form { identity, diagonal, full, low_rank };

template <class T>
struct Side {
  Form form;
  int64_t size;
  int64_t rank;    // of low_rank
  const T* data;   // diagonal [size], matrix [size, size] or vectors [size, rank], row-major
  const T* gains;  // of low_rank: [rank], values - tail
  T tail;
};

// `count` matrices of rows x cols, row-major and one after the other.
template <class T>
struct Matrices {
  const T* x;
  T* out;
  int64_t count, rows, cols;
};

// out = tail x + ((x V) * gains) V^T for `rows` rows x, x_stride apart, of side.size elements, or
// one less if `bias`: a 1 is appended to each then. out is [rows, side.size], contiguous.
template <class T>
void apply_low_rank(const Side<T>& side, bool bias, const T* x, int64_t x_stride, int64_t rows,
                    T* out, void* workspace, const Executor& executor);

// Bytes of workspace that apply_low_rank needs.
template <class T>
int64_t low_rank_workspace_bytes(const Side<T>& side, const Executor& executor);

// out = U_left X U_right for each matrix; threads share the matrices out.
template <class T>
void apply_both(const Side<T>& left, const Side<T>& right, const Matrices<T>& matrices,
                void* workspace, const Executor& executor);

template <class T>
int64_t both_workspace_bytes(const Side<T>& left, const Side<T>& right, const Matrices<T>& matrices,
                             const Executor& executor);

// Rows of a second moment: element (s, t, i) is data[s * segment_stride + t * row_stride + i *
// col_stride], for `segments` of `length` rows each.
template <class T>
struct MomentRows {
  const T* data;
  int64_t segments, length, size;
  int64_t segment_stride, row_stride, col_stride;

  int64_t count() const { return segments * length; }
};

// out = scale * the sum of [x, 1][x, 1]^T over all rows, both triangles; without the 1 unless
// `bias`. out is [n, n], n being rows.size (+ 1).
template <class T>
void second_moment(const MomentRows<T>& rows, bool bias, double scale, T* out, void* workspace,
                   const Executor& executor);

template <class T>
int64_t second_moment_workspace_bytes(const MomentRows<T>& rows, bool bias,
                                      const Executor& executor);

// A convolution over contiguous [batch, channels, size[0], size[1], size[2]]; fewer axes are
// sizes of 1 in front.
struct Convolution {
  int64_t batch, channels, groups;
  int64_t size[3], kernel[3], stride[3], padding[3], dilation[3], out[3];

  int64_t positions() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t patch() const { return channels / groups * taps(); }
};

// The same over the patches of each group: out is [groups, n, n], in the weight's order.
template <class T>
void conv_second_moment(const Convolution& shape, const T* x, bool bias, double scale, T* out,
                        void* workspace, const Executor& executor);

template <class T>
int64_t conv_workspace_bytes(const Convolution& shape, bool bias, const Executor& executor);

}  // namespace dpk
