"""The records of many clients, as every ``glm`` operation takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True)
class Records:
    """Features and labels of all clients in one table; made once, used in every round.

    x: ``[N, d]`` float32 or float64.
    labels: ``[N]`` int64; -1 and the like may stand in rows of no client.
    spans: ``[clients, 2]`` int64: client i has the rows ``spans[i, 0]`` to ``spans[i, 1]``.
    most: the records of the largest client.
    label_count: one more than the largest label.

    Use ``ragged`` or ``padded`` to make one: they check what is given.
    """

    x: Tensor
    labels: Tensor
    spans: Tensor
    most: int
    label_count: int

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return self.spans.shape[0]

    @property
    def features(self) -> int:
        """How many features a record has, with the constant one."""
        return self.x.shape[1]

    @classmethod
    def ragged(
        cls, x: Tensor, labels: Tensor, offsets: Sequence[int] | Tensor, *, bias: bool = False
    ) -> Records:
        """Take records client after client.

        x: ``[N, d]``. labels: ``[N]`` int64.
        offsets: ``[clients + 1]``, increasing: client i has the rows ``offsets[i]`` to
            ``offsets[i + 1]``.
        bias: append a feature that is 1 everywhere; the last column of theta is then the bias.
        """
        op = "Records.ragged"
        _check_table(op, x, labels, dims=2)
        bounds = torch.as_tensor(offsets, dtype=torch.int64, device="cpu")
        if (
            bounds.dim() != 1
            or len(bounds) == 0
            or bool((bounds.diff() < 0).any())
            or bounds[0] < 0
            or bounds[-1] > x.shape[0]
        ):
            raise ValueError(
                f"{op}: offsets must be [clients + 1], not decreasing, from 0 to at most "
                f"{x.shape[0]} (the rows of x), got {bounds.tolist()[:8]}"
            )
        spans = torch.stack((bounds[:-1], bounds[1:]), 1)
        inside = labels[int(bounds[0]) : int(bounds[-1])]
        return cls._of(op, x, labels, spans, inside, bias)

    @classmethod
    def padded(
        cls, x: Tensor, labels: Tensor, counts: Tensor | None = None, *, bias: bool = False
    ) -> Records:
        """Take the same number of rows from every client, of which the first are records.

        x: ``[clients, B, d]``. labels: ``[clients, B]`` int64.
        counts: ``[clients]`` int64, how many of the B rows are records; all of them if None.
        bias: as for ``ragged``.
        """
        op = "Records.padded"
        _check_table(op, x, labels, dims=3)
        clients, rows = labels.shape
        if counts is None:
            counts = torch.full((clients,), rows)
        counts = counts.to("cpu")
        if (
            counts.shape != (clients,)
            or counts.dtype != torch.int64
            or bool(((counts < 0) | (counts > rows)).any())
        ):
            raise ValueError(
                f"{op}: counts must be [{clients}] int64 from 0 to {rows}, got "
                f"{list(counts.shape)} {counts.dtype}: {counts.flatten().tolist()[:8]}"
            )
        first = torch.arange(clients) * rows
        inside = labels[(torch.arange(rows) < counts.unsqueeze(1)).to(labels.device)]
        spans = torch.stack((first, first + counts), 1)
        flat = x.reshape(clients * rows, x.shape[2])
        return cls._of(op, flat, labels.reshape(-1), spans, inside, bias)

    @classmethod
    def _of(
        cls, op: str, x: Tensor, labels: Tensor, spans: Tensor, inside: Tensor, bias: bool
    ) -> Records:
        low, high = (int(inside.min()), int(inside.max())) if inside.numel() else (0, -1)
        if low < 0:
            raise ValueError(f"{op}: labels must be classes 0, 1, ..., got {low}")
        if bias:
            x = torch.cat((x, x.new_ones(x.shape[0], 1)), 1)
        most = int((spans[:, 1] - spans[:, 0]).max()) if len(spans) else 0
        return cls(x.detach(), labels, spans.to(x.device), most, high + 1)


def _check_table(op: str, x: Tensor, labels: Tensor, dims: int) -> None:
    shape = "[N, d]" if dims == 2 else "[clients, B, d]"
    if x.dim() != dims or x.dtype not in DTYPES:
        raise ValueError(
            f"{op}: x must be {shape} float32 or float64, got {list(x.shape)} {x.dtype}; "
            "convert half-precision features first"
        )
    if labels.shape != x.shape[:-1] or labels.dtype != torch.int64 or labels.device != x.device:
        raise ValueError(
            f"{op}: labels must be {list(x.shape[:-1])} int64 on {x.device}, got "
            f"{list(labels.shape)} {labels.dtype} on {labels.device}"
        )
