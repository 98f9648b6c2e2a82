"""Norms and clipped sums of a linear layer with one position for each sample, on GPUs.

Made of the Triton kernels of ``clip``, ``kron`` and linear layers: there is none of its own here.
"""

from __future__ import annotations

from torch import Tensor

from dpkernels.ops.clip import triton_impl as clip_triton
from dpkernels.ops.ghost.triton_linear import weighted_sum_
from dpkernels.ops.kron import triton_impl as kron_triton


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
    factors = clip_triton.clip_factors(squares.unsqueeze(0), [max_norm], False, 0.0, out.dtype)
    weighted_sum_(out, bias_out, a, d, factors.squeeze(0), None, accumulate)
    return squares, factors.squeeze(0)


def _measured(x: Tensor, factor: list[Tensor], tail: float, augment: bool) -> tuple[Tensor, Tensor]:
    rows, transformed = x.squeeze(1), x.new_empty(0)
    if factor:
        transformed = x.new_empty(x.shape[0], 1, factor[0].shape[0])
        kron_triton.apply_factor_(transformed.squeeze(1), rows, factor, tail, augment)
        rows = transformed.squeeze(1)
    return transformed, clip_triton.row_sq_norms([rows], False)
