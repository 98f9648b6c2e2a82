"""What reaches the server: whole uploads of this round, one a client; the rest is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

FAULTS = ("missing", "not finite", "wrong shape", "wrong round", "unknown client", "repeated")


@dataclass(frozen=True)
class Message:
    """One client's upload on its way: who sent it, for which round, and what."""

    client: int
    round: int
    values: Tensor


@dataclass(frozen=True)
class Received:
    """Uploads that count.

    clients: int64 ``[k]``. uploads: ``[k, *shape]``, in the same order.
    faults: how many uploads were left out, by reason.
    """

    clients: Tensor
    uploads: Tensor
    faults: Counter[str] = field(default_factory=Counter)

    def total(self) -> Tensor:
        """Return the sum, ``[*shape]``: added up in float64, rounded once."""
        return self.uploads.sum(0, dtype=torch.float64).to(self.uploads.dtype)


def all_finite(values: Tensor) -> bool:
    """Return whether every element is surely finite; False also where their sum overflows.

    A NaN or an infinity always reaches the sum: 15 us for 320,000 elements, which
    ``isfinite().all()`` takes 500 us for.
    """
    return bool(values.sum().isfinite())


def collect_rows(ids: Tensor, uploads: Tensor) -> Received:
    """Take the uploads ``[k, *shape]`` of the clients ``ids``, all here; leave out what is NaN."""
    if all_finite(uploads):
        return Received(ids, uploads)
    finite = uploads.flatten(1).isfinite().all(1)
    return Received(ids[finite], uploads[finite], Counter({"not finite": int((~finite).sum())}))


def collect(
    messages: Iterable[Message],
    ids: Tensor,
    index: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Received:
    """Sort out ``messages`` for round ``index``; the first of a client counts.

    ids: the clients of the round. shape, dtype: what each must send.
    """
    faults: Counter[str] = Counter()
    found: dict[int, Tensor] = {}
    heard: set[int] = set()  # whose message of this round, or of another, was left out
    known = set(ids.tolist())
    for message in messages:
        values = message.values
        if message.client not in known:
            faults["unknown client"] += 1
        elif message.round != index:
            faults["wrong round"] += 1
            heard.add(message.client)
        elif message.client in found:
            faults["repeated"] += 1
        elif tuple(values.shape) != shape or values.dtype != dtype:
            faults["wrong shape"] += 1
            heard.add(message.client)
        elif not bool(values.isfinite().all()):
            faults["not finite"] += 1
            heard.add(message.client)
        else:
            found[message.client] = values
    if silent := known - heard - found.keys():
        faults["missing"] = len(silent)
    clients = torch.tensor(sorted(found), dtype=torch.int64)
    uploads = [found[client] for client in clients.tolist()]
    stacked = torch.stack(uploads) if uploads else torch.empty((0, *shape), dtype=dtype)
    return Received(clients, stacked, faults)
