"""What a convolution's formulas compute around the kernel: one position, and dense factors.

x ``[B, C, *spatial]``: its input; d ``[B, O, *output]``: errors, under the left factor unless it
is given. Squared norms are float64 ``[B]``; with them comes what ``ConvNorms`` saves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpkernels.ops.clip import row_sq_norms
from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from dpkernels.ops.ghost import reference_conv
from dpkernels.ops.ghost.conv_operator import run_conv_norms
from dpkernels.ops.ghost.conv_shape import ConvShape, gradients_kept
from dpkernels.ops.ghost.layer import largest_gain, sum_dtype
from dpkernels.ops.ghost.rounding import raised, rounding_error, with_sum_error
from dpkernels.ops.kron import apply_factor, apply_kron

# Per-sample gradients that a dense right factor is applied to at a time: it bounds the memory that
# they and the result take, whatever the batch. Not tuned.
_BLOCK_BYTES = 8 << 20


def column_scale(shape: ConvShape, right: Factor | None) -> Tensor | None:
    """Return what multiplies the gradient's columns and the bias: float64 ``[I + 1]``."""
    if right is None:
        return None
    assert isinstance(right, Diagonal)
    values = right.values.detach().double()
    return values if right.size > shape.columns else torch.cat([values, values.new_ones(1)])


def rank_one(
    shape: ConvShape, x: Tensor, d: Tensor, bias: bool, right: Factor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return squared norms, and patches and errors of the one position, under ``right``."""
    dtype = sum_dtype(x.dtype)
    patches = reference_conv.patches(x, *shape.geometry()[:4]).to(dtype)
    patches = patches.reshape(shape.batch, shape.groups, shape.columns)
    errors = d.to(dtype).reshape(shape.batch, shape.groups, shape.out_channels // shape.groups)
    augmented = right is not None and right.size > shape.columns
    if right is not None:
        patches = apply_factor(patches, right, bias=augmented)
    error_squares = _squares(errors)
    sq_norms = (_squares(patches) * error_squares).sum(1)
    if bias and not augmented:
        sq_norms = sq_norms + error_squares.sum(1)
    # Pixels between the taps count too: 0 times what is not finite is NaN.
    return sq_norms + 0 * _squares(x.flatten(1)), (patches, errors)


def _squares(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norms.square()


def transformed(
    shape: ConvShape, x: Tensor, d: Tensor, bias: bool, left: Factor | None, right: Factor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Apply factors to some samples' gradients at a time, and keep those if small.

    Kept ones are measured as they are summed. Where the sum is computed again and the factor
    applied to it, what float32 rounds here is not in it, and a factor that all but removes a
    gradient would leave nothing else: such norms are taken in float64.
    """
    keep = gradients_kept(shape)
    dtype = sum_dtype(x.dtype) if keep else torch.float64
    factor = right if keep else in_double(right)
    augmented = right is not None and right.size > shape.columns
    samples = max(1, _BLOCK_BYTES // (shape.out_channels * (shape.columns + 1) * dtype.itemsize))
    parts = []
    for some_x, some_d in zip(x.split(samples), d.split(samples), strict=True):
        if not keep:
            some_x, some_d = some_x.double(), some_d.double()
        unscaled, grads, bias_grads = run_conv_norms(
            shape, some_x, some_d, True, None, "materialised", True
        )
        if augmented:
            both = apply_kron(torch.cat([grads, bias_grads.unsqueeze(2)], 2), left, factor)
            grads = both[..., : shape.columns].contiguous()
            bias_grads = both[..., shape.columns].contiguous()
        else:
            grads = apply_kron(grads, left, factor)
            bias_grads = apply_factor(bias_grads, left)
        sq_norms = row_sq_norms([grads.flatten(1), *([bias_grads] * bias)])
        if not keep:
            assert right is not None
            # Of a sum over the positions (128: in lanes and tiles) and of two over the columns.
            part = rounding_error(torch.float64, shape.positions + 128 + 2 * right.size)
            sq_norms = raised(sq_norms, part * largest_gain(right) * unscaled.sqrt())
        # A sample that the unscaled norm finds not finite stays so.
        parts.append((sq_norms + 0 * unscaled, *([grads, bias_grads] * keep)))
    if len(parts) == 1:
        sq_norms, *kept = parts[0]
    else:
        sq_norms, *kept = (torch.cat(part) for part in zip(*parts, strict=True))
    return sq_norms, tuple(kept)


def with_rounding(
    shape: ConvShape, x: Tensor, d: Tensor, right: Factor | None, sq_norms: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return squared norms with what their sum rounds, and which samples' shares are too inexact.

    The sum is the weight gradient of a convolution by PyTorch: L products in an order of its own,
    each of which rounds L + 2 times at most, also with the scaling, for a sample alone. A sample
    for which that bound comes to more than ``limit`` of its norm has terms that cancel: its share
    is computed in float64 instead, and it is not raised (csrc/ghost/rounding.h has the reasons).
    None: no sample is to be treated so, because a compiled graph cannot ask; all are raised.

    The terms are patches times errors, ``sum_t |patch_t| |d_t| <= sqrt(meetings) |x| |d|``.
    """
    dtype = sum_dtype(x.dtype)
    squares = row_sq_norms([x.flatten(1)]) * row_sq_norms([d.flatten(1)])
    part = rounding_error(dtype, shape.positions + 2)
    limit = max(1e-3, 4 * part * math.sqrt(shape.positions))
    error = part * (shape.meetings * squares).sqrt()
    if right is not None:
        error = error * largest_gain(right)
    if torch.compiler.is_compiling():
        return raised(sq_norms, error), None
    return with_sum_error(sq_norms, error, limit, dtype)


def in_double(factor: Factor | None) -> Factor | None:
    """Return the factor with float64 numbers."""
    if factor is None:
        return None
    if isinstance(factor, Full):
        return Full(factor.matrix.detach().double())
    if isinstance(factor, Diagonal):
        return Diagonal(factor.values.detach().double())
    assert isinstance(factor, LowRank)
    return LowRank(factor.vectors.detach().double(), factor.values.detach().double(), factor.tail)
