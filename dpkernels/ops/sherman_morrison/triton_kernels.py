"""The Triton kernels of Sherman-Morrison; ``triton_step.py`` and ``triton_window.py`` start them.

Sizes and strides come in vectors of VECTOR elements, which tells the compiler that addresses and
ends of rows are multiples of 16 bytes. Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["vectors", "blocks_per_program"],
    do_not_specialize_on_alignment=["partials"],
)
def step_dots_kernel(
    momentum,
    grads,
    partials,
    vectors: tl.int64,
    blocks_per_program: tl.int32,
    beta: tl.float64,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``partials[p]``: M.G and |M|^2 of program p's elements, M the momentum that is to come."""
    n = vectors * VECTOR
    program = tl.program_id(0).to(tl.int64)
    # The interpreter passes Python floats; adding them to a float64 zero keeps all their bits.
    beta = tl.zeros((), tl.float64) + beta
    dots = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    for block in range(blocks_per_program):
        at = (program * blocks_per_program + block) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(grads + at, mask=at < n, other=0.0).to(tl.float64)
        m = beta * tl.load(momentum + at, mask=at < n, other=0.0).to(tl.float64) + (1.0 - beta) * g
        dots += m * g
        squares += m * m
    tl.store(partials + 2 * program, tl.sum(dots, 0))
    tl.store(partials + 2 * program + 1, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["partials", "result"])
def step_coefficients_kernel(
    partials,
    result,
    count: tl.int64,
    rho: tl.float64,
    lr: tl.float64,
    limit: tl.float64,
    BLOCK: tl.constexpr,
):
    """``result``: M.G, |M|^2, whether to step, and the step's coefficients along G and M."""
    lane = tl.arange(0, BLOCK)
    dots = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        at = start + lane
        dots += tl.load(partials + 2 * at, mask=at < count, other=0.0)
        squares += tl.load(partials + 2 * at + 1, mask=at < count, other=0.0)
    dot, square = tl.sum(dots, 0), tl.sum(squares, 0)
    zero = tl.zeros((), tl.float64)
    along_grad = (zero + lr) / (zero + rho)
    along_momentum = along_grad * (dot / (rho + square))
    # False for NaN, too.
    finite = (tl.abs(dot) < float("inf")) & (square < float("inf"))
    finite = finite & (along_grad <= limit) & (tl.abs(along_momentum) <= limit)
    tl.store(result, dot)
    tl.store(result + 1, square)
    tl.store(result + 2, finite.to(tl.float64))
    tl.store(result + 3, along_grad)
    tl.store(result + 4, along_momentum)


@triton.jit(do_not_specialize=["vectors"], do_not_specialize_on_alignment=["result"])
def step_write_kernel(
    theta,
    momentum,
    grads,
    result,
    vectors: tl.int64,
    beta: tl.float64,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``M <- beta M + (1 - beta) G``; ``theta <- theta - a G + b M``; nothing if not finite."""
    dtype: tl.constexpr = theta.dtype.element_ty
    # A step that is refused has no elements.
    n = vectors * tl.load(result + 2).to(tl.int64) * VECTOR
    # Backwards: what the first pass read last is still in L2.
    block = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    along_grad = tl.load(result + 3).to(dtype)
    along_momentum = tl.load(result + 4).to(dtype)
    beta = tl.zeros((), tl.float64) + beta
    g = tl.load(grads + at, mask=inside, other=0.0).to(dtype)
    m = tl.load(momentum + at, mask=inside, other=0.0)
    m = beta.to(dtype) * m + (1.0 - beta).to(dtype) * g
    tl.store(momentum + at, m, mask=inside)
    t = tl.load(theta + at, mask=inside, other=0.0)
    tl.store(theta + at, t - (along_grad * g - along_momentum * m), mask=inside)


@triton.jit(
    do_not_specialize=["row_vectors"],
    do_not_specialize_on_alignment=["u", "v", "products", "partials"],
)
def both_products_kernel(
    matrix,
    u,
    v,
    products,
    partials,
    row_vectors: tl.int64,
    VECTOR: tl.constexpr,
    BOTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``products = H u`` and, if BOTH, ``partials[p]`` = program p's rows of H times v."""
    n = row_vectors * VECTOR
    dtype: tl.constexpr = matrix.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    totals = tl.zeros([ROWS, COLUMNS], dtype)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < n)[:, None] & (column < n)[None, :]
        h = tl.load(matrix + row[:, None] * n + column[None, :], mask=inside, other=0.0)
        totals += h * tl.load(u + column, mask=column < n, other=0.0)[None, :]
        if BOTH:
            left = tl.load(v + row, mask=row < n, other=0.0)
            tl.store(partials + program * n + column, tl.sum(h * left[:, None], 0), mask=column < n)
    tl.store(products + row, tl.sum(totals, 1), mask=row < n)


@triton.jit(do_not_specialize=["row_vectors"], do_not_specialize_on_alignment=["p", "q", "regular"])
def subtract_outer_kernel(
    matrix,
    p,
    q,
    regular,
    row_vectors: tl.int64,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``H <- H - p q^T`` for one tile of H; nothing unless ``regular``."""
    n = row_vectors * VECTOR
    column_blocks = tl.cdiv(n, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    row = (program // column_blocks) * ROWS + tl.arange(0, ROWS)
    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    # An update that is refused has no rows.
    inside = (row < n * tl.load(regular).to(tl.int64))[:, None] & (column < n)[None, :]
    left = tl.load(p + row, mask=row < n, other=0.0)
    right = tl.load(q + column, mask=column < n, other=0.0)
    at = matrix + row[:, None] * n + column[None, :]
    h = tl.load(at, mask=inside, other=0.0)
    tl.store(at, h - left[:, None] * right[None, :], mask=inside)


@triton.jit(
    do_not_specialize=["k", "column_vectors", "u_vectors", "v_vectors", "blocks_per_program"],
    do_not_specialize_on_alignment=["partials"],
)
def gram_kernel(
    u,
    v,
    grads,
    partials,
    k: tl.int64,
    column_vectors: tl.int64,
    u_vectors: tl.int64,
    v_vectors: tl.int64,
    blocks_per_program: tl.int32,
    VECTOR: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``partials[p]``: float64 ``[k, k + 1]``, ``[V U^T, V g]`` over program p's columns."""
    d = column_vectors * VECTOR
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS).to(tl.int64)
    gram = tl.zeros([ROWS, ROWS], tl.float64)
    projected = tl.zeros([ROWS], tl.float64)
    for block in range(blocks_per_program):
        column = (program * blocks_per_program + block) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < k)[:, None] & (column < d)[None, :]
        right = tl.load(
            u + row[:, None] * (u_vectors * VECTOR) + column[None, :], mask=inside, other=0.0
        )
        left = right
        if not SYMMETRIC:
            left = tl.load(
                v + row[:, None] * (v_vectors * VECTOR) + column[None, :], mask=inside, other=0.0
            )
        left = left.to(tl.float64)
        gram = tl.dot(
            left,
            tl.trans(right.to(tl.float64)),
            acc=gram,
            input_precision="ieee",
            out_dtype=tl.float64,
        )
        g = tl.load(grads + column, mask=column < d, other=0.0)
        projected += tl.sum(left * g.to(tl.float64)[None, :], 1)
    out = partials + program * (k * (k + 1)) + row * (k + 1)
    inside = (row < k)[:, None] & (row < k)[None, :]
    tl.store(out[:, None] + row[None, :], gram, mask=inside)
    tl.store(out + k, projected, mask=row < k)


@triton.jit(
    do_not_specialize=["k", "column_vectors", "row_vectors", "slices", "blocks_per_slice"],
    do_not_specialize_on_alignment=["partials"],
)
def project_kernel(
    window,
    grads,
    partials,
    k: tl.int64,
    column_vectors: tl.int64,
    row_vectors: tl.int64,
    slices: tl.int32,
    blocks_per_slice: tl.int32,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``partials[s, i]``: float64, row i times g over the columns of slice s."""
    d, row_stride = column_vectors * VECTOR, row_vectors * VECTOR
    # Slices vary slowest, so that the rows of a block share g in L2.
    row_blocks = tl.cdiv(k, ROWS)
    program = tl.program_id(0).to(tl.int64)
    part = program // row_blocks
    row = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    totals = tl.zeros([ROWS, COLUMNS], tl.float64)
    for block in range(blocks_per_slice):
        column = (part * blocks_per_slice + block) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < k)[:, None] & (column < d)[None, :]
        w = tl.load(window + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
        g = tl.load(grads + column, mask=column < d, other=0.0)
        totals += w.to(tl.float64) * g.to(tl.float64)[None, :]
    tl.store(partials + part * k + row, tl.sum(totals, 1), mask=row < k)


@triton.jit(
    do_not_specialize=["k", "column_vectors", "row_vectors"],
    do_not_specialize_on_alignment=["weights"],
)
def combine_kernel(
    out,
    window,
    grads,
    weights,
    k: tl.int64,
    column_vectors: tl.int64,
    row_vectors: tl.int64,
    scale: tl.float64,
    VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out = scale * (g - sum_i weights[i] w_i)`` for COLUMNS columns."""
    d, row_stride = column_vectors * VECTOR, row_vectors * VECTOR
    # Backwards: what the pass before read last is still in L2.
    block = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < d
    total = tl.load(grads + column, mask=inside, other=0.0).to(tl.float64)
    for i in range(k):
        w = tl.load(window + i * row_stride + column, mask=inside, other=0.0)
        total -= tl.load(weights + i) * w.to(tl.float64)
    total *= scale
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)
