"""What forward passes write into the model: it leaves with the model, without noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.adversary.attack import Attack, Claim, attack
from benchmarks.adversary.moved import Records, one_pass, private

WRITES = Claim("numbers of the model changed", most=0)


def changed(model: nn.Module, x: Tensor) -> float:
    """Return how many numbers of the model's frozen state a training step changes."""
    training, optimizer = private(model)
    frozen = {k: v for k, v in model.state_dict(keep_vars=True).items() if not v.requires_grad}
    before = {k: v.clone() for k, v in frozen.items()}
    try:
        one_pass(model, optimizer, Records.of(x))
        optimizer.step()
    finally:
        training.detach()
    return sum(int((v != before[k]).sum()) for k, v in frozen.items())


class Behind(nn.Module):
    """A frozen module, and a trained layer behind it."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = first.requires_grad_(False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, ..., 2]``."""
        output: Tensor = self.head(self.first(x))
        return output


class RunningMean(nn.Module):
    """Subtracts a running mean of what it has seen; it has no parameter."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x - mean``, and move the mean."""
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Remembers(nn.Module):
    """Writes its last input into a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        self.last.data = x[0].detach().clone()
        return x


@attack(5, "frozen Embedding(max_norm=1)", WRITES)
def max_norm() -> float:
    """Rows that the batch touches are rescaled."""
    torch.manual_seed(1)
    table = nn.Embedding(10, 4, max_norm=1.0)
    table.weight.data *= 10
    return changed(Behind(table), torch.tensor([[1, 2], [3, 4]]))


@attack(5, "buffer that forward changes in place", WRITES)
def buffer_in_place() -> float:
    """A running mean in a module without parameters."""
    return changed(Behind(RunningMean()), torch.randn(4, 4))


@attack(5, "frozen parameter that forward replaces by .data", WRITES)
def parameter_data() -> float:
    """The first record itself, in a frozen parameter."""
    return changed(Behind(Remembers()), torch.randn(4, 4))


ATTACKS: list[Attack] = [max_norm, buffer_in_place, parameter_data]
