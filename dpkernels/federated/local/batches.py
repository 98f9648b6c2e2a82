"""Which records each client of a round takes at each local step, padded to one width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.local.chance import orders_of


@dataclass(frozen=True)
class Batch:
    """One local step of the clients that still have records in this epoch.

    clients: a: the first a of the clients take this step. They are sorted by number of records.
    width: b: the largest of their batches.
    begin: its first position in the epoch.
    weights: ``[a, b]``: one over the client's batch, and 0 where it has no record.
    absent: which rows of ``[a * b]`` have no record, int64; None if all have one.
    """

    clients: int
    width: int
    begin: int
    weights: Tensor
    absent: Tensor | None

    @property
    def positions(self) -> slice:
        """Return the positions of the epoch that this step takes."""
        return slice(self.begin, self.begin + self.width)


class Batches:
    """The steps of an epoch, the same in every epoch, and the order of each epoch's records.

    rows: the records of every client; may be empty. batch_size: B.
    by_size: clients that have records, most first. Everything here is in that order.
    """

    def __init__(self, rows: list[Tensor], batch_size: int, like: Tensor) -> None:
        sizes = [len(part) for part in rows]
        self.by_size = [i for i in sorted(range(len(rows)), key=lambda i: -sizes[i]) if sizes[i]]
        self.counts = [sizes[i] for i in self.by_size]
        self.rows = [rows[i] for i in self.by_size]
        self.most = self.counts[0] if self.counts else 0
        self.steps = [
            self._step(begin, batch_size, like) for begin in range(0, self.most, batch_size)
        ]

    def _step(self, begin: int, batch_size: int, like: Tensor) -> Batch:
        lengths = [min(batch_size, count - begin) for count in self.counts if count > begin]
        width = max(lengths)
        sizes = torch.tensor(lengths, device=like.device).unsqueeze(1)
        there = torch.arange(width, device=like.device) < sizes
        weights = there.to(like.dtype) / sizes
        absent = None if min(lengths) == width else (~there).flatten().nonzero().flatten()
        return Batch(len(lengths), width, begin, weights, absent)

    def orders(self, seeds: list[int]) -> list[torch.Generator]:
        """Return the generators that ``epoch`` takes; seeds: of all clients of the round."""
        return [orders_of(seeds[i]) for i in self.by_size]

    def epoch(self, generators: list[torch.Generator], out: Tensor) -> Tensor:
        """Write the next epoch's order of every client's own records to ``out``, ``[k, most]``.

        An order is a permutation of ``range(count)``. Positions without a record get 0.
        """
        out.zero_()
        for row, count, generator in zip(out, self.counts, generators, strict=True):
            row[:count] = torch.randperm(count, generator=generator)
        return out
