"""Squares of single records' gradients of a convolution, some records at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.kron.convolution import ConvolutionShape

# Of the gradients that are squared at a time: for 32 to 64 channels and 5 x 5 kernels, 189 us of
# one core a record, 234 us with a quarter of it, 204 us with four times as much.
_BLOCK_BYTES = 1 << 20


def conv_square_sums(
    x: Tensor,
    errors: Tensor,
    *,
    bias: bool,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> list[Tensor]:
    """Return ``sum_b g_b^2`` of the weight ``[O, C / groups * kernel elements]`` and bias ``[O]``.

    x: ``[B, C, *spatial]``; errors: ``[B, O, *output]``. g_b is a product of errors and patches
    over the T positions: 2 B O T n flops for n inputs of a patch. Gradients of so many records as
    stay in a cache are formed, squared and added up before those of the next. float32 (float64 for
    float64).
    """
    shape = ConvolutionShape.of(
        "conv_square_sums", x, kernel_size, stride, padding, dilation, groups
    )
    dtype, outputs = sum_dtype(errors.dtype), errors.shape[1]
    n = x.shape[1] // groups * math.prod(shape.kernel)
    x, d = x.to(dtype), errors.to(dtype).flatten(2).unflatten(1, (groups, -1))
    records = max(1, _BLOCK_BYTES // (outputs * n * dtype.itemsize))
    total = d.new_zeros(groups, outputs // groups, n)
    for first in range(0, len(x), records):
        at = slice(first, first + records)
        total += (d[at] @ _patches(x[at], shape).mT).square_().sum(0)
    weight = total.flatten(0, 1)
    return [weight, d.sum(3).square_().sum(0).flatten()] if bias else [weight]


def _patches(x: Tensor, shape: ConvolutionShape) -> Tensor:
    """Return ``[B, groups, n, T]``: positions last, which copies runs of neighbours.

    With it, squares of a 5 x 5 convolution from 6 x 12 x 12 to 16 channels take 14 us of one core a
    record, with ``functional.unfold`` 25 us.
    """
    batch, axes = len(x), len(shape.kernel)
    x = pad(x, [p for side in reversed(shape.padding) for p in (side, side)])
    for axis in range(axes):
        hole = shape.dilation[axis]
        span = hole * (shape.kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, span, shape.stride[axis])[..., ::hole]
    kernel = range(2 + axes, 2 + 2 * axes)
    x = x.permute(0, 1, *kernel, *range(2, 2 + axes))
    return x.reshape(batch, shape.groups, -1, shape.positions)
