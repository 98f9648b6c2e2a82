"""The Triton kernels of Kronecker preconditioning; ``triton_impl.py`` launches them.

Products are exact in float32 (``input_precision="ieee"``): a factor goes through an inverse root,
which multiplies what TF32 would lose. Half-precision operands are multiplied as they are, their
products are exact in the float32 sum. Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _with_ones(values, row, col, rows, size, BIAS: tl.constexpr):
    """Put the 1 that augments every row behind its last element."""
    if BIAS:
        last = (row < rows)[:, None] & (col == size)[None, :]
        one = tl.full(values.shape, 1.0, tl.float32).to(values.dtype)
        values = tl.where(last, one, values)
    return values


@triton.jit
def _rows(x, row, col, rows, size, row_stride, col_stride, BIAS: tl.constexpr):
    """Tile of a matrix of any strides, zero outside."""
    inside = (row < rows)[:, None] & (col < size)[None, :]
    at = x + row[:, None] * row_stride + col[None, :] * col_stride
    return _with_ones(tl.load(at, mask=inside, other=0.0), row, col, rows, size, BIAS)


@triton.jit
def _store_tile(sums, total, row_tile, col_tile, size, BLOCK: tl.constexpr):
    """Store a tile of a ``[size, size]`` matrix."""
    row = row_tile * BLOCK + tl.arange(0, BLOCK)
    col = col_tile * BLOCK + tl.arange(0, BLOCK)
    inside = (row < size)[:, None] & (col < size)[None, :]
    tl.store(sums + row[:, None] * size + col[None, :], total, mask=inside)


@triton.jit(
    do_not_specialize=["rows", "size", "row_stride", "col_stride", "rows_per_split"],
    do_not_specialize_on_alignment=["partials"],
)
def moment_kernel(
    x,
    partials,
    rows: tl.int64,
    size: tl.int64,
    row_stride: tl.int64,
    col_stride: tl.int64,
    rows_per_split: tl.int64,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``partials[s]``: sum of ``[x, 1][x, 1]^T`` over the rows of split s, one upper tile of it."""
    row_tile, col_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    if row_tile <= col_tile:
        left_col = row_tile * BLOCK + tl.arange(0, BLOCK)
        right_col = col_tile * BLOCK + tl.arange(0, BLOCK)
        dtype: tl.constexpr = partials.dtype.element_ty
        total = tl.zeros([BLOCK, BLOCK], dtype)
        first = split * rows_per_split
        last = tl.minimum(first + rows_per_split, rows)
        for start in range(first, last, DEPTH):
            row = start + tl.arange(0, DEPTH)
            left = _rows(x, row, left_col, last, size, row_stride, col_stride, BIAS)
            right = _rows(x, row, right_col, last, size, row_stride, col_stride, BIAS)
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee", out_dtype=dtype)
        n = size + BIAS
        _store_tile(partials + split * n * n, total, row_tile, col_tile, n, BLOCK)


@triton.jit
def _axis(position, tap, geometry, AXIS: tl.constexpr):
    """Return where a tap lies along an axis of the image, and whether that is inside."""
    stride, padding = tl.load(geometry + 9 + AXIS), tl.load(geometry + 12 + AXIS)
    dilation = tl.load(geometry + 15 + AXIS)
    at = position[:, None] * stride - padding + tap[None, :] * dilation
    return at, (at >= 0) & (at < tl.load(geometry + 3 + AXIS))


@triton.jit
def _patches(x, row, col, rows, size, group, geometry, BIAS: tl.constexpr):
    """Tile of the patch matrix of one group: row is sample and position, column channel and tap.

    geometry: channels, channels of a group, samples, then 3 sizes, kernel, stride, padding,
    dilation and output sizes.
    """
    channels, group_channels = tl.load(geometry), tl.load(geometry + 1)
    size_1, size_2 = tl.load(geometry + 4), tl.load(geometry + 5)
    kernel_0, kernel_1 = tl.load(geometry + 6), tl.load(geometry + 7)
    kernel_2 = tl.load(geometry + 8)
    out_0, out_1, out_2 = tl.load(geometry + 18), tl.load(geometry + 19), tl.load(geometry + 20)
    sample = row // (out_0 * out_1 * out_2)
    channel = group * group_channels + col // (kernel_0 * kernel_1 * kernel_2)
    at_0, in_0 = _axis(
        row // (out_1 * out_2) % out_0, col // (kernel_1 * kernel_2) % kernel_0, geometry, 0
    )
    at_1, in_1 = _axis(row // out_2 % out_1, col // kernel_2 % kernel_1, geometry, 1)
    at_2, in_2 = _axis(row % out_2, col % kernel_2, geometry, 2)
    image = sample[:, None] * channels + channel[None, :]
    at = ((image * tl.load(geometry + 3) + at_0) * size_1 + at_1) * size_2 + at_2
    inside = (row < rows)[:, None] & (col < size)[None, :] & in_0 & in_1 & in_2
    return _with_ones(tl.load(x + at, mask=inside, other=0.0), row, col, rows, size, BIAS)


@triton.jit(
    do_not_specialize=["rows", "size", "rows_per_split", "splits"],
    do_not_specialize_on_alignment=["partials", "geometry"],
)
def conv_moment_kernel(
    x,
    partials,
    geometry,
    rows: tl.int64,
    size: tl.int64,
    rows_per_split: tl.int64,
    splits: tl.int32,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``partials[s, g]``: the same over the patches of group g, which are formed in registers."""
    row_tile, col_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group, split = tl.program_id(2).to(tl.int64) // splits, tl.program_id(2).to(tl.int64) % splits
    if row_tile <= col_tile:
        left_col = row_tile * BLOCK + tl.arange(0, BLOCK)
        right_col = col_tile * BLOCK + tl.arange(0, BLOCK)
        dtype: tl.constexpr = partials.dtype.element_ty
        total = tl.zeros([BLOCK, BLOCK], dtype)
        first = split * rows_per_split
        last = tl.minimum(first + rows_per_split, rows)
        for start in range(first, last, DEPTH):
            row = start + tl.arange(0, DEPTH)
            left = _patches(x, row, left_col, last, size, group, geometry, BIAS)
            right = _patches(x, row, right_col, last, size, group, geometry, BIAS)
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee", out_dtype=dtype)
        n = size + BIAS
        groups = tl.num_programs(2).to(tl.int64) // splits
        sums = partials + (split * groups + group) * n * n
        _store_tile(sums, total, row_tile, col_tile, n, BLOCK)


@triton.jit(
    do_not_specialize=["rows", "size", "row_stride", "col_stride", "rank"],
    do_not_specialize_on_alignment=["gains"],
)
def low_rank_kernel(
    out,
    x,
    vectors,
    gains,
    tail: tl.float64,
    rows: tl.int64,
    size: tl.int64,
    row_stride: tl.int64,
    col_stride: tl.int64,
    rank: tl.int64,
    BIAS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``tail x + ((x V) * gains) V^T`` for BLOCK_M rows: x V stays in registers in between."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    of_rank = tl.arange(0, RANK).to(tl.int64)
    n = size + BIAS
    tail = (tl.zeros((), tl.float64) + tail).to(dtype)
    inner = tl.zeros([BLOCK_M, RANK], dtype)
    for start in range(0, n, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N).to(tl.int64)
        values = _rows(x, row, col, rows, size, row_stride, col_stride, BIAS).to(dtype)
        basis = _rows(vectors, col, of_rank, n, rank, rank, 1, False)
        inner = tl.dot(values, basis, inner, input_precision="ieee", out_dtype=dtype)
    inner *= tl.load(gains + of_rank, mask=of_rank < rank, other=0.0)[None, :]
    for start in range(0, n, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N).to(tl.int64)
        values = _rows(x, row, col, rows, size, row_stride, col_stride, BIAS).to(dtype)
        basis = _rows(vectors, of_rank, col, rank, n, 1, rank, False)
        total = tl.dot(inner, basis, tail * values, input_precision="ieee", out_dtype=dtype)
        inside = (row < rows)[:, None] & (col < n)[None, :]
        tl.store(out + row[:, None] * n + col[None, :], total, mask=inside)
