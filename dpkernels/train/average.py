"""A moving average of the parameters that were released, evaluated instead of the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """Exponential moving average of a model's parameters: post-processing, which costs no privacy.

    mean <- d mean + (1 - d) w,  d = min(decay, (1 + t) / (10 + t)) after t earlier updates

    It begins at the parameters that the model has when this is built; the smaller d of the first
    updates soon forgets those.

    decay: in [0, 1); 0 keeps the last parameters only.

    Cost: one number for each parameter, and one pass over them for each update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"Average: decay must be in [0, 1), got {decay}")
        self._parameters: list[Tensor] = list(model.parameters())
        self._decay, self._updates = decay, 0
        self._means = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present parameters."""
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        torch._foreach_lerp_(self._means, self._parameters, 1 - decay)
        self._updates += 1

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Have the average in the model, for an evaluation, and then its parameters again."""
        kept = [p.detach().clone() for p in self._parameters]
        self._put(self._means)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, values)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; tensors are not copied."""
        return {"updates": self._updates, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint."""
        self._updates = state["updates"]
        for mean, value in zip(self._means, state["means"], strict=True):
            mean.copy_(value)
