"""Per-sample norms and weighted sums of an embedding table's gradient on GPUs, in Triton.

Tokens are put in order by ``torch.sort``, equal ones beside each other. For the norms a program
takes some columns of one sample and walks along its tokens, adding up in float64 and squaring at
the end of each run. For the sum a program takes some columns of one run over the whole batch, so
that no two programs write to the same row: nothing is atomic, the result is deterministic. A row is
added up in float64 there, too, and rounded once.

No GPU was at hand: nothing here was timed. 128 columns are one float32 for each thread of four
warps, and 512 contiguous bytes; the static report (``make gpu-check``) shows no spills.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase

_COLUMNS = 128
_WARPS = 4


@triton.jit(
    do_not_specialize=["tokens", "width", "batch_stride", "token_stride", "padding"],
    do_not_specialize_on_alignment=["ordered", "order", "errors", "scale", "partial_norms"],
)
def token_norms_kernel(
    ordered,
    order,
    errors,
    scale,
    partial_norms,
    tokens: tl.int64,
    width: tl.int64,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    padding: tl.int64,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Squared norm of COLUMNS columns of one sample's gradient."""
    blocks = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    sample = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    first = sample * tokens
    run = tl.zeros([COLUMNS], tl.float64)
    magnitude = tl.zeros([COLUMNS], tl.float64)
    total = tl.zeros([COLUMNS], tl.float64)
    # A sum of so many terms errs by at most this part of their magnitudes' sum.
    rounding = tokens.to(tl.float64) * 2.0**-52
    for t in range(0, tokens):
        token = tl.load(ordered + first + t)
        following = tl.load(ordered + first + t + 1, mask=t + 1 < tokens, other=-1)
        at = errors + sample * batch_stride + tl.load(order + first + t) * token_stride
        row = tl.load(at + column, mask=column < width, other=0.0).to(tl.float64)
        run += row
        magnitude += tl.abs(row)
        ends = token != following
        # Padding counts for nothing, but a NaN in it still marks the sample.
        weight = tl.where(ends & (token != padding), 1.0, 0.0).to(tl.float64)
        if SCALED:
            factor = tl.load(scale + token)
            weight *= factor * factor
        # Where all but nothing is left of the terms, what rounding took counts.
        error = rounding * magnitude
        found = tl.abs(run) + tl.where(error > 5e-8 * tl.abs(run), error, 0.0)
        total += weight * found * found
        run = tl.where(ends, 0.0, run)
        magnitude = tl.where(ends, 0.0, magnitude)
    tl.store(partial_norms + program, tl.sum(total, 0))


@triton.jit(
    do_not_specialize=["tokens", "width", "batch_stride", "token_stride", "padding"],
    do_not_specialize_on_alignment=["out", "ordered", "order", "ends", "errors", "factors"],
)
def token_sums_kernel(
    out,
    ordered,
    order,
    ends,
    errors,
    factors,
    scale,
    tokens: tl.int64,
    width: tl.int64,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    padding: tl.int64,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Weighted sum of COLUMNS columns of the run that begins at this place, if one does."""
    dtype: tl.constexpr = out.dtype.element_ty
    blocks = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    place = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(ordered + place)
    before = tl.load(ordered + place - 1, mask=place > 0, other=-1)
    if (token == before) | (token == padding):
        return
    weight = 1.0
    if SCALED:
        weight = tl.load(scale + token)
    total = tl.zeros([COLUMNS], tl.float64)
    own = tl.zeros([COLUMNS], tl.float64)
    end = tl.load(ends + place)
    for k in range(place, end):
        source = tl.load(order + k)
        sample = source // tokens
        following = tl.load(order + k + 1, mask=k + 1 < end, other=-1) // tokens
        factor = tl.load(factors + sample).to(tl.float64)
        at = errors + sample * batch_stride + source % tokens * token_stride
        row = tl.load(at + column, mask=column < width, other=0.0).to(tl.float64)
        own += tl.where(factor != 0, row, 0.0)
        # Where the next sample begins, this one's share is complete.
        ends_here = (k + 1 == end) | (following != sample)
        total += tl.where(ends_here, own * (factor * weight), 0.0)
        own = tl.where(ends_here, 0.0, own)
    at = out + token * width + column
    if ACCUMULATE:
        total += tl.load(at, mask=column < width).to(tl.float64)
    tl.store(at, total.to(dtype), mask=column < width)


def _columns_adjacent(errors: Tensor) -> Tensor:
    return errors if errors.shape[2] <= 1 or errors.stride(2) == 1 else errors.contiguous()


def embedding_sq_norms(
    indices: Tensor, errors: Tensor, scale: Tensor | None, vocabulary: int, padding_index: int
) -> Tensor:
    """See ``reference_embedding.embedding_sq_norms``."""
    errors = _columns_adjacent(errors)
    batch, tokens, width = errors.shape
    partial = torch.zeros(
        batch, triton.cdiv(width, _COLUMNS), dtype=torch.float64, device=errors.device
    )
    if partial.numel() == 0 or tokens == 0:
        return partial.sum(1)
    # What sort returns is laid out as what it is given.
    ordered, order = indices.contiguous().sort(1)
    with torch.cuda.device_of(errors):
        token_norms_kernel[(partial.numel(),)](
            ordered,
            order,
            errors,
            partial if scale is None else scale,
            partial,
            tokens,
            width,
            errors.stride(0),
            errors.stride(1),
            padding_index,
            SCALED=scale is not None,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return partial.sum(1)


def embedding_weighted_sum_(
    out: Tensor,
    indices: Tensor,
    errors: Tensor,
    factors: Tensor,
    scale: Tensor | None,
    padding_index: int,
    accumulate: bool,
) -> None:
    """See ``reference_embedding.embedding_weighted_sum_``."""
    if not accumulate:
        out.zero_()
    if errors.numel() == 0:
        return
    errors = _columns_adjacent(errors)
    width = errors.shape[2]
    ordered, order = indices.flatten().sort(stable=True)
    ends = torch.searchsorted(ordered, ordered, right=True)
    with torch.cuda.device_of(out):
        token_sums_kernel[(ordered.numel() * triton.cdiv(width, _COLUMNS),)](
            out,
            ordered,
            order,
            ends,
            errors,
            factors.contiguous(),
            factors if scale is None else scale,
            indices.shape[1],
            width,
            errors.stride(0),
            errors.stride(1),
            padding_index,
            SCALED=scale is not None,
            ACCUMULATE=accumulate,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    numbers = ("tokens", "width", "batch_stride", "token_stride", "padding")
    sizes = dict.fromkeys(numbers, "i64")
    cases = []
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp64", 8)):
        sums = "fp64" if dtype == "fp64" else "fp32"
        common = {"ordered": "*i64", "order": "*i64", "errors": f"*{dtype}"}
        for scaled in (0, 1):
            name = f"{dtype} {_COLUMNS} columns" + " scaled" * scaled
            cases.append(
                AheadOfTimeCase(
                    kernel=token_norms_kernel,
                    configuration=name,
                    signature={**common, "scale": "*fp64", "partial_norms": "*fp64", **sizes},
                    constexprs={"SCALED": scaled, "COLUMNS": _COLUMNS},
                    num_warps=_WARPS,
                    bytes_per_element=size,
                )
            )
            pointers = {"out": f"*{sums}", **common, "ends": "*i64", "factors": f"*{sums}"}
            pointers["scale"] = "*fp64" if scaled else f"*{sums}"
            for accumulate in (0, 1):
                constants = {"SCALED": scaled, "ACCUMULATE": accumulate, "COLUMNS": _COLUMNS}
                cases.append(
                    AheadOfTimeCase(
                        kernel=token_sums_kernel,
                        configuration=name + " accumulate" * accumulate,
                        signature={**pointers, **sizes},
                        constexprs=constants,
                        num_warps=_WARPS,
                        bytes_per_element=size,
                    )
                )
    return cases
