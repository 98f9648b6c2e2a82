"""The Triton kernels of clipping; ``triton_impl.py`` chooses their tiles and launches them.

Sizes and strides come in vectors of VECTOR elements, which tells the compiler that addresses and
ends of rows are multiples of 16 bytes. Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dpkernels.ops.clip.reference import LOST_SQUARES

_LOST_SQUARES = tl.constexpr(LOST_SQUARES)


@triton.jit
def _factor(sq_norms, max_norm, gamma, cap, DTYPE: tl.constexpr):
    """``min(cap, C / (norm + gamma))`` in DTYPE, rounded towards zero; 0 for an invalid norm.

    cap is 1 and gamma 0 for clipping; a cap of the largest number of DTYPE normalises.
    """
    exact = max_norm / (tl.sqrt(tl.where(sq_norms >= 0, sq_norms, 0.0) + _LOST_SQUARES) + gamma)
    exact = tl.where(exact < cap, exact, cap)
    # False for NaN, too.
    exact = tl.where((sq_norms >= 0) & (sq_norms < float("inf")), exact, 0.0)
    rounded = exact.to(DTYPE)
    if DTYPE == tl.float32:
        # The float just below a positive one has the bits just below.
        below = (rounded.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        rounded = tl.where(rounded.to(tl.float64) > exact, below, rounded)
    return rounded


# Triton compiles a kernel apart for 16-byte aligned pointers. Only for the gradients is it worth
# the compilation: the rest is small, so it is taken as it comes.
@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["sq_norms", "factors"])
def factors_kernel(
    sq_norms,
    factors,
    n: tl.int64,
    max_norm: tl.float64,
    gamma: tl.float64,
    cap: tl.float64,
    BLOCK: tl.constexpr,
):
    """Clip factors of n squared norms under one bound."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(sq_norms + index, mask=index < n, other=0.0)
    result = _factor(values, max_norm, gamma, cap, factors.dtype.element_ty)
    tl.store(factors + index, result, mask=index < n)


@triton.jit(
    do_not_specialize=["rows", "column_vectors", "row_vectors", "tiles_per_program"],
    do_not_specialize_on_alignment=["partial_sums", "sq_norms", "factors"],
)
def clip_and_sum_kernel(
    grads,
    partial_sums,
    sq_norms,
    factors,
    rows: tl.int64,
    column_vectors: tl.int64,
    row_vectors: tl.int64,
    tiles_per_program: tl.int32,
    max_norm: tl.float64,
    gamma: tl.float64,
    cap: tl.float64,
    VECTOR: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Partial sum of a program's rows, which fit in a tile: norms, factors and sum in one read."""
    dtype: tl.constexpr = factors.dtype.element_ty
    columns, row_stride = column_vectors * VECTOR, row_vectors * VECTOR
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_B, BLOCK_D], dtype)
    for tile in range(tiles_per_program):
        row = (program * tiles_per_program + tile) * BLOCK_B + tl.arange(0, BLOCK_B)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(grads + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
        wide = x.to(tl.float64)
        squares = tl.sum(wide * wide, 1)
        factor = _factor(squares, max_norm, gamma, cap, dtype)
        tl.store(sq_norms + row, squares, mask=row < rows)
        tl.store(factors + row, factor, mask=row < rows)
        total += tl.where(factor[:, None] != 0, x.to(dtype), 0.0) * factor[:, None]
    out = partial_sums + program * columns + column
    tl.store(out, tl.sum(total, 0), mask=column < columns)


@triton.jit(
    do_not_specialize=["rows", "column_vectors", "row_vectors", "splits", "blocks_per_split"],
    do_not_specialize_on_alignment=["partial_norms"],
)
def sq_norms_kernel(
    grads,
    partial_norms,
    rows: tl.int64,
    column_vectors: tl.int64,
    row_vectors: tl.int64,
    splits: tl.int32,
    blocks_per_split: tl.int64,
    VECTOR: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``partial_norms[s, b]``: sum of squares of row b over the columns of split s."""
    # Splits vary fastest, so that the rows are finished, and left in L2, in order.
    split = tl.program_id(0).to(tl.int64) % splits
    row = (tl.program_id(0).to(tl.int64) // splits) * BLOCK_B + tl.arange(0, BLOCK_B)
    columns, row_stride = column_vectors * VECTOR, row_vectors * VECTOR
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(columns, BLOCK_D))
    total = tl.zeros([BLOCK_B, BLOCK_D], tl.float64)
    for block in range(first, last):
        column = block * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(grads + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
        wide = x.to(tl.float64)
        total += wide * wide
    tl.store(partial_norms + split * rows + row, tl.sum(total, 1), mask=row < rows)


@triton.jit(
    do_not_specialize=["rows", "column_vectors", "row_vectors", "splits", "rows_per_split"],
    do_not_specialize_on_alignment=["factors", "partial_sums"],
)
def weighted_sum_kernel(
    grads,
    factors,
    partial_sums,
    rows: tl.int64,
    column_vectors: tl.int64,
    row_vectors: tl.int64,
    splits: tl.int32,
    rows_per_split: tl.int64,
    VECTOR: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``partial_sums[s]``: weighted sum of the rows of split s, from the last to the first."""
    dtype: tl.constexpr = factors.dtype.element_ty
    columns, row_stride = column_vectors * VECTOR, row_vectors * VECTOR
    column_blocks = tl.cdiv(columns, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    split = splits - 1 - program // column_blocks
    column = (program % column_blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, rows)
    total = tl.zeros([BLOCK_B, BLOCK_D], dtype)
    for done in range(0, last - first, BLOCK_B):
        row = last - done - BLOCK_B + tl.arange(0, BLOCK_B)
        factor = tl.load(factors + row, mask=row >= first, other=0.0)[:, None]
        inside = (row >= first)[:, None] & (column < columns)[None, :]
        x = tl.load(grads + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
        total += tl.where(factor != 0, x.to(dtype), 0.0) * factor
    out = partial_sums + split * columns + column
    tl.store(out, tl.sum(total, 0), mask=column < columns)


@triton.jit(
    do_not_specialize=["rows", "columns"],
    do_not_specialize_on_alignment=["out", "partials"],
)
def add_rows_kernel(
    out,
    partials,
    rows: tl.int64,
    columns: tl.int64,
    ACCUMULATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``out[d] (+)= sum_p partials[p, d]``."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], partials.dtype.element_ty)
    for start in range(0, rows, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = partials + row[:, None].to(tl.int64) * columns + column[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(out + column, mask=column < columns)
    tl.store(out + column, result, mask=column < columns)
