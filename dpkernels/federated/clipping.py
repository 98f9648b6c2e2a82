"""Clip what whole clients upload: each row to a norm of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.clip import clip_factors, row_sq_norms


def clip_rows(values: Tensor, bound: float) -> Tensor:
    """Return each row of ``values``, ``[k, *shape]``, projected onto the ball of radius ``bound``.

    ``v min(1, bound / |v|)``: norms in float64, factors rounded towards zero. A row that is not
    finite becomes zero. As a projection it never moves two rows apart: neighbours that differ by r
    before differ by at most r afterwards.
    """
    factors = clip_factors(row_sq_norms(values.flatten(1)), bound, dtype=values.dtype)
    shaped = factors.reshape(-1, *(1 for _ in values.shape[1:]))
    return torch.where(shaped == 0, torch.zeros_like(values), values * shaped)
