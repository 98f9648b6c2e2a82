"""A DataLoader whose batches are those that the accountant is told of, empty ones included."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dpkernels.privacy.mechanism import Sampling
from dpkernels.privacy.private_sampler import PrivateSampler, Waiting
from dpkernels.run.empty_batch import empty_batch
from dpkernels.run.placement import placed

_END = object()
_OURS = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}


class Watcher(Protocol):
    """What is told of batches as they are handed out, not as workers fetch them."""

    def begins(self) -> None:
        """An iteration begins."""

    def settle(self) -> None:
        """Somebody looks at ``waiting``: set it to None if that batch has its step by now."""

    def hands_out(self, records: int) -> None:
        """A microbatch is about to be handed out; of its batch ``records`` were so far."""

    def ends(self) -> None:
        """The epoch has been handed out to its end."""


class PrivateLoader(DataLoader[Any]):
    """Loads the batches of a private sampler, in microbatches if they are large.

    dataset: map-style, of as many records as the sampler draws from.
    sampler: one of ``dpkernels.privacy.samplers``.
    max_physical_batch_size: how many records are loaded at a time. A logical batch of more comes as
        several microbatches, all but the last of this size. It may be set between epochs.
    collate_fn, options: as ``DataLoader`` takes them: num_workers, pin_memory, ...

    A batch without records comes as tensors with no records on their axis, of the shapes that the
    collate function gives a single record otherwise. ``len()`` is the number of logical batches of
    an epoch.

    batch_size_now: number of records of the logical batch that was handed out last, 0 before the
        first. Private: it depends on who was sampled.
    is_last_microbatch: whether nothing more of that logical batch is to come.
    watcher: the run that the batches are for, if there is one.
    waiting: of a run, the first batch that was handed out and has no step yet. Every iteration
        begins with it, until it has one: nobody can look at batches and take another instead.

    Accelerate's ``prepare`` leaves it as it is: its batches are this process' own already, and are
    put on Accelerate's device here. Accelerate's own loader takes a batch ahead of the step, which
    would hide which batch a step is about. Under Lightning, in several processes, pass
    ``use_distributed_sampler=False``.

    Raises ValueError or TypeError for data sets without a length, or of another than the sampler's.
    """

    # What Accelerate asks, so that it does not wrap the loader.
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: PrivateSampler,
        *,
        max_physical_batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        _check_sampler(sampler)
        _check_dataset(dataset, sampler)
        if refused := _OURS & options.keys():
            raise ValueError(
                f"PrivateLoader: {', '.join(sorted(refused))} cannot be set: batches are those of "
                "the sampler, in its order"
            )
        self.private_sampler = sampler
        self.watcher: Watcher | None = None
        self.waiting: Waiting | None = None
        self.batch_size_now = 0
        self.is_last_microbatch = True
        self._microbatches = _Microbatches(sampler)
        self.max_physical_batch_size = max_physical_batch_size
        # For the workers' seeds a DataLoader draws from torch's own generator in every epoch: after
        # a restart dropout would go on with other numbers.
        self._own_generator = options.get("generator") is None
        if self._own_generator:
            options["generator"] = torch.Generator()
        self._seed = torch.initial_seed()
        super().__init__(
            dataset,
            batch_sampler=self._microbatches,
            collate_fn=_Collate(dataset, collate_fn or default_collate),
            **options,
        )

    @classmethod
    def from_data_loader(
        cls,
        loader: DataLoader[Any],
        sampler: PrivateSampler,
        *,
        max_physical_batch_size: int | None = None,
    ) -> PrivateLoader:
        """Return a loader of the sampler's batches that is otherwise as ``loader`` is.

        Takes over the data set, the collate function, workers and their settings, pinned memory.

        Raises ValueError if ``loader`` picks records in a way that the sampler does not replace.
        """
        _check_dataset(loader.dataset, sampler)
        _check_replaceable(loader, sampler)
        return cls(
            loader.dataset,
            sampler,
            max_physical_batch_size=max_physical_batch_size,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    @property
    def sampling(self) -> Sampling:
        """What the accountant is told of how batches come about."""
        return self.private_sampler.sampling

    @property
    def expected_batch_size(self) -> float:
        """Of all processes together."""
        return self.private_sampler.expected_batch_size

    @property
    def batches_handed_out(self) -> int:
        """How many logical batches were handed out, the present one and earlier runs included."""
        return self.private_sampler.batches_handed_out

    @property
    def max_physical_batch_size(self) -> int | None:
        """How many records are loaded at a time; None for whole logical batches."""
        return self._microbatches.largest

    @max_physical_batch_size.setter
    def max_physical_batch_size(self, largest: int | None) -> None:
        if largest is not None and (not isinstance(largest, int) or largest < 1):
            raise ValueError(
                f"max_physical_batch_size must be an integer >= 1, or None, got {largest!r}"
            )
        self._microbatches.largest = largest

    def __len__(self) -> int:
        """Return the number of logical batches of an epoch."""
        return len(self.private_sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Hand out the microbatches of an epoch, or of what is left of it after a checkpoint.

        The sampler's place is that of what was handed out, however far ahead workers are. What they
        fetched and nobody saw is forgotten when an iteration is left: later draws do not depend on
        it.
        """
        sampler = self.private_sampler
        if self.watcher is not None:
            self.watcher.settle()
            self.watcher.begins()
        iteration = sampler.begin(self.waiting)
        if self.waiting is not None:
            self.waiting = self.waiting._replace(place=sampler.place)
        self.batch_size_now, self.is_last_microbatch = 0, True
        fetched = self._microbatches.fetched = deque()
        if self._own_generator:
            # A function of the place, so that workers go on after a restart as they would have.
            self.generator.manual_seed((self._seed + self.batches_handed_out) % 2**63)
        batches = super().__iter__()
        while (batch := self._next(batches, fetched, iteration)) is not _END:
            yield batch
        sampler.end(iteration)
        if self.watcher is not None:
            self.watcher.ends()

    def _next(
        self, batches: Iterator[Any], fetched: deque[_Microbatch], iteration: int
    ) -> Any | object:
        """Return the next microbatch, and note that it was handed out."""
        sampler = self.private_sampler
        # First: workers that stay from one iteration to the next would give its batch to this one.
        sampler.advance(iteration, 0)
        if self.watcher is not None:
            self.watcher.settle()
        try:
            batch = next(batches, _END)
        except BaseException:
            # A record that cannot be read must not make its batch another: it waits, too.
            if fetched:
                self._wait_for(fetched[0])
            raise
        if batch is _END:
            return batch
        now = fetched.popleft()
        if self.watcher is not None:
            self.watcher.hands_out(now.records_before)
        self._wait_for(now)
        sampler.advance(iteration, int(now.records_before == 0))
        self.batch_size_now, self.is_last_microbatch = len(now.records), now.last
        return placed(batch)

    def _wait_for(self, microbatch: _Microbatch) -> None:
        if self.watcher is not None and self.waiting is None:
            self.waiting = Waiting(self.private_sampler.place, microbatch.records)

    @property
    def is_at_waiting(self) -> bool:
        """Whether the batch that was handed out last is the one that waits for its step."""
        if self.waiting is None:
            return False
        return self.batches_handed_out == self.waiting.place.batches_handed_out + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the place that a checkpoint keeps: behind the logical batch handed out last.

        Of a logical batch of which only some microbatches were handed out, the others are lost. Of
        a run, it is before the batch that waits for its step. Who is in that is not kept.
        """
        if self.watcher is not None:
            self.watcher.settle()
        if self.waiting is not None:
            return self.private_sampler.state_dict_at(self.waiting.place)
        return self.private_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint: the next ``iter()`` yields the rest of that epoch.

        A batch that waits for its step comes first, unless it has its place in the epoch.
        """
        sampler = self.private_sampler
        sampler.load_state_dict(state)
        if self.waiting is not None:
            self.waiting = (
                None if sampler.finishes_epochs else self.waiting._replace(place=sampler.place)
            )


class _Microbatch(NamedTuple):
    records: list[int]  # of the whole logical batch
    records_before: int
    last: bool


class _Microbatches:
    """Splits the sampler's batches, and notes what each microbatch is, in the order of loading."""

    def __init__(self, sampler: PrivateSampler) -> None:
        self.sampler = sampler
        self.largest: int | None = None
        self.fetched: deque[_Microbatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        # What is begun later notes elsewhere.
        fetched = self.fetched
        for batch in self.sampler.rest_of_epoch():
            size = len(batch)
            step = self.largest or max(1, size)
            for start in range(0, max(1, size), step):
                fetched.append(_Microbatch(batch, start, start + step >= size))
                yield batch[start : start + step]


class _Collate:
    """The collate function, for no records too."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __call__(self, records: Any) -> Any:
        if len(records) > 0:
            return self.collate(records)
        return empty_batch(self._first_record(1), self._first_record(2))

    def _first_record(self, times: int) -> Any:
        """Return the first record so many times, collated; fetched anew, as collating may alter it.

        Of what is in it, nothing that counts records gets into an empty batch.
        """
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is not None:
            return self.collate(fetch([0] * times))
        return self.collate([self.dataset[0] for _ in range(times)])


def _check_sampler(sampler: object) -> None:
    if not isinstance(sampler, PrivateSampler):
        raise TypeError(
            "PrivateLoader: sampler must be one of dpkernels.privacy.samplers, which is what is "
            f"accounted, got {type(sampler).__name__}; under Lightning, pass "
            "use_distributed_sampler=False to the Trainer"
        )


def _check_dataset(dataset: Any, sampler: PrivateSampler) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"PrivateLoader: {type(dataset).__name__} is an IterableDataset, whose records come in "
            "an order of its own, so that none can be sampled; pass a data set with __getitem__ "
            "and __len__"
        )
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"PrivateLoader: dataset must have a length to be sampled from, got "
            f"{type(dataset).__name__}; give it __len__"
        )
    if len(dataset) == 0:
        raise ValueError("PrivateLoader: dataset must have records, got one of length 0")
    if len(dataset) != sampler.num_records:
        raise ValueError(
            f"PrivateLoader: dataset must have the {sampler.num_records} records that the sampler "
            f"draws from, got {len(dataset)}; make the sampler for this data set"
        )


def _check_replaceable(loader: DataLoader[Any], sampler: PrivateSampler) -> None:
    """Raise ValueError unless the loader takes all records alike, so that sampling may differ."""
    if not isinstance(loader, PrivateLoader) and hasattr(loader, "_is_accelerate_prepared"):
        raise ValueError(
            "from_data_loader: loader went through Accelerate's prepare(), which deals out batches "
            "among processes; pass the DataLoader itself, and prepare() what comes out of it"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"from_data_loader: loader has its own batches ({type(loader.batch_sampler).__name__}),"
            " which a private sampler would replace by others; pass an ordinary DataLoader with a "
            "batch_size"
        )
    old = loader.sampler
    if isinstance(old, DistributedSampler):
        if (old.rank, old.num_replicas) != (sampler.rank, sampler.world_size):
            raise ValueError(
                f"from_data_loader: loader is for rank {old.rank} of {old.num_replicas}, sampler "
                f"for rank {sampler.rank} of {sampler.world_size}; make the sampler for the same"
            )
        return
    if type(old) is SequentialSampler or (
        type(old) is RandomSampler
        and not old.replacement
        and old.num_samples == sampler.num_records
    ):
        return
    raise ValueError(
        f"from_data_loader: loader draws with a {type(old).__name__} of its own, which favours or "
        "leaves out records and is accounted by nobody; use shuffle=True, and take a Subset of "
        "the data set for a part of it"
    )
