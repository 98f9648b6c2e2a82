"""The operator behind convolutions: squared norms, and gradients where they are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.ghost import reference_conv
from dpkernels.ops.ghost.conv_shape import ConvShape
from dpkernels.ops.ghost.layer import DTYPES, sum_dtype


def run_conv_norms(
    shape: ConvShape,
    x: Tensor,
    d: Tensor,
    bias: bool,
    scale: Tensor | None,
    formula: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(sq_norms, grads, bias_grads)``; see ``reference_conv.conv_norms``."""
    run = backend.select(_conv_norms, x.device, x.dtype)
    result: tuple[Tensor, Tensor, Tensor] = run(x, d, *shape.geometry(), bias, scale, formula, keep)
    return result


def _fake_conv_norms(
    activations: Tensor,
    errors: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: bool,
    scale: Tensor | None,
    formula: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = activations.shape[1] // groups
    for size in kernel_size:
        columns *= size
    batch, rows, dtype = activations.shape[0], errors.shape[1], sum_dtype(activations.dtype)
    return (
        activations.new_empty(batch, dtype=torch.float64),
        activations.new_empty((batch, rows if keep else 0, columns), dtype=dtype),
        activations.new_empty((batch, rows if keep and bias else 0), dtype=dtype),
    )


_conv_norms = backend.register(
    "ghost_conv_norms(Tensor activations, Tensor errors, int[] kernel_size, int[] stride, "
    "int[] padding, int[] dilation, int groups, bool bias, Tensor? scale, str formula, bool keep)"
    " -> (Tensor sq_norms, Tensor grads, Tensor bias_grads)",
    reference=reference_conv.conv_norms,
    fake=_fake_conv_norms,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_conv:conv_norms",
)
