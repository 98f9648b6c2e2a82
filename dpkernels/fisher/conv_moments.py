"""A and G of a convolution; A from products of the input's rows, without its patches.

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

# Elements of a product that is kept for each row of a kernel: 16 MB in float32.
_LARGEST_PRODUCT = 1 << 22


def patch_moment(x: Tensor, *, bias: bool, **geometry: Any) -> Tensor:
    """Return the mean of p p^T over the patches p of ``x``, ``[n, n]``, by the cheaper form.

    Arguments, result and what raises: ``dpkernels.ops.kron.conv_second_moment``, one group.
    """
    shape = ConvolutionShape.of("patch_moment", x, **geometry)
    if x.dim() != 4 or not _pays(shape, x):
        return kron.conv_second_moment(x, bias=bias, **geometry)
    moment = _by_rows(x.to(sum_dtype(x.dtype)), shape)
    if bias:
        sums = kron.mean_patches(x, **geometry)[0].mean(0)
        last = pad(sums, (0, 1), value=1.0)
        moment = torch.cat([torch.cat([moment, sums[None]]), last[:, None]], 1)
    return finite("patch_moment", moment)


def channel_moment(errors: Tensor) -> Tensor:
    """Return the mean of d d^T over records and positions of errors ``[B, O, *output]``.

    As ``dpkernels.ops.kron.second_moment`` with ``channel_dim=1``, but for channels in front of
    positions one product for each record: of 6 channels, a ninth of the time.
    """
    d = errors.detach().to(sum_dtype(errors.dtype)).flatten(2)
    if d.is_contiguous():
        product = (d @ d.mT).sum(0)
    else:
        rows = d.mT.reshape(-1, d.shape[1])
        product = rows.mT @ rows
    return finite("channel_moment", (product + product.mT).mul_(0.5 * d.shape[1] / d.numel()))


def _pays(shape: ConvolutionShape, x: Tensor) -> bool:
    (high, wide), channels = shape.kernel, x.shape[1]
    rows, columns = (n + 2 * p for n, p in zip(x.shape[2:], shape.padding, strict=True))
    product = (channels * columns) ** 2
    patches = shape.positions * (channels * high * wide) ** 2 / 2
    wanted = x.shape[0] * shape.positions > 0 and product <= _LARGEST_PRODUCT
    return wanted and rows * high * product < patches


def _by_rows(x: Tensor, shape: ConvolutionShape) -> Tensor:
    """Return the mean of p p^T, ``[n, n]``, of x ``[B, C, H, W]``."""
    high, hole = shape.kernel[0], shape.dilation[0]
    below, beside = shape.padding
    x = pad(x, (beside, beside, below, below))
    batch, channels, _, columns = x.shape
    rows = x.permute(2, 0, 3, 1).reshape(len(x[0, 0]), batch, columns * channels)
    out = x.new_empty(channels, high, shape.kernel[1], channels, high, shape.kernel[1])
    for apart in range(high):
        sums = x.new_zeros(high - apart, rows.shape[2], rows.shape[2])
        for kernel_rows, chosen in _row_groups(shape, high - apart):
            own, other = (_taken(rows, chosen, ahead) for ahead in (0, hole * apart))
            product = own.mT @ other
            for i in kernel_rows:
                sums[i] += product
        products = sums.view(-1, columns, channels, columns, channels)
        for i, block in enumerate(_along_diagonals(products, shape)):
            out[:, i, :, :, i + apart] = block
            out[:, i + apart, :, :, i] = block.permute(2, 3, 0, 1)
    matrix = out.flatten(0, 2).flatten(1)
    return (matrix + matrix.mT).mul_(0.5 / (batch * shape.positions))


def _row_groups(shape: ConvolutionShape, count: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return rows of the input that the same of the first ``count`` kernel rows meet."""
    users: dict[int, list[int]] = {}
    for i in range(count):
        for h in range(shape.outputs[0]):
            users.setdefault(shape.stride[0] * h + shape.dilation[0] * i, []).append(i)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, kernel_rows in users.items():
        groups.setdefault(tuple(kernel_rows), []).append(row)
    return list(groups.items())


def _taken(rows: Tensor, chosen: list[int], ahead: int) -> Tensor:
    """Return some of rows ``[H, B, n]`` as ``[rows B, n]``, without a copy if they are in a row."""
    first, last = chosen[0] + ahead, chosen[-1] + ahead + 1
    if last - first == len(chosen):
        return rows[first:last].flatten(0, 1)
    return rows[[r + ahead for r in chosen]].flatten(0, 1)


def _along_diagonals(products: Tensor, shape: ConvolutionShape) -> Tensor:
    """Return ``[N, C, k, C, k]``: of ``[N, W, C, W, C]`` the sums over columns that k, k' meet."""
    wide, step, hole = shape.kernel[1], shape.stride[1], shape.dilation[1]
    length = step * (shape.outputs[1] - 1) + 1
    count, _, channels = products.shape[:3]
    out = products.new_empty(wide, wide, count, channels, channels)
    for j in range(wide):
        own = products[:, hole * j : hole * j + length : step]
        for k in range(wide):
            window = own[:, :, :, hole * k : hole * k + length : step]
            torch.sum(window.diagonal(dim1=1, dim2=3), 3, out=out[j, k])
    return out.permute(2, 3, 0, 4, 1)
