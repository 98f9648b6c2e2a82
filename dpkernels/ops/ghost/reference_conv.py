"""Per-sample norms and gradients of a convolution in plain PyTorch.

The documentation of the compiled operator, the fallback where there is none, and the truth that it
is tested against: everything is float64, so that no formula loses to cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.rounding import raised, rounding_error

# Samples whose patches are formed at a time, so that those of a whole batch never exist.
SAMPLES_AT_A_TIME = 16


def patches(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return what the kernel meets at every output position: ``[B, C, K, L]``."""
    fringe = [zeros for axis_zeros in reversed(padding) for zeros in (axis_zeros, axis_zeros)]
    x = pad(x, fringe)
    rank = len(kernel_size)
    for axis in range(rank):
        span = dilation[axis] * (kernel_size[axis] - 1) + 1
        x = x.unfold(axis + 2, span, stride[axis])[..., :: dilation[axis]]
    # [B, C, *output, *kernel] -> [B, C, K, L]
    order = [0, 1, *range(rank + 2, 2 * rank + 2), *range(2, rank + 2)]
    positions = math.prod(x.shape[2 : rank + 2])
    return x.permute(order).reshape(x.shape[0], x.shape[1], math.prod(kernel_size), positions)


def _gradients(
    x: Tensor,
    d: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """``[B, O, I]``: for each group the product of its errors and its patches."""
    met = patches(x, kernel_size, stride, padding, dilation)
    batch, positions = x.shape[0], met.shape[-1]
    columns = x.shape[1] // groups * met.shape[2]
    met = met.reshape(batch, groups, columns, positions)
    errors = d.reshape(batch, groups, d.shape[1] // groups, positions)
    return (errors @ met.mT).reshape(batch, d.shape[1], columns)


def _errors(x: Tensor, d: Tensor, taps: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what the float64 norms of weight and bias may be off by, ``[B]``.

    The terms are patches times errors, and a pixel is in at most as many patches as there are taps.
    """
    positions = math.prod(d.shape[2:])
    part = rounding_error(torch.float64, positions)
    lengths = [torch.linalg.vector_norm(v.flatten(1), dim=1) for v in (x, d)]
    gains = (1.0, 1.0) if scale is None else (scale[:-1].abs().max(), scale[-1].abs())
    weight = part * gains[0] * math.sqrt(taps) * lengths[0] * lengths[1]
    return weight, part * gains[1] * math.sqrt(positions) * lengths[1]


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
    """Return ``(sq_norms [B], grads [B, O, I], bias_grads [B, O])``; the last two if ``keep``.

    scale: float64 ``[I + 1]``, multiplies the columns of the gradient, and the bias last, in the
        norms; what is kept is not scaled.
    formula: how compiled implementations get there; the result is the same.
    """
    dtype = sum_dtype(activations.dtype)
    parts = []
    for x, d in zip(
        activations.split(SAMPLES_AT_A_TIME), errors.split(SAMPLES_AT_A_TIME), strict=True
    ):
        x, d = x.double(), d.double()
        grads = _gradients(x, d, kernel_size, stride, padding, dilation, groups)
        bias_grads = d.flatten(2).sum(2)
        scaled = grads if scale is None else grads * scale[:-1]
        error, bias_error = _errors(x, d, math.prod(kernel_size), scale)
        sq_norms = scaled.square().sum((1, 2))
        if keep:  # rounded once
            error = error + rounding_error(dtype, 1) * sq_norms.sqrt()
        sq_norms = raised(sq_norms, error)
        if bias:
            squares = (bias_grads * (1 if scale is None else scale[-1])).square().sum(1)
            sq_norms = sq_norms + raised(squares, bias_error)
        # Pixels that no patch meets count too: 0 times what is not finite is NaN.
        sq_norms = sq_norms + 0 * (x.flatten(1).sum(1) + d.flatten(1).sum(1))
        parts.append((sq_norms, grads.to(dtype), bias_grads.to(dtype)))
    sq_norms, grads, bias_grads = (torch.cat(part) for part in zip(*parts, strict=True))
    kept = grads if keep else grads.new_empty((grads.shape[0], 0, grads.shape[2]))
    kept_bias = bias_grads if keep and bias else bias_grads.new_empty((grads.shape[0], 0))
    return sq_norms, kept, kept_bias
