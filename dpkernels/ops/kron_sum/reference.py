"""``sum_i G_i X A_i`` in plain PyTorch: documentation, fallback and truth of the compiled one."""

from __future__ import annotations

import torch
from torch import Tensor


def kron_sum_(
    out: list[Tensor],
    gs: list[Tensor],
    as_: list[Tensor],
    xs: list[Tensor],
    centers: list[Tensor],
    accumulate: bool,
) -> None:
    """``out[l] (+)= sum_i gs[l][i] (xs[l] - centers[l][i]) as_[l][i]``; no centers are zero."""
    for index, (target, g, a, x) in enumerate(zip(out, gs, as_, xs, strict=True)):
        difference = x - centers[index] if centers else x
        # [G_1 X, .., G_n X] side by side times the A_i one below the other: the clients are added
        # up inside of one product.
        halves = torch.matmul(g, difference).transpose(0, 1).flatten(1)
        stacked = a.flatten(0, 1)
        if accumulate:
            target.addmm_(halves, stacked)
        else:
            torch.mm(halves, stacked, out=target)
