"""Block kinds in which samples meet, or in which an axis is not what it seems: to be refused.

Where one is not refused, the bound must hold all the same: it did if it happened to mix nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from python_tests.engine.random_models.blocks import VOCABULARY, F, Of, on_channels, on_states


class Functional(nn.Module):
    """A function of states as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


def sorted_and_back(h: Tensor) -> Tensor:
    order = h[:, 0, 0].argsort()
    signs = (-1.0) ** torch.arange(len(h)).view(-1, 1, 1)
    return (h[order] * signs.to(h.dtype))[order.argsort()]


def mixed_up(h: Tensor) -> Tensor:
    """Mixup inside of the model: every record gets a part of another."""
    order = torch.randperm(len(h), generator=torch.Generator().manual_seed(3))
    return 0.7 * h + 0.3 * h[order]


class InTraining(nn.Module):
    """Centres the batch while it trains, not while it is evaluated."""

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.training else h


class Remembering(nn.Module):
    """A running mean in a plain attribute, which no buffer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | float = 0.0

    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean((0, 1))
        return h - self.mean


class Running(nn.Module):
    """A running mean in a module without parameters, in place or replaced."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(F))
        self.in_place = in_place

    def forward(self, h: Tensor) -> Tensor:
        now = 0.5 * h.detach().mean((0, 1))
        if self.in_place:
            self.mean.mul_(0.5).add_(now)
        else:
            self.mean = 0.5 * self.mean + now
        return h - self.mean


def _second_axis(*layers: nn.Module) -> Of:
    return Of(lambda m, h, tokens: m(h.transpose(0, 1)).transpose(0, 1), nn.Sequential(*layers))


# One sample changes another's gradient, or an axis is not what it seems: to be refused.
HOSTILE: dict[str, Callable[[], nn.Module]] = {
    "F.batch_norm": lambda: on_channels(
        Functional(lambda h: functional.batch_norm(h, None, None, training=True))
    ),
    "minus the mean": lambda: on_states(Functional(lambda h: h - h.mean(0))),
    "minus the mean, detached": lambda: on_states(Functional(lambda h: h - h.mean(0).detach())),
    "roll": lambda: on_states(Functional(lambda h: h.roll(1, 0))),
    "sort and unsort": lambda: on_states(Functional(sorted_and_back)),
    "running mean in place": lambda: on_states(Running(in_place=True)),
    "running mean replaced": lambda: on_states(Running(in_place=False)),
    "linear, samples second": lambda: _second_axis(nn.Linear(F, F)),
    "layer norm, samples second": lambda: _second_axis(nn.LayerNorm(F)),
    "embedding, samples second": lambda: Of(
        lambda m, h, tokens: h + m(tokens.t()).transpose(0, 1), nn.Embedding(VOCABULARY, F)
    ),
    "embedding of [1, N]": lambda: Of(
        lambda m, h, tokens: h + m(tokens[:, :1].t()).transpose(0, 1), nn.Embedding(VOCABULARY, F)
    ),
    "one token a sample": lambda: Of(
        lambda m, h, tokens: h + m(tokens[:, 0]).view(-1, 1, F), nn.Embedding(VOCABULARY, F)
    ),
    "layer norm over samples": lambda: on_states(
        Functional(
            lambda h: functional.layer_norm(h.permute(1, 2, 0), h.shape[:1]).permute(2, 0, 1)
        )
    ),
    "attention over samples": lambda: _second_axis(
        nn.TransformerEncoderLayer(F, 2, 8, dropout=0.0, batch_first=True)
    ),
    "largest of the batch": lambda: on_states(Functional(lambda h: h / h.abs().amax())),
    "minus the mean, in training only": lambda: on_states(InTraining()),
    "running mean in an attribute": lambda: on_states(Remembering()),
    "mixup": lambda: on_states(Functional(mixed_up)),
    "scrambled over the batch": lambda: on_states(
        Functional(lambda h: h.permute(2, 1, 0).reshape(h.shape))
    ),
    "batch norm that trains": lambda: on_channels(nn.BatchNorm1d(F).requires_grad_(False)),
    "frozen table with max_norm": lambda: Of(
        lambda m, h, tokens: h + m(tokens),
        nn.Embedding(VOCABULARY, F, max_norm=0.5).requires_grad_(False),
    ),
}
