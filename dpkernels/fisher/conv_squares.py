"""Squares of single records' gradients of a convolution, some records at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.kron import reference

# Of the gradients that are squared at a time.
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

    x: ``[B, C, *spatial]``; errors: ``[B, O, *output]``. g_b is one product of errors and patches
    over the T positions: 2 B O T n flops for n inputs of a patch. Gradients of so many records as
    stay in a cache are formed, squared and added up before those of the next. float32 (float64 for
    float64).
    """
    dtype, axes = sum_dtype(errors.dtype), len(kernel_size)
    outputs, n = errors.shape[1], x.shape[1] // groups * math.prod(kernel_size)
    options: Any = (kernel_size, dilation, padding, stride)
    x, d = x.to(dtype), errors.to(dtype).flatten(2).unflatten(1, (groups, -1))
    total = d.new_zeros(groups, outputs // groups, n)
    records = max(1, _BLOCK_BYTES // (outputs * n * dtype.itemsize))
    for first in range(0, len(x), records):
        at = slice(first, first + records)
        if axes == 2:
            patches = functional.unfold(x[at], *options).unflatten(1, (groups, -1)).mT
        else:
            kernel, holes, border, step = map(list, options)
            patches = reference.patches(x[at], kernel, step, border, holes, groups)
            patches = patches.unflatten(1, (d[at].shape[0], -1)).transpose(0, 1)
        gradients = d[at] @ patches
        total += gradients.square_().sum(0)
    sums = [total.flatten(0, 1)]
    return [*sums, d.sum(3).square_().sum(0).flatten()] if bias else sums
