"""Per-sample norms and gradients of a convolution on GPUs, in Triton.

Patches are implicit: a program computes the address of every element that it needs from the
geometry, so nothing of the size of a patch matrix exists. One program holds a tile of one sample's
gradient (or, for ``gram``, of the products of its positions) and walks along the positions (the
channels). Each step is a float32 product of 16 terms, added up in float64, and a bound of what that
rounds is part of the norm; samples whose norm that would raise too far are computed again with
float64 products, decided on the GPU, without a word to the host.

No GPU was at hand: nothing here was timed. Tiles and warps are the largest that do not spill
(static report, ``make gpu-check``): with steps of 32 tiles of 32 x 32 do on sm_80, 90 and 100.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.rounding import (
    dot_error,
    norm_limit,
    norm_within,
    raised,
    rounding_error,
    square_within,
    underflow,
)
from dpkernels.ops.ghost.triton_conv_kernels import conv_gradient_kernel, conv_gram_kernel

_TILE = 32
_STEP = 16
# Of gradients with float64 products: those of float64 inputs with a scale spill in tiles of 32 x 32
# on sm_90 (12 bytes) and sm_100 (8), even with eight warps.
_WIDE_TILE = 16
_WARPS = 4
# Two sums of 32 x 32 spill on sm_80 in four warps.
_GRAM_WARPS = 8


@functools.cache
def _geometry(axes: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    absent = (1, 1, 1, 1, 0, 1)
    rows = [absent] * (3 - len(axes)) + list(axes)
    return torch.tensor(rows, dtype=torch.int64, device=device).flatten()


def _gradients(
    x: Tensor,
    d: Tensor,
    geometry: Tensor,
    scale: Tensor | None,
    wanted: Tensor,
    grads: Tensor,
    sizes: tuple[int, int, int, int, int],
    wide: bool,
    keep: bool,
) -> Tensor:
    """Return squared norms of the wanted samples' weight gradients; write those if ``keep``."""
    groups, rows, columns, _, _ = sizes
    tile = _WIDE_TILE if wide else _TILE
    tiles = groups * triton.cdiv(rows, tile) * triton.cdiv(columns, tile)
    partial = torch.zeros(x.shape[0], tiles, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        conv_gradient_kernel[(partial.numel(),)](
            x,
            d,
            geometry,
            partial if scale is None else scale,
            wanted,
            partial,
            grads if keep else partial,
            *sizes,
            WIDE=wide,
            SCALED=scale is not None,
            KEEP=keep,
            TILE=tile,
            STEP=_STEP,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return partial.sum(1)


def _gram(
    x: Tensor,
    d: Tensor,
    geometry: Tensor,
    lengths: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int, int, int],
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Return squared norms, and how far the errors of products of positions reach."""
    groups, _, _, positions, _ = sizes
    tiles = groups * triton.cdiv(positions, _TILE) ** 2
    partials = torch.empty(x.shape[0], tiles, 2, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        conv_gram_kernel[(x.shape[0] * tiles,)](
            x,
            d,
            geometry,
            *lengths,
            partials,
            *sizes,
            WIDE=wide,
            TILE=_TILE,
            STEP=_STEP,
            num_warps=_GRAM_WARPS,
            **COMPILE_OPTIONS,
        )
    squares, reach = partials.sum(1).unbind(1)
    return squares, reach


def _lengths(
    x: Tensor,
    d: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Return the lengths of patches and of errors, float64 ``[B, groups, positions]``."""
    fringe = [zeros for axis_zeros in reversed(padding) for zeros in (axis_zeros, axis_zeros)]
    squares = pad(x.double().square().unflatten(1, (groups, -1)).sum(2), fringe)
    # A sum over a window is one along each axis after the other.
    for axis, taps in enumerate(kernel_size):
        span = dilation[axis] * (taps - 1) + 1
        windows = squares.unfold(axis + 2, span, stride[axis])
        squares = windows[..., :: dilation[axis]].sum(-1)
    patches = squares.sqrt().reshape(x.shape[0], groups, -1)
    errors = d.double().square().unflatten(1, (groups, -1)).sum(2).sqrt()
    return patches.contiguous(), errors.reshape(x.shape[0], groups, -1).contiguous()


def _weight_sq_norms(
    x: Tensor,
    d: Tensor,
    geometry: Tensor,
    scale: Tensor | None,
    terms: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    grads: Tensor,
    sizes: tuple[int, int, int, int, int],
    keep: bool,
) -> Tensor:
    """Return squared norms of the weight's gradients, with what they may be off by.

    lengths: of patches and errors, for products of positions; else gradients, if None.
    """
    dtype, wide = sum_dtype(x.dtype), x.dtype == torch.float64
    limit = norm_limit(dtype, sizes[3])
    if lengths is not None:
        sq_norms, reach = _gram(x, d, geometry, lengths, sizes, wide)
        error = _gram_error(dtype, sizes, lengths, reach)
        again = ~square_within(sq_norms, error, limit)
        sq_norms = sq_norms + error
    else:
        every = torch.ones(x.shape[0], dtype=torch.int8, device=x.device)
        sq_norms = _gradients(x, d, geometry, scale, every, grads, sizes, wide, keep)
        error = _gradient_error(dtype, sizes, terms, scale)
        again = ~norm_within(sq_norms.sqrt(), error, limit)
        sq_norms = raised(sq_norms, error)
        # float64 gradients are as good as it gets.
        if wide:
            return sq_norms
    again = again & terms.isfinite()
    # Whether any sample is concerned is asked only where asking does not make the host wait.
    if not x.is_cuda and not bool(again.any()):
        return sq_norms
    wanted = again.to(torch.int8)
    exact = _gradients(x, d, geometry, scale, wanted, grads, sizes, True, keep)
    error = _gradient_error(torch.float64, sizes, terms, scale)
    if keep:  # rounded once
        error = error + rounding_error(dtype, 1) * exact.sqrt()
    exact = raised(exact, error)
    return torch.where(again, exact, sq_norms)


def conv_norms(
    activations: Tensor,
    errors: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
    scale: Tensor | None,
    formula: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference_conv.conv_norms``; every formula is computed as such."""
    x, d = activations.contiguous(), errors.contiguous()
    batch, out_channels = d.shape[:2]
    columns = x.shape[1] // groups * math.prod(kernel_size)
    dtype = sum_dtype(x.dtype)
    grads = x.new_empty((batch, out_channels if keep else 0, columns), dtype=dtype)
    bias_grads = d.flatten(2).sum(2, dtype=torch.float64)
    positions = math.prod(d.shape[2:])
    weights = _channel_weights(d.shape[2:], kernel_size, stride, dilation, scale, x.shape[1])
    error_squares = d.double().flatten(1).square().sum(1)
    # No less than the sum over positions of |patch| |error|, under the scale of the columns.
    terms = ((x.double().flatten(2).square().sum(2) * weights).sum(1) * error_squares).sqrt()
    sq_norms = terms
    if batch > 0:
        axes = zip(x.shape[2:], d.shape[2:], kernel_size, stride, padding, dilation, strict=True)
        geometry = _geometry(tuple(axes), x.device)
        sizes = (groups, out_channels // groups, columns, positions, x[0].numel() // groups)
        lengths = None
        if formula == "gram":
            lengths = _lengths(x, d, kernel_size, stride, padding, dilation, groups)
        sq_norms = _weight_sq_norms(x, d, geometry, scale, terms, lengths, grads, sizes, keep)
    if bias:
        bias_error = rounding_error(torch.float64, positions) * (positions * error_squares).sqrt()
        bias_squares = raised(bias_grads.square().sum(1), bias_error)
        sq_norms = sq_norms + (bias_squares if scale is None else bias_squares * scale[-1].square())
    sq_norms = torch.where(terms.isfinite(), sq_norms, float("nan"))
    kept_bias = bias_grads.to(dtype) if keep and bias else grads.new_empty((batch, 0))
    return sq_norms, grads, kept_bias


def _channel_weights(
    output: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    scale: Tensor | None,
    channels: int,
) -> Tensor | float:
    """Return what to multiply a channel's squares with for those of its columns of patches, scaled.

    A tap meets a pixel once at most, and a pixel no more taps than have their distance modulo the
    stride in common.
    """
    meetings = 1
    for out, kernel, step, distance in zip(output, kernel_size, stride, dilation, strict=True):
        phases = [tap * distance % step for tap in range(kernel)]
        meetings *= min(out, max(phases.count(phase) for phase in phases))
    if scale is None:
        return float(meetings)
    squares = scale[:-1].square().view(-1, math.prod(kernel_size))
    weights = torch.minimum(squares.sum(1), squares.amax(1) * meetings)
    return weights.repeat(channels // weights.shape[0])


def _gradient_error(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int, int],
    terms: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """Return what a gradient in chains of ``dtype`` may be off by."""
    groups, rows, columns, positions, _ = sizes
    lost = underflow(dtype) * positions * math.sqrt(groups * rows * columns)
    largest = 1.0 if scale is None else scale[:-1].abs().max()
    return dot_error(dtype, positions, _STEP) * terms + lost * largest


def _gram_error(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int, int],
    lengths: tuple[Tensor, Tensor],
    reach: Tensor,
) -> Tensor:
    """Return what products of positions may be off by: first and second order, and underflow."""
    _, rows, columns, _, _ = sizes
    patches, errors = (length.sum((1, 2)) for length in lengths)
    part = dot_error(dtype, max(rows, columns), _STEP)
    lost = underflow(dtype) * (columns * errors.square() + rows * patches.square())
    terms = (lengths[0] * lengths[1]).sum((1, 2))
    return part * reach + (part * terms).square() + lost


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which ``conv_norms`` launches its kernels."""
    sizes = dict.fromkeys(("groups", "rows", "columns", "positions", "pixels"), "i64")
    dtypes = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
    cases = []
    for dtype, size in dtypes.items():
        inputs = {"x": f"*{dtype}", "d": f"*{dtype}", "geometry": "*i64"}
        lengths = dict.fromkeys(("patch_lengths", "error_lengths", "partials"), "*fp64")
        sums = "fp64" if dtype == "fp64" else "fp32"
        for wide in (False, True) if dtype != "fp64" else (True,):
            tile = _WIDE_TILE if wide else _TILE
            name = f"{dtype} {tile}x{tile}" + (" in fp64" if wide else "")
            for keep, scaled in ((0, 0), (1, 0), (0, 1), (1, 1)):
                cases.append(
                    AheadOfTimeCase(
                        kernel=conv_gradient_kernel,
                        configuration=name + " keep" * keep + " scaled" * scaled,
                        signature={
                            **inputs,
                            "partial_norms": "*fp64",
                            "scale": "*fp64",
                            "wanted": "*i8",
                            "grads": f"*{sums}" if keep else "*fp64",
                            **sizes,
                        },
                        constexprs={
                            "WIDE": wide,
                            "SCALED": scaled,
                            "KEEP": keep,
                            "TILE": tile,
                            "STEP": _STEP,
                        },
                        num_warps=_WARPS,
                        bytes_per_element=size,
                    )
                )
            if wide == (dtype == "fp64"):
                cases.append(
                    AheadOfTimeCase(
                        kernel=conv_gram_kernel,
                        configuration=f"{dtype} {_TILE}x{_TILE}",
                        signature={**inputs, **lengths, **sizes},
                        constexprs={"WIDE": wide, "TILE": _TILE, "STEP": _STEP},
                        num_warps=_GRAM_WARPS,
                        bytes_per_element=size,
                    )
                )
    return cases
