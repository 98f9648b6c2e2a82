"""The geometry of a convolution, and the mean of its patches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpkernels.ops.kron import reference
from dpkernels.ops.kron.inputs import DTYPES, describe


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution over an input: one number for each spatial axis in every list.

    outputs: sizes of the output, the positions of the patches.
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    outputs: list[int]

    @classmethod
    def of(
        cls,
        op: str,
        x: Tensor,
        kernel_size: Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        groups: int,
    ) -> ConvolutionShape:
        """Check the arguments of a convolution over ``x`` and return its geometry."""
        axes = x.dim() - 2
        if axes not in (1, 2, 3) or x.dtype not in DTYPES:
            raise ValueError(
                f"{op}: x must be [B, C, L], [B, C, H, W] or [B, C, D, H, W] "
                f"float32/bf16/fp16/float64, got {describe(x)}"
            )
        if groups < 1 or x.shape[1] % groups:
            raise ValueError(
                f"{op}: groups must divide the {x.shape[1]} channels of x, got {groups}"
            )
        kernel = _for_each_axis(op, "kernel_size", kernel_size, axes, 1)
        steps = _for_each_axis(op, "stride", stride, axes, 1)
        borders = _for_each_axis(op, "padding", padding, axes, 0)
        holes = _for_each_axis(op, "dilation", dilation, axes, 1)
        outputs = [
            max(0, (size + 2 * border - hole * (taps - 1) - 1) // step + 1)
            for size, border, hole, taps, step in zip(
                x.shape[2:], borders, holes, kernel, steps, strict=True
            )
        ]
        return cls(kernel, steps, borders, holes, groups, outputs)

    @property
    def positions(self) -> int:
        """How many patches a sample has."""
        return math.prod(self.outputs)

    def arguments(self) -> tuple[list[int], list[int], list[int], list[int], int]:
        """Return kernel, stride, padding, dilation and groups, as the operator takes them."""
        return self.kernel, self.stride, self.padding, self.dilation, self.groups


def _for_each_axis(
    op: str, name: str, value: int | Sequence[int], axes: int, least: int
) -> list[int]:
    values = [value] * axes if isinstance(value, int) else list(value)
    if len(values) != axes or any(v < least for v in values):
        raise ValueError(
            f"{op}: {name} must be {axes} integers >= {least}, one for each spatial axis of x, got "
            f"{value}"
        )
    return values


def mean_patches(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """The mean patch of every sample: ``[groups, B, C / groups * kernel elements]``.

    Arguments as for ``conv_second_moment``. One mean over a strided window of x for each element of
    the kernel; the patches are not formed. float32 (float64 for float64 x).
    """
    shape = ConvolutionShape.of("mean_patches", x, kernel_size, stride, padding, dilation, groups)
    axes = list(range(2, x.dim()))
    padded = pad(x.detach(), [p for side in reversed(shape.padding) for p in (side, side)])
    steps = zip(shape.kernel, shape.stride, shape.dilation, shape.outputs, strict=True)
    windows = [
        [slice(hole * k, hole * k + step * (out - 1) + 1, step) for k in range(size)]
        for size, step, hole, out in steps
    ]
    means = [
        padded[(slice(None), slice(None), *window)].mean(axes, dtype=reference.sum_dtype(x.dtype))
        for window in itertools.product(*windows)
    ]
    by_group = torch.stack(means, -1).unflatten(1, (groups, -1))  # [B, groups, C / groups, K]
    patches: Tensor = by_group.transpose(0, 1).flatten(2)
    return patches
