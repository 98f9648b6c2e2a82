"""Norms and clipped sums of a linear layer with one position for each sample, on GPUs.

Made of the Triton kernels of ``clip`` and of linear layers: there is none of its own here.
"""

from __future__ import annotations

from torch import Tensor

from dpkernels.ops.clip import triton_impl as clip_triton
from dpkernels.ops.ghost.triton_linear import transform, weighted_sum_


def rank_one(
    activations: Tensor,
    errors: Tensor,
    right: Tensor | None,
    left: Tensor | None,
    augment: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``[a, 1] U_A``, ``d U_G`` and ``|U_A a|^2 |U_G d|^2``, one position for each sample.

    The first two are empty where there is no matrix. ``bias``: the first norm counts 1 more.
    """
    a, a_sq_norms = _measured(activations, right, augment)
    d, d_sq_norms = _measured(errors, left, False)
    return a, d, d_sq_norms * (a_sq_norms + 1.0 if bias else a_sq_norms)


def rank_one_clip_(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    right: Tensor | None,
    left: Tensor | None,
    augment: bool,
    max_norm: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """Clip the gradients of ``rank_one`` to ``max_norm`` and add them up; return norms, factors."""
    bias = bias_out is not None and not augment
    a, d, squares = rank_one(activations, errors, right, left, augment, bias)
    a, d = activations if right is None else a, errors if left is None else d
    factors = clip_triton.clip_factors(squares.unsqueeze(0), [max_norm], False, 0.0, out.dtype)
    weighted_sum_(out, bias_out, a, d, factors.squeeze(0), accumulate)
    return squares, factors.squeeze(0)


def _measured(x: Tensor, matrix: Tensor | None, augment: bool) -> tuple[Tensor, Tensor]:
    rows = x.squeeze(1)
    if matrix is not None:
        y, squares = transform(rows, matrix, augment)
        return y.unsqueeze(1), squares
    return x.new_empty(0), clip_triton.row_sq_norms([rows], False)
