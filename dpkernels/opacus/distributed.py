"""``DifferentiallyPrivateDistributedDataParallel``: one model in all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """The model with the parameters of rank 0 in all processes.

    Gradients of all processes are added up by the engine, in ``optimizer.step()``, after they are
    clipped and each has its share of the noise: there is nothing to do here in a backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in model.parameters():
                torch.distributed.broadcast(parameter, 0)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)
