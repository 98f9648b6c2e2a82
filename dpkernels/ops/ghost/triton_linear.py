"""Norms and weighted sums of a linear layer's per-sample gradients on GPUs, in Triton.

``gram`` runs a program for each pair of blocks of positions, ``materialised`` one for each block of
the gradient: both reduce their tile to a number, so nothing of size T x T or I x O is stored. What
float32 is not enough for is done again in float64 by a kernel whose programs end at once for all
other samples, so the host need not wait to see. The weighted sum is one product, split over the
rows so that it fills the GPU; rows are scaled on the way in. What samples add whose terms cancel is
left out of it, and added in float64 by a kernel that ends at once where there are none. Transforms
are ``torch.matmul``.

No GPU was at hand: nothing here was timed. Tiles are the largest without spills (static report,
``make gpu-check``).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.clip import triton_impl as clip_triton
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.rounding import (
    dot_error,
    norm_limit,
    norm_within,
    raised,
    rounding_error,
    square_within,
    sum_error,
    sum_limit,
    underflow,
    with_sum_error,
)
from dpkernels.ops.ghost.triton_linear_kernels import (
    apart_sum_kernel,
    exact_gradient_kernel,
    gradient_kernel,
    gram_kernel,
    weighted_product_kernel,
)

_BLOCK = 32
_WARPS = 4
# Without a GPU (interpreter): small, so that tests see rows split.
_INTERPRETED_PROGRAMS = 8
_PROGRAMS_PER_SM = 4


def _rows(x: Tensor) -> Tensor:
    """Return ``[B, T, n]`` as float32 or float64 ``[B T, n]`` with neighbouring columns.

    Half precision is widened here: widened inside the kernels it spills on every NVIDIA target
    (static report).
    """
    rows = x.flatten(0, 1).to(sum_dtype(x.dtype))
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()


def _lengths(rows: Tensor, batch: int, positions: int) -> Tensor:
    """Return the float64 lengths of the positions' vectors, ``[B, T]``."""
    return clip_triton.row_sq_norms([rows], False).sqrt().view(batch, positions)


def sq_norms(activations: Tensor, errors: Tensor, bias: bool, gram: bool) -> tuple[Tensor, Tensor]:
    """Squared norms ``[B]`` of ``sum_t d_t a_t^T``, plus ``|sum_t d_t|^2`` if ``bias``; float64.

    Each has the bound of its error and of its sum's added, as in csrc/ghost/linear_norms.cpp. Also
    returned is which samples' shares of the sum have to be computed apart.
    """
    batch, positions = activations.shape[:2]
    a, d = _rows(activations), _rows(errors)
    if batch == 0 or positions == 0:
        none = a.new_zeros(batch, dtype=torch.float64)
        return none, none.bool()
    lengths = _lengths(a, batch, positions), _lengths(d, batch, positions)
    terms = (lengths[0] * lengths[1]).sum(1)
    limit = norm_limit(a.dtype, positions)
    if gram:
        squares, reach = _gram(a, d, *lengths).sum(1).unbind(1)
        error = _gram_error(a, d, reach, terms, *(length.sum(1) for length in lengths))
        again = ~square_within(squares, error, limit)
        squares = squares + error
    else:
        squares = _gradient(a, d, batch, positions)
        chains = dot_error(a.dtype, positions, _BLOCK) * terms
        lost = underflow(a.dtype) * positions * math.sqrt(a.shape[1] * d.shape[1])
        again = ~norm_within(squares.sqrt(), chains + lost, limit)
        squares = raised(squares, chains + lost)
    # Positions one after the other, and a tree over the elements.
    error = rounding_error(torch.float64, positions + 64) * terms
    squares = torch.where(again, raised(_exact_gradient(a, d, again), error), squares)
    # An infinity may meet zeros only and be lost in a Gram product, but not in the lengths.
    finite = lengths[0].sum(1) + lengths[1].sum(1) < float("inf")
    squares = torch.where(finite, squares, float("nan"))
    if bias:
        bias_squares = errors.sum(1, dtype=torch.float64).square().sum(1)
        bias_error = rounding_error(torch.float64, positions) * lengths[1].sum(1)
        squares = squares + raised(bias_squares, bias_error)
    of_sum = sum_error(a.dtype, positions) * terms
    return with_sum_error(squares, of_sum, sum_limit(positions), a.dtype)


def _gram_error(
    a: Tensor, d: Tensor, reach: Tensor, terms: Tensor, a_total: Tensor, d_total: Tensor
) -> Tensor:
    """Return what Gram products may be off by: first and second order, and underflow."""
    part = dot_error(a.dtype, max(a.shape[1], d.shape[1]), _BLOCK)
    lost = a.shape[1] * d_total.square() + d.shape[1] * a_total.square()
    return part * reach + (part * terms).square() + underflow(a.dtype) * lost


def _gram(a: Tensor, d: Tensor, a_lengths: Tensor, d_lengths: Tensor) -> Tensor:
    """Return ``[B, pairs, 2]``: products and reach of every pair of blocks of positions."""
    batch, positions = a_lengths.shape
    blocks = triton.cdiv(positions, _BLOCK)
    pairs = blocks * (blocks + 1) // 2
    partials = a.new_empty((batch, pairs, 2), dtype=torch.float64)
    with torch.cuda.device_of(a):
        gram_kernel[(batch * pairs,)](
            a,
            d,
            a_lengths,
            d_lengths,
            partials,
            positions,
            pairs,
            a.stride(0),
            d.stride(0),
            a.shape[1],
            d.shape[1],
            BLOCK_T=_BLOCK,
            BLOCK_K=_BLOCK,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return partials


def _gradient(a: Tensor, d: Tensor, batch: int, positions: int) -> Tensor:
    """Return the squared norms ``[B]`` of the gradients, block by block."""
    blocks = triton.cdiv(a.shape[1], _BLOCK) * triton.cdiv(d.shape[1], _BLOCK)
    partials = a.new_empty((batch, blocks), dtype=torch.float64)
    if blocks == 0:
        return partials.sum(1)
    with torch.cuda.device_of(a):
        gradient_kernel[(batch * blocks,)](
            a,
            d,
            partials,
            positions,
            a.stride(0),
            d.stride(0),
            a.shape[1],
            d.shape[1],
            BLOCK_O=_BLOCK,
            BLOCK_I=_BLOCK,
            BLOCK_K=_BLOCK,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return partials.sum(1)


def _exact_gradient(a: Tensor, d: Tensor, again: Tensor) -> Tensor:
    """Return the same in float64 for the samples in ``again``, 0 for the others."""
    batch = again.shape[0]
    blocks = triton.cdiv(a.shape[1], _BLOCK) * triton.cdiv(d.shape[1], _BLOCK)
    partials = a.new_empty((batch, blocks), dtype=torch.float64)
    if blocks == 0:
        return partials.sum(1)
    with torch.cuda.device_of(a):
        exact_gradient_kernel[(batch * blocks,)](
            a,
            d,
            again.to(torch.int32),
            partials,
            a.shape[0] // batch,
            a.stride(0),
            d.stride(0),
            a.shape[1],
            d.shape[1],
            BLOCK_O=_BLOCK,
            BLOCK_I=_BLOCK,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return partials.sum(1)


@functools.cache
def _programs(device: torch.device) -> int:
    """Return how many programs fill the GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def weighted_sum_(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    factors: Tensor,
    apart: Tensor | None,
    accumulate: bool,
) -> None:
    """``out (+)= sum_b factors[b] sum_t d_bt a_bt^T``; a factor of 0 ignores its sample, NaN too.

    ``bias_out``, ``apart``: as in the reference.
    """
    a, d, factors = _rows(activations), _rows(errors), factors.contiguous()
    if apart is None:
        apart = torch.zeros_like(factors, dtype=torch.bool)
    apart = apart.to(torch.int8)
    outputs, inputs = out.shape
    tiles = triton.cdiv(outputs, _BLOCK) * triton.cdiv(inputs, _BLOCK)
    rows = a.shape[0]
    wanted = max(1, _programs(a.device) // max(1, tiles))
    rows_per_split = _BLOCK * triton.cdiv(triton.cdiv(rows, _BLOCK), wanted)
    splits = triton.cdiv(rows, rows_per_split) if rows else 0
    partials = out.new_empty((splits, outputs, inputs))
    bias_partials = out.new_empty((splits, outputs), dtype=torch.float64)
    # A layer without inputs still has a bias: one block of none of them.
    if splits and outputs:
        grid = splits * triton.cdiv(outputs, _BLOCK) * max(1, triton.cdiv(inputs, _BLOCK))
        with torch.cuda.device_of(a):
            weighted_product_kernel[(grid,)](
                a,
                d,
                factors,
                apart,
                partials,
                bias_partials,
                rows,
                activations.shape[1],
                splits,
                rows_per_split,
                a.stride(0),
                d.stride(0),
                inputs,
                outputs,
                HOMOGENEOUS=a.shape[1] == inputs + 1,
                BLOCK_O=_BLOCK,
                BLOCK_I=_BLOCK,
                BLOCK_K=_BLOCK,
                num_warps=_WARPS,
                **COMPILE_OPTIONS,
            )
    totals = [(out, partials.sum(0))]
    if bias_out is not None:
        totals.append((bias_out, bias_partials.sum(0)))
    for target, total in totals:
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)
    if rows and tiles:
        with torch.cuda.device_of(a):
            apart_sum_kernel[(tiles,)](
                a,
                d,
                factors,
                apart,
                out,
                factors.shape[0],
                activations.shape[1],
                a.stride(0),
                d.stride(0),
                inputs,
                outputs,
                BLOCK_O=_BLOCK,
                BLOCK_I=_BLOCK,
                num_warps=_WARPS,
                **COMPILE_OPTIONS,
            )


_SHAPE = dict.fromkeys(("positions", "a_stride", "d_stride", "inputs", "outputs"), "i64")


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    return [case for name, size in (("fp32", 4), ("fp64", 8)) for case in _cases(name, size)]


def _cases(name: str, size: int) -> list[AheadOfTimeCase]:
    inputs = {"a": f"*{name}", "d": f"*{name}"}
    tile = {"BLOCK_O": _BLOCK, "BLOCK_I": _BLOCK}
    lengths = {"a_lengths": "*fp64", "d_lengths": "*fp64", "pairs": "i32"}
    gram = {**inputs, **lengths, "partials": "*fp64", **_SHAPE}
    gradient = {**inputs, "partials": "*fp64", **_SHAPE}
    weighted = {**inputs, "factors": f"*{name}", "partials": f"*{name}", "bias_partials": "*fp64"}
    weighted |= {"apart": "*i8"}
    weighted |= {**_SHAPE, **dict.fromkeys(("rows", "splits", "rows_per_split"), "i64")}
    alone = {**inputs, "factors": f"*{name}", "apart": "*i8", "out": f"*{name}", "batch": "i64"}
    kernels = [
        (gram_kernel, gram, {"BLOCK_T": _BLOCK, "BLOCK_K": _BLOCK}, ""),
        (gradient_kernel, gradient, {**tile, "BLOCK_K": _BLOCK}, ""),
        (exact_gradient_kernel, {**gradient, "again": "*i32"}, tile, ""),
        (apart_sum_kernel, {**alone, **_SHAPE}, tile, ""),
    ]
    for variant, homogeneous in (("", False), (" homogeneous", True)):
        constants = {"HOMOGENEOUS": homogeneous, **tile, "BLOCK_K": _BLOCK}
        kernels.append((weighted_product_kernel, weighted, constants, variant))
    return [
        AheadOfTimeCase(
            kernel=kernel,
            configuration=f"{name}{variant}",
            signature=signature,
            constexprs=constants,
            num_warps=_WARPS,
            bytes_per_element=size,
        )
        for kernel, signature, constants, variant in kernels
    ]
