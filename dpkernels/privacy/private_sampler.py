"""What all samplers share: epochs, the place in them, and a batch that waits for its step."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Sampler

from dpkernels.privacy.draws import Bits
from dpkernels.privacy.mechanism import Sampling


class Place(NamedTuple):
    """Where a sampler is: how many batches of which epoch, and of all epochs, were handed out."""

    epoch: int
    position: int
    batches_handed_out: int


class Waiting(NamedTuple):
    """A batch that was handed out and has no step yet. Private: it says who was drawn.

    place: where the sampler was before it. records: the indices in it.
    """

    place: Place
    records: list[int]


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
    _finishes_epochs = False

    def __init__(
        self, num_records: int, steps: int, seed: int | None, rank: int, world_size: int
    ) -> None:
        op = type(self).__name__
        check_count(op, "num_records", num_records)
        check_count(op, "steps", steps)
        check_count(op, "world_size", world_size)
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
        self._again: list[int] | None = None  # the records of the next batch, if they are fixed
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

    @property
    def place(self) -> Place:
        """Where the sampler is."""
        return Place(self._epoch, self._position, self.batches_handed_out)

    @property
    def finishes_epochs(self) -> bool:
        """Whether ``iter()`` resumes an epoch that was left early, instead of beginning another."""
        return self._finishes_epochs

    def begin(self, waiting: Waiting | None = None) -> int:
        """Begin an epoch, or resume one; return the number of this iteration.

        waiting: a batch that was handed out and had no step. It comes first, with the same records:
            a sampled epoch begins with it, and one of which each record has its place goes back.

        Iterations begun earlier are void: two at a time would hand out records twice.
        """
        broken_off = self._position > 0 and not self._loaded
        if waiting is not None and self._finishes_epochs:
            self._go_to(waiting.place)
        elif broken_off and (self._position == len(self) or not self._finishes_epochs):
            self._next_epoch()
        if waiting is not None:
            self.batches_handed_out = waiting.place.batches_handed_out
        self._again = None if waiting is None else waiting.records
        self._loaded = False
        self._iteration += 1
        return self._iteration

    def rest_of_epoch(self) -> Iterator[list[int]]:
        """Draw the batches from the present place to the end of the epoch; move nothing."""
        epoch, again = self._epoch, self._again
        for index in range(self._position, len(self)):
            if again is not None:
                yield again
                again = None
                continue
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

    def state_dict_at(self, place: Place) -> dict[str, Any]:
        """Return what ``state_dict`` would at another place, of the present epoch or the last."""
        now = self.place
        self._go_to(place)
        try:
            return self.state_dict()
        finally:
            self._go_to(now)

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
        self._go_to(Place(state["epoch"], state["position"], state["batches_handed_out"]))
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

    def _go_to(self, place: Place) -> None:
        self._epoch, self._position, self.batches_handed_out = place

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._position = 0

    def _warn_of_seed(self) -> None:
        warnings.warn(
            f"{type(self).__name__} with the fixed seed {self._seed}: whoever knows it knows who "
            "was in each batch; leave seed out for private data",
            stacklevel=4,
        )


def check_count(op: str, name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is an integer >= 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{op}: {name} must be an integer >= 1, got {value!r}")
