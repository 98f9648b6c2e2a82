"""Norms of a linear layer's gradients with one position for each sample, on GPUs.

Products are ``torch.matmul``, norms the Triton kernels of ``clip``: there is none of its own here.
"""

from __future__ import annotations

from torch import Tensor

from dpkernels.ops.clip import triton_impl as clip_triton
from dpkernels.ops.ghost.triton_linear import transform


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


def _measured(x: Tensor, matrix: Tensor | None, augment: bool) -> tuple[Tensor, Tensor]:
    rows = x.squeeze(1)
    if matrix is not None:
        y, squares = transform(rows, matrix, augment)
        return y.unsqueeze(1), squares
    return x.new_empty(0), clip_triton.row_sq_norms([rows], False)
