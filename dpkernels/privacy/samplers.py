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
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from dpkernels.privacy.draws import Bits, each_with_probability, in_random_order, so_many
from dpkernels.privacy.mechanism import Poisson, Sampling, Shuffled, WithoutReplacement


class PrivateSampler(Sampler[list[int]], ABC):
    """Batches of indices, epoch by epoch, and the place in them that a checkpoint keeps.

    sampling: what the accountant is told.
    expected_batch_size: of all processes together.
    num_records: of the data set, all processes together.
    batches_handed_out: since the first epoch, checkpoints included.

    The place is that of whoever takes batches from ``iter()``. A loader whose workers fetch ahead
    takes them from ``rest_of_epoch()``, and moves the place by ``advance`` when it hands one out.
    """

    sampling: Sampling
    expected_batch_size: float
    # Whether iter() goes on with an epoch that was broken off, instead of beginning a new one.
    _finishes_epochs = False

    def __init__(
        self, num_records: int, steps: int, seed: int | None, rank: int, world_size: int
    ) -> None:
        op = type(self).__name__
        _check_count(op, "num_records", num_records)
        _check_count(op, "steps", steps)
        _check_count(op, "world_size", world_size)
        if world_size > num_records:
            raise ValueError(
                f"{op}: world_size must be at most num_records, {num_records}, got {world_size}; "
                "every process needs records of its own"
            )
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"{op}: rank must be from 0 to {world_size - 1}, got {rank!r}")
        self.num_records, self.rank, self.world_size = num_records, rank, world_size
        self.batches_handed_out = 0
        self._steps = steps
        self._epoch = self._position = 0
        self._loaded = False
        self._iteration = 0
        self._seed = seed
        if seed is not None:
            self._warn_of_seed()

    @property
    def seed(self) -> int | None:
        """The fixed seed, or None if draws come from the operating system. For reports."""
        return self._seed

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same in every process."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out the batches of an epoch, or what is left of the one that was loaded."""
        iteration = self.begin()
        for batch in self.rest_of_epoch():
            self.advance(iteration)
            yield batch
        self.end(iteration)

    @property
    def position(self) -> int:
        """How many batches of the present epoch were handed out."""
        return self._position

    def begin(self) -> int:
        """Begin an epoch, or go on with one; return the number of this iteration.

        Iterations begun earlier are void: two at a time would hand out records twice.
        """
        broken_off = self._position > 0 and not self._loaded
        if broken_off and (self._position == len(self) or not self._finishes_epochs):
            self._next_epoch()
        self._loaded = False
        self._iteration += 1
        return self._iteration

    def rest_of_epoch(self) -> Iterator[list[int]]:
        """Draw the batches from the present place to the end of the epoch; move nothing."""
        epoch = self._epoch
        for index in range(self._position, len(self)):
            own = self._draw(epoch, index)
            yield (own * self.world_size + self.rank).tolist()

    def advance(self, iteration: int, batches: int = 1) -> None:
        """Note that ``batches`` more were handed out. RuntimeError if the iteration is void."""
        if iteration != self._iteration:
            raise RuntimeError(
                f"{type(self).__name__}: another iteration was begun, or a state was loaded, after "
                "this one began; iterate once at a time"
            )
        self._position += batches
        self.batches_handed_out += batches

    def end(self, iteration: int) -> None:
        """Note that the epoch has been handed out to its end."""
        self.advance(iteration, 0)
        self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the place that a checkpoint keeps: plain numbers and strings.

        The batch that was handed out last is behind it. What was drawn is not kept: it is secret,
        and later batches do not depend on it.
        """
        return {
            "sampler": repr(self),
            "epoch": self._epoch,
            "position": self._position,
            "batches_handed_out": self.batches_handed_out,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint: the next ``iter()`` yields the rest of that epoch.

        A seeded sampler goes on bit for bit. Others draw afresh, independently of all before. Any
        rank may load what one of them saved, unless a subclass says otherwise.
        """
        if missing := {*self.state_dict()} - state.keys():
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: state lacks {', '.join(sorted(missing))}; "
                "pass what state_dict() returned"
            )
        if state["sampler"] != repr(self):
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the state is of {state['sampler']}, this "
                f"is {self!r}; make the sampler as it was"
            )
        if not 0 <= state["position"] <= len(self):
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: position must be from 0 to the number of "
                f"batches, {len(self)}, got {state['position']!r}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self.batches_handed_out = state["batches_handed_out"]
        self._loaded = True
        self._iteration += 1
        self._seed = state["seed"]
        if self._seed is not None:
            self._warn_of_seed()

    @abstractmethod
    def _draw(self, epoch: int, index: int) -> Tensor:
        """Return batch ``index`` of the epoch, as indices into this process' own records."""

    @property
    def _own_records(self) -> int:
        return len(range(self.rank, self.num_records, self.world_size))

    def _bits(self, *what: int) -> Bits:
        """Return fresh bits; of a seeded sampler, those of this seed, rank and ``what``."""
        if self._seed is None:
            return Bits()
        return Bits("/".join(map(str, (self._seed, self.rank, *what))))

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0

    def _warn_of_seed(self) -> None:
        warnings.warn(
            f"{type(self).__name__} with the fixed seed {self._seed}: whoever knows it knows who "
            "was in each batch; leave seed out for private data",
            stacklevel=4,
        )


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
        _check_count("ShuffledSampler", "world_size", world_size)
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


def _check_count(op: str, name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{op}: {name} must be an integer >= 1, got {value!r}")


def _check_batch_size(op: str, batch_size: Any, num_records: Any) -> None:
    _check_count(op, "num_records", num_records)
    _check_count(op, "batch_size", batch_size)
    if batch_size > num_records:
        raise ValueError(
            f"{op}: batch_size must be at most num_records, {num_records}, got {batch_size}"
        )
