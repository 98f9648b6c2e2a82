"""A search for neighbouring data that moves what a client releases as far as it can.

Every candidate is a client with n records and a neighbour with one record more; ``sent`` is what
the server has broadcast, the same for both. Candidates are computed together, as clients of one
problem: first random ones of all scales, alone and in clusters, then changes of the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpkernels.federated import Algorithm, SoftmaxProblem, Terms, Visit
from dpkernels.ops.glm import Records

CLASSES, FEATURES = 3, 2


@dataclass(frozen=True)
class Candidates:
    """x ``[k, n + 1, d]``, labels ``[k, n + 1]``; sent: T broadcasts of ``[T, C, d]`` each."""

    x: Tensor
    labels: Tensor
    sent: dict[str, Tensor]

    def one(self, row: int) -> Candidates:
        return replace(self, x=self.x[row : row + 1], labels=self.labels[row : row + 1])


def problem_of(found: Candidates) -> SoftmaxProblem:
    """Return a problem in which client 2 j has all records of candidate j, 2 j + 1 one less."""
    x = found.x.repeat_interleave(2, 0)
    labels = found.labels.repeat_interleave(2, 0)
    counts = torch.full((len(x),), x.shape[1])
    counts[1::2] -= 1
    table = Records.padded(x, labels, counts)
    return SoftmaxProblem(table, x[0, :1], labels[0, :1], classes=CLASSES)


def moves(algorithm: Algorithm, told: Terms, found: Candidates, stage: int = 0) -> Tensor:
    """Return how far each release of each round moves, ``[k, T * releases]``, sent being fixed.

    What a client computes on from, ``noisy`` returned: the same numbers in both worlds, as whoever
    sees uploads sees them. State that it keeps from before the noise is its own.
    """
    held = problem_of(found)
    which = algorithm.stages(told)[stage]
    start = algorithm.client_start(told, held.initial())
    state = {name: value.expand(held.clients, *value.shape) for name, value in start.items()}
    cohort = held.cohort(torch.arange(held.clients))
    apart: list[Tensor] = []
    script = torch.Generator().manual_seed(7)

    def seeds() -> Tensor:
        return torch.zeros(held.clients, dtype=torch.int64)

    def scripted(values: Tensor) -> Tensor:
        pairs = values.double().reshape(-1, 2, values[0].numel())
        apart.append((pairs[:, 0] - pairs[:, 1]).norm(dim=1))
        seen = torch.randn(values.shape[1:], generator=script, dtype=torch.float64)
        return (0.3 * seen).to(values.dtype).expand_as(values).clone()

    for index in range(len(next(iter(found.sent.values())))):
        sent = {name: value[index] for name, value in found.sent.items()}
        visit = Visit(which, told, held, cohort, state, sent, scripted, lambda: cohort, seeds)
        _, state = algorithm.client(visit)
    return torch.stack(apart, 1)


def random_candidates(
    k: int, n: int, rounds: int, names: tuple[str, ...], dtype: torch.dtype, g: torch.Generator
) -> Candidates:
    """Return candidates of scales from 0.01 to 1000, half of them in clusters of one label."""

    def scales(*shape: int) -> Tensor:
        return 10 ** (5 * torch.rand(*shape, generator=g, dtype=torch.float64) - 2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x = normal(k, n + 1, FEATURES) * scales(k, 1, 1)
    labels = torch.randint(CLASSES, (k, n + 1), generator=g)
    middle = normal(k // 2, 1, FEATURES) * scales(k // 2, 1, 1)
    x[: k // 2] = middle + 0.1 * scales(k // 2, 1, 1) * normal(k // 2, n + 1, FEATURES)
    x[: k // 4] = middle[: k // 4]
    labels[: k // 2] = labels[: k // 2, :1]
    sent = {
        name: (normal(rounds, CLASSES, FEATURES) * scales(rounds, 1, 1)).to(dtype) for name in names
    }
    repeats = int(torch.randint(3, (1,), generator=g))
    if repeats:  # the same in every round, or now this way, now the other
        signs = (torch.arange(rounds) * (repeats - 1) % 2 * -2 + 1)[:, None, None]
        sent = {name: value[:1] * signs.to(dtype) for name, value in sent.items()}
    return Candidates(x.to(dtype), labels, sent)


def changed(best: Candidates, k: int, size: float, g: torch.Generator) -> Candidates:
    """Return k changes of ``best``: of all records, of the last one, of what is sent."""

    def normal(like: Tensor, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(like.dtype)

    x = best.x.expand(k, -1, -1).clone()
    labels = best.labels.expand(k, -1).clone()
    kind = torch.randint(4, (k,), generator=g)
    whole = x * (1 + size * normal(x, *x.shape))
    stretched = x * (1 + size * normal(x, k, 1, 1))
    x = torch.where((kind == 0)[:, None, None], whole, x)
    x = torch.where((kind == 1)[:, None, None], stretched, x)
    last = x[:, -1] * (1 + size * normal(x, k, FEATURES)) + size * normal(x, k, FEATURES)
    x[:, -1] = torch.where((kind == 2)[:, None], last, x[:, -1])
    flipped = torch.randint(CLASSES, labels.shape, generator=g)
    flips = torch.rand(labels.shape, generator=g) < 0.05
    labels = torch.where((kind == 3)[:, None] & flips, flipped, labels)
    sent = {
        name: value * (1 + size * normal(value, *value.shape))
        + size * 0.1 * normal(value, *value.shape)
        for name, value in best.sent.items()
    }
    return Candidates(x, labels, sent)


Ratio = Callable[[Candidates], Tensor]


def largest(
    ratio: Ratio,
    *,
    n: int,
    names: tuple[str, ...] = ("theta",),
    rounds: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    tries: int = 12,
    climbs: int = 40,
    k: int = 24,
) -> tuple[float, Candidates]:
    """Return the largest ``ratio``, ``[k]``, that was found, and where."""
    g = torch.Generator().manual_seed(seed)
    best, at = -1.0, random_candidates(1, n, rounds, names, dtype, g)
    for _ in range(tries):
        drawn = random_candidates(k, n, rounds, names, dtype, g)
        best, at = better(ratio, drawn, best, at)
    size = 0.5
    for _ in range(climbs):
        before = best
        best, at = better(ratio, changed(at, k, size, g), best, at)
        size = min(1.0, 1.5 * size) if best > before else 0.8 * size
    return best, at


def better(
    ratio: Ratio, drawn: Candidates, best: float, at: Candidates
) -> tuple[float, Candidates]:
    """Return the best of ``drawn`` if it is better than ``best``."""
    found = ratio(drawn)
    assert found.isfinite().all()
    row = int(found.argmax())
    return (float(found[row]), drawn.one(row)) if found[row] > best else (best, at)
