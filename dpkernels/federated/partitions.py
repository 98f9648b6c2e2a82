"""Which client has which records: equal shares, Dirichlet shares, few classes, label-sorted shards.

A partition belongs to a simulation: it says which world is simulated. A neighbouring data set
differs in one record of one client, and the other records stay where they are: it is not the
partition of a changed table by the same seed.

What is public of it in our accounts: the number of clients, and one constant |D| for all of them
that sums are divided by, which the user passes. Sizes of clients and the classes that they hold
are private. To read |D| off a partition declares that number public.

Draws are NumPy's ``RandomState``, whose streams are frozen: a seed gives the same partition always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from dpkernels.ops.checks import check_finite
from dpkernels.ops.glm.records import Records

Seed = int | Generator
Scheme = Callable[[Tensor, int, Seed], "Partition"]


@dataclass(frozen=True, eq=False)
class Partition:
    """The records of every client, by their rows in a table.

    order: ``[M]`` int64, rows of the table, client after client; no row twice.
    offsets: ``[clients + 1]`` int64, from 0 to M; client i has those of ``order`` from
        ``offsets[i]`` to ``offsets[i + 1]``.

    Raises ValueError for a row that two clients have, negative rows, or other offsets.
    """

    order: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        for name, found in (("order", self.order), ("offsets", self.offsets)):
            if found.dim() != 1 or found.dtype != torch.int64:
                raise ValueError(
                    f"Partition: {name} must be one axis of int64, got {list(found.shape)} "
                    f"{found.dtype}"
                )
        bounds = self.offsets
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(self.order):
            raise ValueError(
                f"Partition: offsets must be [clients + 1] from 0 to {len(self.order)}, the length "
                f"of order, for at least 1 client, got {bounds.tolist()[:8]}"
            )
        if bool((bounds.diff() < 0).any()):
            raise ValueError(f"Partition: offsets must not decrease, got {bounds.tolist()[:8]}")
        if len(self.order) and int(self.order.min()) < 0:
            raise ValueError(f"Partition: order must be rows >= 0, got {int(self.order.min())}")
        if len(self.order.unique()) != len(self.order):
            raise ValueError(
                "Partition: order must have a row once at most, got rows that repeat; a record is "
                "accounted at one client"
            )

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor]) -> Partition:
        """Return the partition in which client i has the rows ``parts[i]``, int64."""
        sizes = torch.tensor([0, *(len(part) for part in parts)])
        order = torch.cat([*parts]) if parts else torch.empty(0, dtype=torch.int64)
        return cls(order, sizes.cumsum(0))

    @property
    def clients(self) -> int:
        """How many clients there are, those without records too."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """How many records each client has, ``[clients]`` int64; private."""
        return self.offsets.diff()

    def indices(self, client: int) -> Tensor:
        """Return the rows of one client, int64.

        Raises IndexError for a client that does not exist.
        """
        if not 0 <= client < self.clients:
            raise IndexError(f"client must be 0 to {self.clients - 1}, got {client}")
        return self.order[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def of(self, x: Tensor, y: Tensor, *, bias: bool = False) -> Records:
        """Return the clients' records in one table, as ``glm`` takes them.

        x: ``[N, d]`` float32 or float64. y: ``[N]`` int64. bias: append the feature 1.
        Copies M d numbers. Raises ValueError where the table is too short.
        """
        if len(self.order) and int(self.order.max()) >= len(x):
            raise ValueError(
                f"Partition.of: x must have the rows that were parted, up to "
                f"{int(self.order.max())}, got {len(x)} rows"
            )
        order = self.order.to(x.device)
        return Records.ragged(x[order], y[order], self.offsets, bias=bias)

    def without(self, rows: Tensor, count: int) -> Partition:
        """Return what is left when ``rows`` are taken out of a table of ``count`` rows.

        The rows that are left are counted anew from 0, in their order.
        """
        left = torch.ones(count, dtype=torch.bool)
        left[rows] = False
        place = left.cumsum(0) - 1
        kept = left[self.order]
        # kept_before[j]: how many of the first j of order are left.
        kept_before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        return Partition(place[self.order[kept]], kept_before[self.offsets])


def iid(count: int, clients: int, seed: Seed) -> Partition:
    """Deal ``count`` records at random; sizes differ by at most one record."""
    _check_clients("iid", clients)
    if count < 0:
        raise ValueError(f"iid: count must be an integer >= 0, got {count}")
    order = stream_of(seed).permutation(count)
    return Partition(torch.from_numpy(order).long(), _even_offsets(count, clients))


def dirichlet(labels: Tensor, clients: int, alpha: float, seed: Seed) -> Partition:
    """Share every class out by the clients' own tastes in classes.

    Client i draws p_i ~ Dir(alpha 1_C); class k is cut in proportion to p_ik over the clients. So
    sizes are unequal, and clients may be empty. Small alpha: few classes a client.

    labels: ``[N]`` int64; C is one more than the largest. alpha: > 0.

    FedFisher's scheme, in the order of draws of its code, so that a NumPy seed gives its partition.
    A client whose draws all underflow has one class alone, the limit for alpha to 0, and a class
    that no client has a taste for goes to one client at random.
    """
    _check("dirichlet", labels, clients)
    check_finite("dirichlet", "alpha", alpha, above=0.0)
    stream = stream_of(seed)
    rows_of = _rows_of_classes(labels)
    with np.errstate(invalid="ignore"):  # 0 / 0 where all draws of a client underflow
        tastes = stream.dirichlet(np.repeat(float(alpha), len(rows_of)), clients)
    for lost in np.flatnonzero(~np.isfinite(tastes).all(1)):
        tastes[lost] = np.eye(len(rows_of))[stream.randint(len(rows_of))]
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for taste, rows in zip(tastes.T, rows_of, strict=True):
        stream.shuffle(rows)
        if taste.sum() == 0:
            taste = np.eye(clients)[stream.randint(clients)]
        cuts = (np.cumsum(taste / taste.sum()) * len(rows)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return _of_pieces(parts)


def by_class(labels: Tensor, clients: int, classes_per_client: int, seed: Seed) -> Partition:
    """Give every client at most so many classes, and sizes as equal as that allows.

    labels: ``[N]`` int64. Every record is used. Which records of a class a client has, and which
    client has which classes, is random.

    From 2 classes a client, and as many clients as classes that occur, sizes differ by at most one
    record, however unequal classes are. With 1 class a client the largest client is as small as
    can be; with as many clients as classes each has one class. With fewer clients than classes a
    greedy choice keeps sizes close.

    Raises ValueError if the clients cannot hold all classes.
    """
    _check("by_class", labels, clients)
    if classes_per_client < 1:
        raise ValueError(
            f"by_class: classes_per_client must be an integer >= 1, got {classes_per_client}"
        )
    stream = stream_of(seed)
    rows_of = [rows for rows in _rows_of_classes(labels) if len(rows)]
    if len(rows_of) > clients * classes_per_client:
        raise ValueError(
            f"by_class: {clients} clients with at most {classes_per_client} classes each cannot "
            f"hold the {len(rows_of)} classes of labels; take more clients or classes_per_client"
        )
    stream.shuffle(order := np.arange(len(rows_of)))
    rows_of = [stream.permutation(rows_of[k]) for k in order]
    counts = [len(rows) for rows in rows_of]
    if classes_per_client == 1:
        shares = _one_class_each(counts, clients)
    else:
        shares = _few_classes_each(counts, clients, classes_per_client)
    taken = [0] * len(rows_of)
    parts: list[list[np.ndarray]] = []
    for share in shares:
        pieces = []
        for k, size in share:
            pieces.append(rows_of[k][taken[k] : taken[k] + size])
            taken[k] += size
        parts.append(pieces)
    return _of_pieces([parts[i] for i in stream.permutation(clients)])


def shards(labels: Tensor, clients: int, shards_per_client: int, seed: Seed) -> Partition:
    """Sort by label, cut into clients * shards_per_client shards, and deal them at random.

    labels: ``[N]`` int64. Shards differ by at most one record. Records of a class keep their order,
    so that the seed decides about whole shards alone. FedCEO: 100 clients, 2 shards each.
    """
    _check("shards", labels, clients)
    if shards_per_client < 1:
        raise ValueError(
            f"shards: shards_per_client must be an integer >= 1, got {shards_per_client}"
        )
    count = clients * shards_per_client
    cuts = _even_offsets(len(labels), count)[1:-1].tolist()
    pieces = np.split(labels.argsort(stable=True).cpu().numpy(), cuts)
    hands = stream_of(seed).permutation(count).reshape(clients, shards_per_client)
    return _of_pieces([[pieces[shard] for shard in hand] for hand in hands])


def _one_class_each(counts: Sequence[int], clients: int) -> list[list[tuple[int, int]]]:
    """Return (class, size) for every client: each next client goes to the class with most each."""
    if not counts:
        return [[] for _ in range(clients)]
    holders = [1] * len(counts)
    for _ in range(clients - len(counts)):
        most = max(range(len(counts)), key=lambda k: counts[k] / holders[k])
        holders[most] += 1
    return [
        [(k, size)]
        for k, (count, held) in enumerate(zip(counts, holders, strict=True))
        for size in _even_offsets(count, held).diff().tolist()
    ]


def _few_classes_each(
    counts: Sequence[int], clients: int, most: int
) -> list[list[tuple[int, int]]]:
    """Return up to ``most`` >= 2 pairs (class, size) for every client, of nearly equal sums.

    As the alias method fills its columns: a client takes the smallest classes that fit in its
    share, but for one, and fills up with a piece of the largest. The clients that follow can hold
    the classes that are left; where they could not, a class is taken whole, whatever its size.
    """
    left = dict(enumerate(counts))
    shares: list[list[tuple[int, int]]] = []
    for after in reversed(range(clients)):
        room = -(-sum(left.values()) // (after + 1))
        share: list[tuple[int, int]] = []
        for slots in range(most, 0, -1):
            if not left:
                break
            smallest = min(left, key=left.__getitem__)
            if slots > 1 and left[smallest] <= room:
                chosen, size = smallest, left[smallest]
            elif len(left) > most * after:
                chosen = min(left, key=lambda k: abs(left[k] - room))
                size = left[chosen]
            elif room > 0:
                chosen = max(left, key=left.__getitem__)
                size = min(room, left[chosen])
            else:
                break
            share.append((chosen, size))
            room -= size
            left[chosen] -= size
            if not left[chosen]:
                del left[chosen]
        shares.append(share)
    return shares


def _rows_of_classes(labels: Tensor) -> list[np.ndarray]:
    """Return the rows of class 0, 1, ..., each ascending."""
    found = labels.cpu().numpy()
    return [np.flatnonzero(found == k) for k in range(int(found.max()) + 1)] if len(found) else []


def _even_offsets(count: int, parts: int) -> Tensor:
    """Return ``[parts + 1]`` int64 from 0 to ``count``, whose steps differ by at most 1."""
    return torch.arange(parts + 1) * count // parts


def _of_pieces(parts: Sequence[Sequence[np.ndarray]]) -> Partition:
    none = np.empty(0, dtype=np.int64)
    return Partition.of_parts(
        [torch.from_numpy(np.concatenate([none, *pieces])).long() for pieces in parts]
    )


def stream_of(seed: Seed) -> np.random.RandomState:
    """Return NumPy's frozen stream of a seed from 0 to 2^32 - 1, or of one that is drawn."""
    if isinstance(seed, Generator):
        seed = int(torch.randint(2**32, (), generator=seed, device=seed.device))
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to 2^32 - 1, got {seed}")
    return np.random.RandomState(seed)


def _check_clients(scheme: str, clients: int) -> None:
    if clients < 1:
        raise ValueError(f"{scheme}: clients must be an integer >= 1, got {clients}")


def _check(scheme: str, labels: Tensor, clients: int) -> None:
    _check_clients(scheme, clients)
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise ValueError(
            f"{scheme}: labels must be [N] int64, got {list(labels.shape)} {labels.dtype}; convert "
            "them by .long()"
        )
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{scheme}: labels must be classes 0, 1, ..., got {int(labels.min())}")


def _parse_iid(text: str) -> Scheme:
    if text:
        raise ValueError(f"partition: iid takes no number, got {text!r}; write iid")
    return lambda labels, clients, seed: iid(len(labels), clients, seed)


def _parse_dirichlet(text: str) -> Scheme:
    try:
        alpha = float(text)
    except ValueError:
        raise ValueError(
            f"partition: dirichlet takes alpha > 0, got {text!r}; write dirichlet:0.1"
        ) from None
    check_finite("partition", "alpha of dirichlet", alpha, above=0.0)
    return lambda labels, clients, seed: dirichlet(labels, clients, alpha, seed)


def _parse_classes(text: str) -> Scheme:
    most = _whole(text, "classes", "how many classes a client may have")
    return lambda labels, clients, seed: by_class(labels, clients, most, seed)


def _parse_shards(text: str) -> Scheme:
    each = _whole(text, "shards", "how many shards a client has")
    return lambda labels, clients, seed: shards(labels, clients, each, seed)


def _whole(text: str, name: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ValueError(
            f"partition: {name} takes an integer >= 1, {what}, got {text!r}; write {name}:2"
        )
    return int(text)


# What stands behind the colon -> the partition of labels for so many clients by a seed.
PARTITIONS: dict[str, Callable[[str], Scheme]] = {
    "iid": _parse_iid,
    "dirichlet": _parse_dirichlet,
    "classes": _parse_classes,
    "shards": _parse_shards,
}


def parse(spec: str) -> Scheme:
    """Return the scheme that a command line names: iid, dirichlet:0.1, classes:2, shards:2.

    It takes labels ``[N]`` int64, the number of clients and a seed. Raises ValueError for a name
    that is not known, or a number that is missing or out of range.
    """
    name, _, number = spec.partition(":")
    if name not in PARTITIONS:
        raise ValueError(
            f"partition must be one of {', '.join(PARTITIONS)}, got {name!r}; write dirichlet:0.1 "
            "or classes:2, say"
        )
    return PARTITIONS[name](number)
