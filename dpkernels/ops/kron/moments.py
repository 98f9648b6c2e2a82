"""Second moments A = E[a a^T] of a layer's activations and G = E[d d^T] of its errors.

A weight that is shared over T positions (tokens of a sequence, pixels of an image) has two
approximations (Eschenhagen et al. 2023):

``expand``  every position is a sample: the mean over all B T of them (DP-KFC, formulas 43 and 44).
            Eschenhagen et al. sum the errors' moment over positions: their G is T times as large.
``reduce``  positions are merged first: activations averaged, errors summed, then the mean over the
            B samples. The gradient of a sample is sum_t d_t a_t^T, for which this puts
            (sum_t d_t)(mean_t a_t)^T: exact where all errors of a sample are equal.

Errors must be those of a loss that is *summed* over samples (or taken one sample at a time). A
mean-reduced loss scales them by 1/B and G by 1/B^2, and a damping that was meant for G then drowns
it. Nothing here can tell the difference.

A sum of products is symmetric: only its upper triangle is computed. Input that is not finite, or
too large to be squared, raises ValueError: it comes from probes, so something is wrong with them.
(Inside ``torch.compile`` nothing is looked at; the result is then not finite.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.kron import reference
from dpkernels.ops.kron.convolution import ConvolutionShape, mean_patches
from dpkernels.ops.kron.inputs import (
    DTYPES,
    ROLES,
    SHARINGS,
    Role,
    Sharing,
    describe,
    finite,
    known,
    rows_of,
)


def second_moment(
    x: Tensor,
    *,
    bias: bool = False,
    sharing: Sharing = "expand",
    role: Role = "activations",
    channel_dim: int = -1,
) -> Tensor:
    """``E[x x^T]`` over samples: the Kronecker factor of one side of a layer.

    x: ``[B, n]`` or ``[B, T..., n]`` float32, bfloat16, float16 or float64, any strides.
    bias: append a 1 to every vector, without storing it: the last row and column are then E[x]
        and 1, and the result is ``[n + 1, n + 1]``.
    sharing: what becomes of positions T: ``expand`` or ``reduce``, see the module.
    role: with ``reduce``, ``activations`` are averaged over positions and ``errors`` summed.
    channel_dim: where n is; 1 for the errors of a convolution, ``[B, n, T...]``.

    Returns ``[n, n]`` float32 (float64 for float64 x), exactly symmetric. B T n^2 flops; x is read
    once. Raises ValueError for wrong input, for no samples at all and for x that is not finite.
    """
    op = "second_moment"
    known(op, "sharing", sharing, SHARINGS)
    known(op, "role", role, ROLES)
    rows = rows_of(op, x, channel_dim)
    if sharing == "reduce":
        rows = _merge_positions(rows, role)
    samples = rows.shape[0] * rows.shape[1]
    if samples == 0:
        raise ValueError(f"{op}: x has no samples, got {describe(x)}; skip empty batches")
    run = backend.select(_second_moment, rows.device, rows.dtype)
    moment: Tensor = run(rows, bias, 1.0 / samples)
    return finite(op, moment)


def conv_second_moment(
    x: Tensor,
    kernel_size: Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: bool = False,
    sharing: Sharing = "expand",
) -> Tensor:
    """``E[p p^T]`` over the patches of a convolution's input: its activations' Kronecker factor.

    x: ``[B, C, L]``, ``[B, C, H, W]`` or ``[B, C, D, H, W]`` float32, bfloat16, float16 or float64.
    kernel_size, stride, padding, dilation, groups: as ``torch.nn.Conv1d`` to ``Conv3d`` have them,
        zero padding.
    bias, sharing: as for ``second_moment``; positions are those of the output.

    Returns ``[n, n]`` float32 (float64 for float64 x) with n = C / groups * kernel elements (+ 1),
    in the order of the weight; ``[groups, n, n]`` if there are several groups, because each group
    has a weight of its own. The patches are never stored but a few at a time, for each thread in
    its cache. B T n^2 flops for T positions and each group. Raises ValueError as ``second_moment``.

    The errors' factor is ``second_moment(errors, channel_dim=1)``.
    """
    op = "conv_second_moment"
    shape = ConvolutionShape.of(op, x, kernel_size, stride, padding, dilation, groups)
    known(op, "sharing", sharing, SHARINGS)
    samples = x.shape[0] * (shape.positions if sharing == "expand" else 1)
    if x.shape[0] * shape.positions == 0:
        raise ValueError(
            f"{op}: there are no patches in x {describe(x)} with kernel_size {shape.kernel} and "
            f"padding {shape.padding}; skip empty batches"
        )
    if sharing == "reduce":
        rows = mean_patches(x, kernel_size, stride, padding, dilation, groups)
        moments = [second_moment(group, bias=bias) for group in rows]
        return moments[0] if groups == 1 else torch.stack(moments)
    run = backend.select(_conv_second_moment, x.device, x.dtype)
    moment: Tensor = run(x.detach(), *shape.arguments(), bias, 1.0 / samples)
    return finite(op, moment.squeeze(0) if groups == 1 else moment)


def _merge_positions(rows: Tensor, role: str) -> Tensor:
    dtype = reference.sum_dtype(rows.dtype)
    if role == "errors":
        return rows.sum(1, keepdim=True, dtype=dtype)
    # The mean over no positions would be NaN; no positions are no samples.
    return rows.mean(1, keepdim=True, dtype=dtype) if rows.shape[1] else rows


def _fake_second_moment(x: Tensor, bias: bool, scale: float) -> Tensor:
    size = x.shape[2] + bias
    return x.new_empty((size, size), dtype=reference.sum_dtype(x.dtype))


def _fake_conv_second_moment(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: bool,
    scale: float,
) -> Tensor:
    size = x.shape[1] // groups * math.prod(kernel) + bias
    return x.new_empty((groups, size, size), dtype=reference.sum_dtype(x.dtype))


_second_moment = backend.register(
    "second_moment(Tensor x, bool bias, float scale) -> Tensor",
    reference=reference.second_moment,
    fake=_fake_second_moment,
    dtypes=DTYPES,
    triton="dpkernels.ops.kron.triton_impl:second_moment",
)
_conv_second_moment = backend.register(
    "conv_second_moment(Tensor x, SymInt[] kernel, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt groups, bool bias, float scale) -> Tensor",
    reference=reference.conv_second_moment,
    fake=_fake_conv_second_moment,
    dtypes=DTYPES,
    triton="dpkernels.ops.kron.triton_impl:conv_second_moment",
)
