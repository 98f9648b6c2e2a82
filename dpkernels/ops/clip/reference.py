"""Clipping of materialised per-sample gradients in plain PyTorch.

These functions are the documentation of the compiled ones, the fallback where those are missing,
and, given float64 inputs, the truth that the others are tested against. They take the arguments
of the operators' schemas (``dpkernels.ops.clip``), already checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.full_precision import full_precision

# Squares of float64 numbers below 1e-154 are lost (squares of float32 numbers never get there).
# This covers all that a row can lose, and is itself lost beside any other squared norm.
LOST_SQUARES = 2.0**-1000


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors and sums for gradients of ``dtype``: float32 or wider."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def valid(sq_norms: Tensor) -> Tensor:
    """Return where a squared norm is one: finite, and not negative by cancellation."""
    return (sq_norms >= 0) & (sq_norms < float("inf"))


def row_sq_norms(grads: list[Tensor], per_tensor: bool) -> Tensor:
    """Squared norms of the rows in float64: ``[L, B]`` per tensor, or ``[B]`` over all tensors."""
    norms = [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in grads]
    sq_norms = torch.stack(norms).square()
    return sq_norms if per_tensor else sq_norms.sum(0)


def clip_factors(
    sq_norms: Tensor, max_norms: list[float], normalise: bool, gamma: float, dtype: torch.dtype
) -> Tensor:
    """Clip factors ``[L, B]`` from squared norms ``[L, B]``, rounded towards zero.

    ``min(1, C / norm)``, or ``C / (norm + gamma)`` if ``normalise``; 0 in all layers for a sample
    with a norm that is not valid. Rounding towards zero keeps ``factor * norm <= C``.
    """
    bounds = sq_norms.new_tensor(max_norms, dtype=torch.float64).unsqueeze(1)
    norms = (sq_norms + LOST_SQUARES).sqrt()
    if normalise:
        exact = bounds / (norms + gamma)
    else:
        exact = torch.where(norms > bounds, bounds / norms, 1.0)
    return rounded_down(torch.where(valid(sq_norms).all(0), exact, 0.0), dtype)


def layer_factors(
    sq_norms: list[Tensor],
    scale: float,
    max_norm: float,
    normalise: bool,
    gamma: float,
    dtype: torch.dtype,
) -> Tensor:
    """``scale`` times the clip factors ``[B]`` of gradients of norms ``scale^2 sum_l sq_norms[l]``.

    Rounded towards zero.
    """
    total = torch.stack(sq_norms).sum(0) * (scale * scale)
    exact = clip_factors(total.unsqueeze(0), [max_norm], normalise, gamma, torch.float64) * scale
    return rounded_down(exact.squeeze(0), dtype)


def rounded_down(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 factors >= 0 in ``dtype``, none larger than it was."""
    rounded = exact.clamp(max=torch.finfo(dtype).max).to(dtype)
    below = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded.double() > exact, below, rounded)


def weighted_row_sum_(
    out: list[Tensor], grads: list[Tensor], factors: Tensor, accumulate: bool
) -> None:
    """``out[l] (+)= sum_b factors[l, b] * grads[l][b]``; a factor of 0 ignores its row, NaN too."""
    for index, (target, g) in enumerate(zip(out, grads, strict=True)):
        weights = factors[index if factors.shape[0] > 1 else 0]
        finite = torch.where(weights.unsqueeze(1) != 0, g.to(target.dtype), 0.0)
        with full_precision(finite):
            total = weights @ finite
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)


def clip_and_sum_(
    out: list[Tensor],
    grads: list[Tensor],
    max_norms: list[float],
    normalise: bool,
    gamma: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """Clip every row and add the rows up into ``out``; return ``(sq_norms, factors)``.

    One bound in ``max_norms`` clips the norm over all tensors (``[1, B]`` is returned), one bound
    for each tensor clips them one by one (``[L, B]``).
    """
    sq_norms = row_sq_norms(grads, len(max_norms) > 1)
    sq_norms = sq_norms.reshape(len(max_norms), -1)
    factors = clip_factors(sq_norms, max_norms, normalise, gamma, sum_dtype(grads[0].dtype))
    weighted_row_sum_(out, grads, factors, accumulate)
    return sq_norms, factors
