"""A of a convolution from products of the input's rows, without its patches.

A's block for rows i, i' of the kernel is the sum over output rows h of products of the input's
rows s h + d i and s h + d i' (stride s, dilation d). Pairs of rows that far apart are the same for
many h and i, so each pair is multiplied once, all its columns and channels at a time, and the
products are added up along their diagonals. For C channels, a kernel of k x k and an input of
H x W that takes B H k (C W)^2 multiplications, against B T (C k^2)^2 of patches at T positions:
a fifth for 5 x 5 kernels on 14 x 14, in products that a library is fast at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpkernels.ops import kron
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.kron.convolution import ConvolutionShape
from dpkernels.ops.kron.inputs import finite


def conv_factor(x: Tensor, *, bias: bool, **geometry: Any) -> Tensor:
    """Return the mean of p p^T over the patches p of ``x``, ``[n, n]``, by the cheaper form.

    Arguments, result and what raises: ``dpkernels.ops.kron.conv_second_moment``, one group.
    """
    shape = ConvolutionShape.of("conv_factor", x, **geometry)
    if x.dim() != 4 or not _pays(shape, x):
        return kron.conv_second_moment(x, bias=bias, **geometry)
    moment = _by_rows(x.to(sum_dtype(x.dtype)), shape)
    if bias:
        sums = kron.mean_patches(x, **geometry)[0].mean(0)
        last = pad(sums, (0, 1), value=1.0)
        moment = torch.cat([torch.cat([moment, sums[None]]), last[:, None]], 1)
    return finite("conv_factor", moment)


def _pays(shape: ConvolutionShape, x: Tensor) -> bool:
    (high, wide), channels = shape.kernel, x.shape[1]
    rows, columns = (n + 2 * p for n, p in zip(x.shape[2:], shape.padding, strict=True))
    patches = shape.positions * (channels * high * wide) ** 2 / 2
    return x.shape[0] * shape.positions > 0 and rows * high * (channels * columns) ** 2 < patches


def _by_rows(x: Tensor, shape: ConvolutionShape) -> Tensor:
    (high, wide), (step, side) = shape.kernel, shape.stride
    (hole, gap), (tall, broad) = shape.dilation, shape.outputs
    batch, channels = x.shape[:2]
    below, beside = shape.padding
    x = pad(x, (beside, beside, below, below))
    rows = x.permute(2, 0, 1, 3).flatten(2)  # [H, B, C W]
    out = x.new_empty(high, channels, wide, high, channels, wide)
    for apart in range(high):
        count = len(rows) - hole * apart
        products = rows[:count].mT @ rows[hole * apart :]
        for i in range(high - apart):
            added = products[hole * i : hole * i + step * (tall - 1) + 1 : step].sum(0)
            block = added.view(channels, x.shape[3], channels, x.shape[3])
            for j in range(wide):
                for k in range(wide):
                    window = block[:, gap * j : gap * j + side * (broad - 1) + 1 : side]
                    window = window[..., gap * k : gap * k + side * (broad - 1) + 1 : side]
                    sums = window.diagonal(dim1=1, dim2=3).sum(2)
                    out[i, :, j, i + apart, :, k] = sums
                    out[i + apart, :, k, i, :, j] = sums.mT
    matrix = out.permute(1, 0, 2, 4, 3, 5).reshape(channels * high * wide, -1)
    return (matrix + matrix.mT).mul_(0.5 / (batch * shape.positions))
