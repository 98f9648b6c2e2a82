"""Norms and weighted sums of a linear layer's per-sample gradients in plain PyTorch.

These functions are the documentation of the compiled ones, the fallback where those are missing,
and the truth that the others are tested against. They take the arguments of the operators' schemas
(``dpkernels.ops.ghost.linear``), already checked: activations ``[B, T, I]``, errors ``[B, T, O]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Products and sums of float64 that cancel to less than this part of their terms' square say nothing
# any more: the bound of their error stands in for them.
_ROUNDING = 2.0**-48
_NOTHING_LEFT = 1e6 * _ROUNDING


def sq_norms(activations: Tensor, errors: Tensor, bias: bool, gram: bool) -> Tensor:
    """Squared norms ``[B]`` of ``sum_t d_t a_t^T``, plus ``|sum_t d_t|^2`` if ``bias``; float64.

    ``gram``: ``sum_{s,t} (a_s . a_t)(d_s . d_t)``; else the squares of the gradient itself.
    """
    a, d = activations.double(), errors.double()
    if gram:
        squares = ((a @ a.mT) * (d @ d.mT)).sum((1, 2))
        terms = (a.square().sum(2) * d.square().sum(2)).sqrt().sum(1).square()
        low = squares < _NOTHING_LEFT * terms
        squares = torch.where(low, squares.abs() + _ROUNDING * terms, squares)
    else:
        squares = (d.mT @ a).square().sum((1, 2))
    return squares + d.sum(1).square().sum(1) if bias else squares


def weighted_sum_(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    factors: Tensor,
    accumulate: bool,
) -> None:
    """``out (+)= sum_b factors[b] sum_t d_bt a_bt^T``; a factor of 0 ignores its sample, NaN too.

    ``bias_out (+)= sum_b factors[b] sum_t d_bt``; if activations have one column more than
    ``out``, the last column of the sum is the bias instead.
    """
    weights = factors[:, None, None]
    a = torch.where(weights != 0, activations.to(out.dtype), 0.0).flatten(0, 1)
    d = torch.where(weights != 0, errors.to(out.dtype) * weights, 0.0).flatten(0, 1)
    homogeneous = a.shape[1] == out.shape[1] + 1
    totals = [(out, d.T @ a[:, : out.shape[1]])]
    if bias_out is not None:
        totals.append((bias_out, d.T @ a[:, -1] if homogeneous else d.sum(0)))
    for target, total in totals:
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)


def transform(x: Tensor, matrix: Tensor, augment: bool) -> tuple[Tensor, Tensor]:
    """Return ``[x, 1] U`` (``x U`` unless ``augment``) and its rows' squared norms in float64."""
    y = torch.addmm(matrix[-1], x, matrix[:-1]) if augment else x @ matrix
    return y, torch.linalg.vector_norm(y, dim=1, dtype=torch.float64).square()
