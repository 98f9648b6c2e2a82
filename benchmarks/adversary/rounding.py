"""Sums that round what their norms did not: cancelling terms, long sums, many microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import dpkernels
from benchmarks.adversary.attack import Attack, attack
from benchmarks.adversary.moved import Records, moved


class Difference(nn.Module):
    """``linear((emb[a] - emb[b]) * value)``: for a = b, huge errors that cancel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(4, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, values: Tensor) -> Tensor:
        """Return ``[B, 3]`` of tokens ``[B, 2]`` and values ``[B, 1]``."""
        rows = self.emb(tokens)
        output: Tensor = 3 * self.head((rows[:, 0] - rows[:, 1]) * values)
        return output


def difference_of_equal_tokens(value: float) -> float:
    """Return how far a record with a = b moves the sum, beside ordinary ones of the same token."""
    tokens = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1], [0, 0]])
    values = torch.tensor([[100.0], [100.0], [100.0], [100.0], [value]])
    return moved(Difference(), Records.of(tokens, values))


class Weighted(nn.Module):
    """A layer whose outputs are weighted by the record: it chooses activations and errors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return ``layer(x) * weights``."""
        output: Tensor = self.layer(x) * weights
        return output


@attack(1, "embedding: four uses of one token, crafted to round")
def crafted_embedding() -> float:
    """2^34 + 1000 - 1000 - 2^34: the exact sum is 0, that of float32 is not."""
    weights = torch.tensor([[2.0**34, 1000.0, -(2.0**34), -1000.0]]).unsqueeze(2)
    model = Weighted(nn.Embedding(3, 1))
    return moved(model, Records.of(torch.zeros(1, 4, dtype=torch.int64), weights))


def crafted_in_plain_pytorch() -> float:
    """Return the same move by the reference backend."""
    with dpkernels.use_backend("reference"):
        return crafted_embedding.run()


class Tied(nn.Module):
    """A table that is also the head: each use of it has its part of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(3, 1), nn.Linear(1, 3, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return ``[B, T + 3]``."""
        uses = self.emb(tokens) * weights
        return torch.cat([uses.flatten(1), self.head(torch.zeros(len(tokens), 1))], 1)


@attack(1, "tied table: 256 uses of one token, hill climbing")
def crafted_tied() -> float:
    """Many uses of a token whose errors round, in a table that a linear layer shares."""
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    model = Tied()
    return climb(
        crafted_terms(256, _mantissa(258, 1)),
        lambda terms: moved(model, Records.of(tokens, terms.view(1, -1, 1))),
    )


def crafted_terms(positions: int, mantissa: float) -> Tensor:
    """Return terms ``[T]`` whose exact sum is 0 and whose float32 sum drifts.

    The first is so large that every one of the next, a little over half a unit of it, is rounded up
    to a whole one. The last two take back what both came to.

    mantissa: of the first term once it is clipped, which says what a unit of it is.
    """
    first = 2.0**20
    tiny = first * 2.0**-24 / mantissa * (1 + 2.0**-8)
    count = positions - 3
    return torch.tensor([first, *[tiny] * count, -tiny * count, -first])


def _mantissa(positions: int, width: int) -> float:
    """Return the mantissa, in [1, 2), of a first term whose record has rounding for a norm.

    At a rounding error of 2^-24 sqrt(T) of the terms, two of which are large.
    """
    return 2 * math.frexp(2.0**24 / (2 * math.sqrt(positions) * width))[0]


def climb(terms: Tensor, move: Callable[[Tensor], float], climbs: int = 40) -> float:
    """Return the largest move that hill climbing finds from ``terms`` on."""
    generator = torch.Generator().manual_seed(0)
    best = move(terms)
    for attempt in range(climbs):
        # Pairs change against each other: the exact sum stays near zero.
        places = torch.randperm(len(terms), generator=generator)[: 2 + 2 * (attempt % 8)]
        step = terms[places].abs().min() * torch.randn(1, generator=generator)
        tried = terms.clone()
        tried[places[0::2]] += step
        tried[places[1::2]] -= step
        found = move(tried)
        if found > best:
            terms, best = tried, found
    return best


def crafted_linear(positions: int) -> float:
    """Return the largest move of a linear layer by such terms.

    It has as many features as make the Gram form the cheapest, all the same: the drift is in every
    element of the gradient. Just over a power of two units are the largest.
    """
    sizes = range(positions + 8, 3 * positions)
    width = min(sizes, key=lambda n: abs(_mantissa(positions, n) - 1.01))
    model = Weighted(nn.Linear(width, width, bias=False))
    x = torch.ones(1, positions, width)
    return climb(
        crafted_terms(positions, _mantissa(positions, width)),
        lambda terms: moved(model, Records.of(x, terms.view(1, -1, 1).expand_as(x))),
    )


def crafted_conv(positions: int, channels: int = 300) -> float:
    """Return the largest move of a 1x1 convolution by such terms.

    Small terms have small activations, so that no factor of a term is large where the term is not.
    """
    model = Weighted(nn.Conv1d(channels, channels, 1, bias=False))
    sizes = torch.full((positions,), 2.0**-12)
    sizes[0] = sizes[-1] = 1.0
    x = sizes.expand(1, channels, -1).contiguous()

    def move(terms: Tensor) -> float:
        return moved(model, Records.of(x, (terms / sizes).expand_as(x)))

    crafted = [crafted_terms(positions, 1.01 + 0.05 * k) for k in range(20)]
    return climb(max(crafted, key=move), move, climbs=10)


class Signed(nn.Module):
    """One number that every record moves by its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 1]``."""
        output: Tensor = self.layer(x)
        return output


@attack(9, "20,000 microbatches of one record each")
def many_microbatches() -> float:
    """Let one record push a sum over a power of two, behind which small gradients are lost.

    16,383 records of gradient 1, one of 1/2, the attacker's of 1, and 3,614 of -2^-10. Below 2^14
    float32 holds those exactly; above, they round away. The exact sums are float32 numbers.
    """
    x = torch.ones(20_000 - 1, 1)
    x[0] = 0.5
    x[16_384:] = -(2.0**-10)
    both = [torch.cat([x[:16_384], record, x[16_384:]]) for record in (torch.ones(1, 1), x[:0])]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, records: Records) -> None:
        for i in range(len(records)):
            model(records.inputs[0][i : i + 1]).sum().backward()

    return moved(Signed(), Records.of(both[0]), train, only=[16_384])


ATTACKS: list[Attack] = [
    *(
        attack(1, f"embedding: (emb[a] - emb[b]) * {value:g}, a = b")(
            partial(difference_of_equal_tokens, value)
        )
        for value in (1e8, 1e10, 1e20)
    ),
    crafted_embedding,
    attack(1, "embedding: the same in plain PyTorch")(crafted_in_plain_pytorch),
    crafted_tied,
    *(
        attack(9, f"linear: crafted features, hill climbing, T = {positions}")(
            partial(crafted_linear, positions)
        )
        for positions in (40, 64, 128, 256)
    ),
    *(
        attack(9, f"convolution: crafted features, hill climbing, T = {positions}")(
            partial(crafted_conv, positions)
        )
        for positions in (40, 128)
    ),
    many_microbatches,
]
