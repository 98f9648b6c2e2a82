"""The Triton kernels of the linear layer; ``triton_linear.py`` launches them.

Rows are positions, neighbours in a row are neighbours in memory, and addresses are int64. Inputs
are float32 or float64, and so are their products: tensor cores round towards zero when they
accumulate, so a norm would come out low. Chains of BLOCK_K products are added up in float64, as on
the CPU. Pointers are taken as they come: as strides are not known to be multiples of anything,
nothing would be gained by compiling apart for aligned ones.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, row, rows, row_stride, column, columns):
    """Rows and columns of x as [row, column]; zero beyond the ends."""
    at = x + row[:, None] * row_stride + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _dots(x, s, t, positions, row_stride, width, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """The float64 tile ``x[s] . x[t]`` of a Gram matrix."""
    total = tl.zeros([BLOCK_T, BLOCK_T], tl.float64)
    for start in range(0, width, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        left = _tile(x, s, positions, row_stride, column, width)
        right = _tile(x, t, positions, row_stride, column, width)
        dots = tl.dot(left, tl.trans(right), input_precision="ieee", out_dtype=x.dtype.element_ty)
        total += dots.to(tl.float64)
    return total


@triton.jit(
    do_not_specialize=["positions", "pairs", "a_stride", "d_stride", "inputs", "outputs"],
    do_not_specialize_on_alignment=["a", "d", "a_lengths", "d_lengths", "partials"],
)
def gram_kernel(
    a,
    d,
    a_lengths,
    d_lengths,
    partials,
    positions: tl.int64,
    pairs: tl.int32,
    a_stride: tl.int64,
    d_stride: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One pair of blocks of positions of one sample: sum of products, and reach of their errors.

    ``partials[b, pair]``: ``sum (a_s . a_t)(d_s . d_t)`` over both orders of s and t, then ``sum
    |a_s . a_t| |d_s| |d_t| + |a_s| |a_t| |d_s . d_t|`` over s != t: terms with s = t are squares
    of the float64 lengths.
    """
    program = tl.program_id(0).to(tl.int64)
    sample = program // pairs
    pair = program % pairs
    # Pair number q (q + 1) / 2 + p is blocks p <= q. The root is off by less than one.
    q = ((tl.sqrt((8 * pair + 1).to(tl.float64)) - 1) / 2).to(tl.int64)
    q = tl.where(q * (q + 1) // 2 > pair, q - 1, q)
    q = tl.where((q + 1) * (q + 2) // 2 <= pair, q + 1, q)
    p = pair - q * (q + 1) // 2
    s = p * BLOCK_T + tl.arange(0, BLOCK_T)
    t = q * BLOCK_T + tl.arange(0, BLOCK_T)
    first = sample * positions
    aa = _dots(a + first * a_stride, s, t, positions, a_stride, inputs, BLOCK_T, BLOCK_K)
    dd = _dots(d + first * d_stride, s, t, positions, d_stride, outputs, BLOCK_T, BLOCK_K)
    a_s = tl.load(a_lengths + first + s, mask=s < positions, other=0.0)[:, None]
    a_t = tl.load(a_lengths + first + t, mask=t < positions, other=0.0)[None, :]
    d_s = tl.load(d_lengths + first + s, mask=s < positions, other=0.0)[:, None]
    d_t = tl.load(d_lengths + first + t, mask=t < positions, other=0.0)[None, :]
    above = s[:, None] < t[None, :]
    own = tl.where(s[:, None] == t[None, :], a_s * d_s * a_t * d_t, 0.0)
    products = tl.sum(tl.where(above, 2 * aa * dd, own))
    reach = tl.sum(tl.where(above, 2 * (tl.abs(aa) * d_s * d_t + tl.abs(dd) * a_s * a_t), 0.0))
    tl.store(partials + 2 * program, products)
    tl.store(partials + 2 * program + 1, reach)


@triton.jit(
    do_not_specialize=["positions", "a_stride", "d_stride", "inputs", "outputs"],
    do_not_specialize_on_alignment=["a", "d", "partials"],
)
def gradient_kernel(
    a,
    d,
    partials,
    positions: tl.int64,
    a_stride: tl.int64,
    d_stride: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``partials[b, block]``: sum of squares of one block of ``sum_t d_t a_t^T``."""
    program = tl.program_id(0).to(tl.int64)
    i_blocks = tl.cdiv(inputs, BLOCK_I)
    blocks = tl.cdiv(outputs, BLOCK_O) * i_blocks
    first = (program // blocks) * positions
    o = (program % blocks) // i_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (program % blocks) % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float64)
    for start in range(0, positions, BLOCK_K):
        t = start + tl.arange(0, BLOCK_K)
        errors = _tile(d + first * d_stride, t, positions, d_stride, o, outputs)
        activations = _tile(a + first * a_stride, t, positions, a_stride, i, inputs)
        dots = tl.dot(
            tl.trans(errors), activations, input_precision="ieee", out_dtype=a.dtype.element_ty
        )
        total += dots.to(tl.float64)
    tl.store(partials + program, tl.sum(total * total))


@triton.jit(
    do_not_specialize=["positions", "a_stride", "d_stride", "inputs", "outputs"],
    do_not_specialize_on_alignment=["a", "d", "again", "partials"],
)
def exact_gradient_kernel(
    a,
    d,
    again,
    partials,
    positions: tl.int64,
    a_stride: tl.int64,
    d_stride: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The same in float64 throughout, for samples with ``again[b]``; 0 for the others."""
    program = tl.program_id(0).to(tl.int64)
    i_blocks = tl.cdiv(inputs, BLOCK_I)
    blocks = tl.cdiv(outputs, BLOCK_O) * i_blocks
    sample = program // blocks
    o = (program % blocks) // i_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (program % blocks) % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float64)
    end = tl.where(tl.load(again + sample) != 0, positions, 0)
    for t in range(0, end):
        row = sample * positions + t
        errors = tl.load(d + row * d_stride + o, mask=o < outputs, other=0.0).to(tl.float64)
        activations = tl.load(a + row * a_stride + i, mask=i < inputs, other=0.0).to(tl.float64)
        total += errors[:, None] * activations[None, :]
    tl.store(partials + program, tl.sum(total * total))


@triton.jit(
    do_not_specialize=[
        *("rows", "positions", "rows_per_split", "a_stride", "d_stride"),
        *("inputs", "outputs", "splits"),
    ],
    do_not_specialize_on_alignment=["a", "d", "factors", "apart", "partials", "bias_partials"],
)
def weighted_product_kernel(
    a,
    d,
    factors,
    apart,
    partials,
    bias_partials,
    rows: tl.int64,
    positions: tl.int64,
    splits: tl.int64,
    rows_per_split: tl.int64,
    a_stride: tl.int64,
    d_stride: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    HOMOGENEOUS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of ``sum_r factors[r] d_r a_r^T`` over the rows of one split, and of the bias.

    Programs of the first block of inputs write the bias: ``sum_r factors[r] d_r``, times the
    activation behind the inputs if HOMOGENEOUS, in float64. Of samples with ``apart[b]`` only that.
    """
    dtype: tl.constexpr = factors.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    # A layer without inputs has a bias: one block of none of them.
    i_blocks = tl.maximum(tl.cdiv(inputs, BLOCK_I), 1)
    split = program % splits
    o = program // splits // i_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    i_block = program // splits % i_blocks
    i = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], dtype)
    bias = tl.zeros([BLOCK_O], tl.float64)
    last = tl.minimum((split + 1) * rows_per_split, rows)
    for start in range(split * rows_per_split, last, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        weight = tl.load(factors + row // positions, mask=row < last, other=0.0)
        alone = tl.load(apart + row // positions, mask=row < last, other=0) != 0
        used = (weight != 0)[:, None]
        errors = tl.where(used, _tile(d, row, last, d_stride, o, outputs), 0.0)
        if i_block == 0:
            scale = weight.to(tl.float64)
            if HOMOGENEOUS:
                constant = tl.load(a + row * a_stride + inputs, mask=row < last, other=0.0)
                scale *= tl.where(weight != 0, constant, 0.0).to(tl.float64)
            bias += tl.sum(errors.to(tl.float64) * scale[:, None], 0)
        errors *= tl.where(alone, 0.0, weight)[:, None]
        activations = tl.where(used, _tile(a, row, last, a_stride, i, inputs), 0.0)
        total += tl.dot(tl.trans(errors), activations, input_precision="ieee", out_dtype=dtype)
    at = partials + (split * outputs + o[:, None]) * inputs + i[None, :]
    tl.store(at, total, mask=(o < outputs)[:, None] & (i < inputs)[None, :])
    if i_block == 0:
        tl.store(bias_partials + split * outputs + o, bias, mask=o < outputs)


@triton.jit(
    do_not_specialize=["batch", "positions", "a_stride", "d_stride", "inputs", "outputs"],
    do_not_specialize_on_alignment=["a", "d", "factors", "apart", "out"],
)
def apart_sum_kernel(
    a,
    d,
    factors,
    apart,
    out,
    batch: tl.int64,
    positions: tl.int64,
    a_stride: tl.int64,
    d_stride: tl.int64,
    inputs: tl.int64,
    outputs: tl.int64,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Add ``factors[b] sum_t d_bt a_bt^T`` of samples with ``apart[b]`` to one block of ``out``.

    Each is added up in float64 and rounded once.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    i_blocks = tl.cdiv(inputs, BLOCK_I)
    o = program // i_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    i = program % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    at = out + o[:, None] * inputs + i[None, :]
    inside = (o < outputs)[:, None] & (i < inputs)[None, :]
    for sample in range(0, batch):
        factor = tl.load(factors + sample).to(tl.float64)
        alone = tl.load(apart + sample) != 0
        if alone & (factor != 0):
            total = tl.zeros([BLOCK_O, BLOCK_I], tl.float64)
            for t in range(0, positions):
                row = sample * positions + t
                errors = tl.load(d + row * d_stride + o, mask=o < outputs, other=0.0)
                activations = tl.load(a + row * a_stride + i, mask=i < inputs, other=0.0)
                total += (errors.to(tl.float64) * factor)[:, None] * activations.to(tl.float64)[
                    None, :
                ]
            before = tl.load(at, mask=inside, other=0.0)
            tl.store(at, before + total.to(dtype), mask=inside)
