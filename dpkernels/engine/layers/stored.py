"""Layers whose rule hands over gradients of every sample, ``[B, *shape]`` for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpkernels.engine.capture import Captured
from dpkernels.engine.layers.layer import Layer, Norms, Rows, added_up
from dpkernels.engine.layers.slots import Slots
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan


class StoredLayer(Layer):
    """What is captured are per-sample gradients; norms and sums are taken of what is stored.

    slots: where the parameters are.
    """

    slots: Slots

    def errors(self, captured: Captured) -> Sequence[Tensor]:
        """Return all of them: gradients of each sample."""
        return captured

    def norms(self, captured: Captured, sides: Any) -> Norms:
        """Return norms of the gradients ``[B, *shape]``."""
        # A parameter that is one number has gradients [B].
        return Rows.of([g.unsqueeze(-1) for g in captured])

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return what was captured."""
        return tuple(g.to(sum_dtype(g.dtype)) for g in captured)

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses' gradients added up."""
        return added_up(uses)

    def plan(self, captured: Captured, sides: Any) -> Plan:
        """Return what storing, measuring and adding up the gradients costs."""
        elements = sum(g.numel() for g in captured)
        kept = sum(g.numel() * sum_dtype(g.dtype).itemsize for g in captured)
        total = kept // max(1, captured[0].shape[0])
        repeated, reason = self.cost()
        return Plan("stored", repeated + 4 * elements, 2 * kept + total, kept, reason)

    def cost(self) -> tuple[int, str]:
        """Return flops beside those of norms and sum, and how the gradients come about."""
        raise NotImplementedError
