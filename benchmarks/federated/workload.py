"""The round that everything here is measured on: softmax regression, one step, every client.

Needs torch alone, so that the peers' environments can import it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

# Norms of records' gradients are around one, so that about half of them are clipped.
CLIP = 1.0
# Standard deviation of the noise of the sum of clipped gradients, over the clip.
NOISE_MULTIPLIER = 1.0
LR = 0.5


@dataclass(frozen=True)
class Size:
    """How many clients, records of each, features and classes."""

    clients: int = 500
    records: int = 100
    features: int = 64
    classes: int = 10

    def __str__(self) -> str:
        return f"{self.clients} clients x {self.records} records, {self.features} x {self.classes}"

    @property
    def parameters(self) -> dict[str, int]:
        """The same for a table of results."""
        return asdict(self)


def records_of(size: Size, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features ``[clients, records, features]`` float32 and labels int64.

    Norms of features are log-normal around one; labels follow a softmax model, so that there is
    something to learn.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (size.clients, size.records)
    scales = torch.randn(*shape, 1, generator=generator).mul_(0.5).exp_() / size.features**0.5
    x = torch.randn(*shape, size.features, generator=generator).mul_(scales)
    truth = 3 * torch.randn(size.features, size.classes, generator=generator)
    uniform = torch.rand(*shape, size.classes, generator=generator).clamp_(min=1e-9)
    return x, (x @ truth - uniform.log().neg().log()).argmax(2)


def mean_loss(x: Tensor, labels: Tensor, theta: Tensor) -> float:
    """Return the mean cross-entropy of all clients' records at ``theta``, ``[classes, d]``."""
    logits = x.flatten(0, 1) @ theta.T
    return torch.nn.functional.cross_entropy(logits, labels.flatten()).item()
