"""Samplers: which records make up the batch of each step, drawn as the accountant is told.

They are batch samplers over the indices of a map-style data set, for ``run.PrivateLoader``. With
``world_size`` processes, each draws from its own records, ``rank::world_size``, with entropy of its
own, and all take the same number of steps.

Who was in a batch is secret: it comes from the operating system's entropy, never from torch's
generators. A fixed ``seed`` is for tests.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpkernels.privacy.draws import Bits, each_with_probability, in_random_order, so_many
from dpkernels.privacy.mechanism import Poisson, Shuffled, WithoutReplacement
from dpkernels.privacy.private_sampler import PrivateSampler, check_count


class PoissonSampler(PrivateSampler):
    """Every record is in a batch with probability ``rate``, independently of all else.

    Adjacency: add/remove one record. Over several processes it is still exactly that. A batch may
    be empty: ``[]``, a step of noise alone.

    num_records: of the data set, all processes together; the expected batch size, ``rate *
        num_records``, takes it for public. Where it is not, divide by a number of your own.
    steps: batches of what is called an epoch; 1 / rate, rounded, if None.
    """

    def __init__(
        self,
        num_records: int,
        rate: float,
        *,
        steps: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 < rate <= 1:
            raise ValueError(
                f"PoissonSampler: rate must be in (0, 1], got {rate}; it is the expected batch "
                "size divided by the number of records"
            )
        steps = round(1 / rate) if steps is None else steps
        super().__init__(num_records, steps, seed, rank, world_size)
        self.rate = rate
        self.sampling = Poisson(rate)
        self.expected_batch_size = rate * num_records

    def _draw(self, epoch: int, index: int) -> Tensor:
        return each_with_probability(self.rate, self._own_records, self._bits(epoch, index))

    def __repr__(self) -> str:
        return f"PoissonSampler({self.num_records}, {self.rate}, steps={len(self)})"


class FixedSizeSampler(PrivateSampler):
    """A batch is one of all sets of ``batch_size`` records, drawn anew for each step.

    Adjacency: replace one record, so that the number of records is public. One process only:
    several that draw a share each make batches with a fixed number of each one's records, which is
    not what is accounted.

    steps: batches of what is called an epoch; num_records / batch_size, rounded up, if None.
    """

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        *,
        steps: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if world_size != 1:
            raise ValueError(
                f"FixedSizeSampler: world_size must be 1, got {world_size}: shares of a fixed size "
                "from each process' own records are not sampling without replacement from all, "
                "which is what is accounted; use PoissonSampler"
            )
        _check_batch_size("FixedSizeSampler", batch_size, num_records)
        steps = math.ceil(num_records / batch_size) if steps is None else steps
        super().__init__(num_records, steps, seed, rank, world_size)
        self.batch_size = batch_size
        self.sampling = WithoutReplacement(batch_size, num_records)
        self.expected_batch_size = batch_size

    def _draw(self, epoch: int, index: int) -> Tensor:
        return so_many(self.batch_size, self.num_records, self._bits(epoch, index))

    def __repr__(self) -> str:
        return f"FixedSizeSampler({self.num_records}, {self.batch_size}, steps={len(self)})"


class ShuffledSampler(PrivateSampler):
    """All records in random order, in batches of ``batch_size``; a new order for every epoch.

    Adjacency: replace one record, so that the number of records, and with it the length of the last
    batch, is public. Accounted without amplification, from nothing but this: a record is in at most
    one batch of an epoch. So it is a rule here that an epoch that was broken off is gone on with by
    the next ``iter()``. The order itself need not be secret, and a checkpoint keeps it.

    batch_size: of all processes together, each of which has an equal share of it. Their records
        differ in number by one at most, so the last batch of some may be shorter, or empty.
    drop_last: leave the last batch out if it is not full in every process; other records each time.
    """

    _finishes_epochs = True

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        *,
        drop_last: bool = False,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_batch_size("ShuffledSampler", batch_size, num_records)
        check_count("ShuffledSampler", "world_size", world_size)
        if batch_size % world_size:
            raise ValueError(
                f"ShuffledSampler: batch_size must be a multiple of world_size, {world_size}, got "
                f"{batch_size}; it is that of all processes together"
            )
        share = batch_size // world_size
        most = math.ceil(num_records / world_size)
        steps = num_records // world_size // share if drop_last else math.ceil(most / share)
        super().__init__(num_records, steps, seed, rank, world_size)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.sampling = Shuffled(steps)
        self.expected_batch_size = batch_size
        self._share = share
        # Epoch, the key that its order is a function of, and the order of this process' records.
        self._order: tuple[int, str | None, Tensor] | None = None

    def _draw(self, epoch: int, index: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._set_order(epoch, None if self._seed is not None else secrets.token_hex(32))
        assert self._order is not None
        return self._order[2][index * self._share : (index + 1) * self._share]

    def _set_order(self, epoch: int, key: str | None) -> None:
        bits = self._bits(epoch) if key is None else Bits(key)
        self._order = epoch, key, in_random_order(self._own_records, bits)

    def state_dict(self) -> dict[str, Any]:
        """Return the place and, in the middle of an epoch, the key of its order."""
        begun = self._order if self._position > 0 else None
        return super().state_dict() | {"part": self._part, "order": begun and begun[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint; no record comes up twice in the epoch.

        In the middle of an epoch, each rank must load the state that it saved itself.
        """
        if state.get("position") and state.get("part", self._part) != self._part:
            raise ValueError(
                "ShuffledSampler.load_state_dict: in the middle of an epoch each rank has an order "
                f"of its own; this is rank {self._part}, got the state of rank {state['part']}; "
                "save one for each rank, or between epochs"
            )
        super().load_state_dict(state)
        self._order = None
        if state["position"]:
            self._set_order(state["epoch"], state["order"])

    @property
    def _part(self) -> str:
        return f"{self.rank} of {self.world_size}"

    def __repr__(self) -> str:
        return f"ShuffledSampler({self.num_records}, {self.batch_size}, drop_last={self.drop_last})"


def _check_batch_size(op: str, batch_size: Any, num_records: Any) -> None:
    check_count(op, "num_records", num_records)
    check_count(op, "batch_size", batch_size)
    if batch_size > num_records:
        raise ValueError(
            f"{op}: batch_size must be at most num_records, {num_records}, got {batch_size}"
        )
