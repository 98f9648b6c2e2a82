"""Norms and weighted sums of a linear layer's per-sample gradients in plain PyTorch.

These functions are the documentation of the compiled ones, the fallback where those are missing,
and the truth that the others are tested against. They take the arguments of the operators' schemas
(``dpkernels.ops.ghost.linear``), already checked: activations ``[B, T, I]``, errors ``[B, T, O]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.clip import reference as clip
from dpkernels.ops.ghost.rounding import raised, rounding_error
from dpkernels.ops.kron import reference as kron


def sq_norms(activations: Tensor, errors: Tensor, bias: bool, gram: bool) -> tuple[Tensor, Tensor]:
    """Squared norms ``[B]`` of ``sum_t d_t a_t^T``, plus ``|sum_t d_t|^2`` if ``bias``; float64.

    ``gram``: ``sum_{s,t} (a_s . a_t)(d_s . d_t)`` is how compiled implementations get there; here
    it is the squares of the gradient itself, in float64, with the bound of their error and of that
    of their sum. Also returned is which samples' shares of the sum have to be computed apart, in
    float64: none, as the sum here is.
    """
    a, d = activations.double(), errors.double()
    error = 2 * rounding_error(torch.float64, a.shape[1])
    d_lengths = torch.linalg.vector_norm(d, dim=2)
    terms = (torch.linalg.vector_norm(a, dim=2) * d_lengths).sum(1)
    squares = raised((d.mT @ a).square().sum((1, 2)), error * terms)
    # Where an infinity meets zeros only, the product is NaN, and so is the norm.
    if bias:
        squares = squares + raised(d.sum(1).square().sum(1), error * d_lengths.sum(1))
    return squares, torch.zeros_like(squares, dtype=torch.bool)


def weighted_sum_(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    factors: Tensor,
    apart: Tensor | None,
    accumulate: bool,
) -> None:
    """``out (+)= sum_b factors[b] sum_t d_bt a_bt^T``; a factor of 0 ignores its sample, NaN too.

    ``bias_out (+)= sum_b factors[b] sum_t d_bt``; if activations have one column more than
    ``out``, the last column of the sum is the bias instead. ``apart``: samples whose terms a
    product in float32 would round before they cancel; here all of it is float64, rounded once.
    """
    weights = factors.double()[:, None, None]
    a = torch.where(weights != 0, activations.double(), 0.0).flatten(0, 1)
    d = torch.where(weights != 0, errors.double() * weights, 0.0).flatten(0, 1)
    product = d.T @ a
    homogeneous = a.shape[1] == out.shape[1] + 1
    totals = [(out, product[:, : out.shape[1]])]
    if bias_out is not None:
        totals.append((bias_out, product[:, -1] if homogeneous else d.sum(0)))
    for target, total in totals:
        if accumulate:
            target.add_(total.to(target.dtype))
        else:
            target.copy_(total)


def rank_one(
    activations: Tensor,
    errors: Tensor,
    right: list[Tensor],
    right_tail: float,
    left: list[Tensor],
    left_tail: float,
    augment: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``[a, 1] U_A``, ``d U_G`` and ``|U_A a|^2 |U_G d|^2``, one position for each sample.

    The first two are empty where there is no factor. ``bias``: the first norm counts 1 more.
    """
    a, a_sq_norms = _measured(activations, right, right_tail, augment)
    d, d_sq_norms = _measured(errors, left, left_tail, False)
    return a, d, d_sq_norms * (a_sq_norms + 1.0 if bias else a_sq_norms)


def _measured(x: Tensor, factor: list[Tensor], tail: float, augment: bool) -> tuple[Tensor, Tensor]:
    rows, transformed = x.squeeze(1), x.new_empty(0)
    if factor:
        transformed = x.new_empty(x.shape[0], 1, factor[0].shape[0])
        kron.apply_factor_(transformed.squeeze(1), rows, factor, tail, augment)
        rows = transformed.squeeze(1)
    return transformed, torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()


def rank_one_clip_(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    right: list[Tensor],
    right_tail: float,
    left: list[Tensor],
    left_tail: float,
    augment: bool,
    max_norm: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """Clip the gradients of ``rank_one`` to ``max_norm`` and add them up; return norms, factors."""
    bias = bias_out is not None and not augment
    a, d, squares = rank_one(activations, errors, right, right_tail, left, left_tail, augment, bias)
    a, d = a if right else activations, d if left else errors
    factors = clip.clip_factors(squares.unsqueeze(0), [max_norm], False, 0.0, out.dtype).squeeze(0)
    weighted_sum_(out, bias_out, a, d, factors, None, accumulate)
    return squares, factors
