"""``DPMultiheadAttention``: torch's attention under Opacus' name, and ``SequenceBias``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SequenceBias(nn.Module):
    """One more position at the end of every sequence, which is a parameter.

    embed_dim: E, its size. batch_first: whether inputs are ``[B, T, E]``, or ``[T, B, E]``.
    """

    def __init__(self, embed_dim: int, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.randn(embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with T + 1 positions."""
        positions = 1 if self.batch_first else 0
        last = self.bias.expand_as(x.narrow(positions, 0, 1))
        return torch.cat([x, last], positions)


class DPMultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``, which takes the arguments of Opacus' as it is.

    The engine has a rule for it. Parameters are torch's (``in_proj_weight``, ...), which are the
    names that Opacus' writes to a ``state_dict``, too. Masks that Opacus refuses (``is_causal``,
    boolean masks of any kind) work as torch's do.
    """
