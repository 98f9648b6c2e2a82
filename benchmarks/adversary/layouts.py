"""Axes that are taken for the samples, or for positions, by their length or by their values."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.adversary.attack import MOVES, NOTHING, Attack, attack
from benchmarks.adversary.moved import Records, moved, one_pass, private

T = 8  # positions, and records where both are as many by chance


class SecondAxis(nn.Module):
    """Tokens with the records on the second axis, ``emb(x.t()).transpose(0, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 1, 4]`` for tokens ``[B, 1]``."""
        output: Tensor = 100 * self.emb(x.t()).transpose(0, 1)
        return output


@attack(3, "embedding of [1, N], records on the second axis")
def second_axis() -> float:
    """One row of tokens, which belong to one record each."""
    torch.manual_seed(1)
    return moved(SecondAxis(), Records.of(torch.randperm(20)[:16].view(16, 1)))


class Ids(nn.Module):
    """A table of one row for each record, by its number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(40, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return ``[B, 2]``."""
        output: Tensor = 10 * self.head(self.emb(ids))
        return output


@attack(3, "tokens 0..B-1, one for each record")
def record_ids() -> float:
    """Record ids in order, taken for positions."""
    return moved(Ids(), Records.of(torch.arange(32)))


@attack(3, "private tokens in an error message", NOTHING, refusable=False)
def message_of_tokens() -> float:
    """How many of a batch's tokens the error prints."""
    model, tokens = Ids(), torch.arange(5)
    training, optimizer = private(model)
    try:
        one_pass(model, optimizer, Records.of(tokens))
    except (RuntimeError, ValueError) as error:
        return sum(f"{token}, " in str(error) for token in tokens[:-1].tolist())
    finally:
        training.detach()
    return 0


class Positions(nn.Module):
    """Tokens plus what a layer makes of positions ``[T]`` or ``[T, F]``, the same for all."""

    def __init__(self, layer: nn.Module, given: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.given = layer, given
        self.tokens = nn.Embedding(20, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return ``[B, T, 4]``; each record weighs its positions."""
        output: Tensor = (self.tokens(x) + self.layer(self.given)) * weights
        return output


def _positions(layer: nn.Module, given: Tensor) -> float:
    """Return the move in a batch of as many records as there are positions.

    The errors of positions are sums over the records. If each position is clipped on its own, a
    record that turns them all moves all of them.
    """
    torch.manual_seed(1)
    tokens = torch.randint(20, (T, T))
    weights = torch.full((T, T, 1), 1e-3)
    weights[0] = 1e3
    records = Records.of(tokens, weights)
    return moved(Positions(layer, given), records, adjacency="silenced")


def _of_layer(kind: str) -> float:
    torch.manual_seed(0)
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "embedding": (nn.Embedding(T + 2, 4), torch.arange(T) + 2),
        "linear": (nn.Linear(6, 4), torch.randn(T, 6)),
        "LayerNorm": (nn.LayerNorm(4), torch.randn(T, 4)),
    }
    return _positions(*made[kind])


ATTACKS: list[Attack] = [
    second_axis,
    record_ids,
    message_of_tokens,
    *(
        attack(4, f"{kind} of positions, T = N by chance", MOVES)(partial(_of_layer, kind))
        for kind in ("embedding", "linear", "LayerNorm")
    ),
]
