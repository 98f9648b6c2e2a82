"""The Triton kernels of softmax-regression records; ``triton_impl.py`` launches them.

Tables are ``[N, C]``, by record. Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dpkernels.ops.clip.reference import LOST_SQUARES
from dpkernels.ops.clip.triton_kernels import _factor as clip_factor

_LOST_SQUARES = tl.constexpr(LOST_SQUARES)


@triton.jit
def _logits(x, theta, row, inside, row_stride, features, classes, class_index, BLOCK_D):
    """Logits ``[rows, BLOCK_C]`` and squared norms ``[rows]`` of a block of records, float64."""
    known = class_index < classes
    logits = tl.zeros([row.shape[0], class_index.shape[0]], tl.float64)
    squares = tl.zeros([row.shape[0]], tl.float64)
    for start in range(0, features, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        within = column < features
        at = x + row[:, None] * row_stride + column[None, :]
        xs = tl.load(at, mask=inside[:, None] & within[None, :], other=0.0).to(tl.float64)
        at = theta + class_index[:, None] * features + column[None, :]
        weights = tl.load(at, mask=known[:, None] & within[None, :], other=0.0).to(tl.float64)
        logits += tl.sum(xs[:, None, :] * weights[None, :, :], 2)
        squares += tl.sum(xs * xs, 1)
    return tl.where(known[None, :], logits, -float("inf")), squares


@triton.jit(
    do_not_specialize=["row_stride", "theta_stride", "features", "classes", "blocks"],
    do_not_specialize_on_alignment=[
        "x",
        "labels",
        "spans",
        "theta",
        "gradient_sq_norms",
        "hessian_sq_norms",
        "residuals",
        "probabilities",
        "complements",
        "hessian_factors",
    ],
)
def records_kernel(
    x,
    labels,
    spans,
    theta,
    gradient_sq_norms,
    hessian_sq_norms,
    residuals,
    probabilities,
    complements,
    hessian_factors,
    row_stride: tl.int64,
    theta_stride: tl.int64,
    features: tl.int64,
    classes: tl.int64,
    blocks: tl.int64,
    gradient_bound: tl.float64,
    hessian_bound: tl.float64,
    GRADIENTS: tl.constexpr,
    HESSIANS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Probabilities, norms, factors and weights of one block of one client's records.

    GRADIENTS: write ``factor * (p - e_y)``. HESSIANS: write p, 1 - p and the factors.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    client = tl.program_id(0).to(tl.int64) // blocks
    first = tl.load(spans + 2 * client)
    row = first + (tl.program_id(0).to(tl.int64) % blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = row < tl.load(spans + 2 * client + 1)
    index = tl.arange(0, BLOCK_C).to(tl.int64)
    logits, square = _logits(
        x, theta + client * theta_stride, row, inside, row_stride, features, classes, index, BLOCK_D
    )
    # 1 - p of the likeliest class is the sum of the others: nothing cancels.
    likeliest = index[None, :] == tl.argmax(logits, 1)[:, None]
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    others = tl.sum(tl.where(likeliest, 0.0, e), 1)[:, None]
    p = e / (1.0 + others)
    q = tl.where(likeliest, others / (1.0 + others), 1.0 - p)
    label = tl.load(labels + row, mask=inside, other=-1)
    residual = tl.where(index[None, :] == label[:, None], -q, p)
    gradient = (tl.sum(residual * residual, 1) + _LOST_SQUARES) * square
    # sum_c (p_c q_c)^2 + sum_c p_c^2 sum_{c' != c} p_c'^2; the inner sum, of all but one square, is
    # taken as a difference only where what is left is larger than what is taken away.
    squares = p * p
    minor = tl.sum(tl.where(likeliest, 0.0, squares), 1)[:, None]
    apart = tl.where(likeliest, minor, tl.sum(squares, 1)[:, None] - squares)
    products = tl.sum(p * q * p * q + squares * apart, 1)
    hessian = (products + _LOST_SQUARES) * square * square
    tl.store(gradient_sq_norms + row, gradient, mask=inside)
    tl.store(hessian_sq_norms + row, hessian, mask=inside)
    at = row[:, None] * classes + index[None, :]
    cells = inside[:, None] & (index < classes)[None, :]
    if GRADIENTS:
        factor = clip_factor(gradient, gradient_bound, 0.0, 1.0, dtype)[:, None]
        weight = tl.where(factor != 0, factor.to(tl.float64) * residual, 0.0)
        tl.store(residuals + at, weight.to(dtype), mask=cells)
    if HESSIANS:
        factor = clip_factor(hessian, hessian_bound, 0.0, 1.0, dtype)
        kept = (factor != 0)[:, None]
        tl.store(hessian_factors + row, factor, mask=inside)
        tl.store(probabilities + at, tl.where(kept, p, 0.0).to(dtype), mask=cells)
        tl.store(complements + at, tl.where(kept, q, 0.0).to(dtype), mask=cells)


@triton.jit(
    do_not_specialize=["row_stride", "features", "classes"],
    do_not_specialize_on_alignment=["x", "spans", "residuals", "gradients"],
)
def gradient_kernel(
    x,
    spans,
    residuals,
    gradients,
    row_stride: tl.int64,
    features: tl.int64,
    classes: tl.int64,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of a client's ``sum_i residuals_i x_i^T``, ``[C, d]``."""
    class_tiles = tl.cdiv(classes, BLOCK_C)
    tiles = class_tiles * tl.cdiv(features, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    client, tile = program // tiles, program % tiles
    index = (tile % class_tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = (tile // class_tiles) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, last = tl.load(spans + 2 * client), tl.load(spans + 2 * client + 1)
    total = tl.zeros([BLOCK_C, BLOCK_D], x.dtype.element_ty)
    for start in range(first, last, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        inside = row < last
        at = residuals + row[None, :] * classes + index[:, None]
        weights = tl.load(at, mask=inside[None, :] & (index < classes)[:, None], other=0.0)
        at = x + row[:, None] * row_stride + column[None, :]
        xs = tl.load(at, mask=inside[:, None] & (column < features)[None, :], other=0.0)
        # What is not finite has the weight zero, and zero times it is NaN.
        xs = tl.where(tl.abs(xs) < float("inf"), xs, 0.0)
        total = tl.dot(weights, xs, total, input_precision="ieee", out_dtype=total.dtype)
    at = gradients + (client * classes + index[:, None]) * features + column[None, :]
    tl.store(at, total, mask=(index < classes)[:, None] & (column < features)[None, :])


@triton.jit(
    do_not_specialize=["row_stride", "features", "classes"],
    do_not_specialize_on_alignment=[
        "x",
        "spans",
        "probabilities",
        "complements",
        "factors",
        "sums",
    ],
)
def gram_kernel(
    x,
    spans,
    probabilities,
    complements,
    factors,
    sums,
    row_stride: tl.int64,
    features: tl.int64,
    classes: tl.int64,
    COVARIANCE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of block (a, b) of a client's ``sum_i w_i x_i x_i^T``, and its mirror images.

    Programs are (client, a, b, tile row, tile column); those with a > b or below the diagonal of a
    block have nothing to do. COVARIANCE: w is the factor, and there is one class.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tiles = tl.cdiv(features, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    right, program = program % tiles, program // tiles
    left, program = program % tiles, program // tiles
    b, program = program % classes, program // classes
    a, client = program % classes, program // classes
    if (a <= b) & (left <= right):
        i = left * BLOCK_D + tl.arange(0, BLOCK_D)
        j = right * BLOCK_D + tl.arange(0, BLOCK_D)
        first, last = tl.load(spans + 2 * client), tl.load(spans + 2 * client + 1)
        total = tl.zeros([BLOCK_D, BLOCK_D], dtype)
        for start in range(first, last, BLOCK_K):
            row = start + tl.arange(0, BLOCK_K)
            inside = row < last
            weight = tl.load(factors + row, mask=inside, other=0.0)
            if not COVARIANCE:
                pa = tl.load(probabilities + row * classes + a, mask=inside, other=0.0)
                if a == b:
                    weight *= pa * tl.load(complements + row * classes + a, mask=inside, other=0.0)
                else:
                    pb = tl.load(probabilities + row * classes + b, mask=inside, other=0.0)
                    weight *= -(pa * pb)
            # A record that is left out may hold NaN, and zero times NaN is NaN.
            counted = (inside & (weight != 0))[:, None]
            at = x + row[:, None] * row_stride
            xi = tl.load(at + i[None, :], mask=counted & (i < features)[None, :], other=0.0)
            xj = tl.load(at + j[None, :], mask=counted & (j < features)[None, :], other=0.0)
            scaled = tl.trans(xi * weight[:, None])
            total = tl.dot(scaled, xj, total, input_precision="ieee", out_dtype=dtype)
        width = classes * features
        upper = (i[:, None] <= j[None, :]) & (i < features)[:, None] & (j < features)[None, :]
        sums += client * width * width
        here, there = a * features, b * features
        tl.store(sums + (here + i[:, None]) * width + there + j[None, :], total, mask=upper)
        tl.store(sums + (here + j[None, :]) * width + there + i[:, None], total, mask=upper)
        if a != b:
            tl.store(sums + (there + i[:, None]) * width + here + j[None, :], total, mask=upper)
            tl.store(sums + (there + j[None, :]) * width + here + i[:, None], total, mask=upper)
