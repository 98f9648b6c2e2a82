"""Per-sample gradients of an elementwise scale and shift in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from dpkernels.ops.ghost.layer import sum_dtype


def scale_shift_grads(
    normalised: Tensor,
    errors: Tensor,
    channels_first: bool,
    bias: bool,
    weight_scale: Tensor | None,
    bias_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``[B, N]`` sums over positions of normalised * errors and of errors, scaled.

    normalised, errors: ``[B, M, N]``, or ``[B, N, M]`` if ``channels_first``.
    weight_scale, bias_scale: float64 ``[N]`` or None. Without a bias its result is ``[B, 0]``.
    """
    dtype = sum_dtype(errors.dtype)
    axis = 2 if channels_first else 1
    wide = errors.double()
    weight_grads = (normalised.double() * wide).sum(axis)
    bias_grads = wide.sum(axis) if bias else wide.new_empty((errors.shape[0], 0))
    if weight_scale is not None:
        weight_grads = weight_grads * weight_scale
    if bias and bias_scale is not None:
        bias_grads = bias_grads * bias_scale
    return weight_grads.to(dtype), bias_grads.to(dtype)
