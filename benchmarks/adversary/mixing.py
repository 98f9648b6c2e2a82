"""User code in which one record changes the gradient of another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.adversary.attack import Attack, attack
from benchmarks.adversary.moved import Records, moved
from benchmarks.adversary.state import RunningMean


class Mixed(nn.Module):
    """A linear layer, what mixes the records, and another linear layer."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 3]``."""
        output: Tensor = self.last(self.mix(self.first(x)))
        return output.square() * 100


def batch_norm(x: Tensor) -> Tensor:
    """Normalise over the batch."""
    return functional.batch_norm(x, None, None, training=True)


def centred(x: Tensor) -> Tensor:
    """Subtract the batch's mean."""
    return x - x.mean(0)


def centred_detached(x: Tensor) -> Tensor:
    """Subtract the batch's mean as a constant: errors stay apart, activations do not."""
    return x - x.mean(0).detach()


def sorted_and_back(x: Tensor) -> Tensor:
    """Sort the records, turn every other one's sign, and put them back."""
    order = x[:, 0].argsort()
    signs = (-1.0) ** torch.arange(len(x)).unsqueeze(1)
    return (x[order] * signs)[order.argsort()]


def rolled(x: Tensor) -> Tensor:
    """Give every record the next one's features."""
    return x.roll(1, 0)


def scrambled(x: Tensor) -> Tensor:
    """Reshape what is transposed: the first axis is as long as before, and holds all records."""
    return x.mT.reshape(x.shape)


def mixed_up(x: Tensor) -> Tensor:
    """Add a part of another record: mixup inside of the model."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    return 0.7 * x + 0.3 * x[order]


class InTraining(nn.Module):
    """Subtracts the batch's mean while it trains, not while it is evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        """Return states ``[B, 4]``."""
        return x - x.mean(0) if self.training else x


class InAttribute(nn.Module):
    """Keeps a running mean in a plain attribute, which no buffer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x - mean``, and move the mean."""
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "F.batch_norm": batch_norm,
    "x - x.mean(0)": centred,
    "x - x.mean(0).detach()": centred_detached,
    "sort, sign by rank, unsort": sorted_and_back,
    "x.roll(1, 0)": rolled,
    "x.mT.reshape(x.shape)": scrambled,
    "mixup": mixed_up,
    "x - x.mean(0), in training mode only": InTraining(),
    "running mean in a plain attribute": InAttribute(),
}


def _mixed(mix: Callable[[Tensor], Tensor]) -> float:
    torch.manual_seed(1)
    x = torch.randn(6, 4)
    x[0] *= 20
    return moved(Mixed(mix), Records.of(x))


@attack(8, "running mean in a module without parameters")
def running_mean() -> float:
    """The mean that is subtracted is partly this batch's."""
    return _mixed(RunningMean())


ATTACKS: list[Attack] = [
    *(attack(8, f"samples mix: {name}")(partial(_mixed, mix)) for name, mix in MIXES.items()),
    running_mean,
]
