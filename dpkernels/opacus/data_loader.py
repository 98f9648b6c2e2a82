"""``DPDataLoader``: Poisson-sampled batches, or the loader's own, accounted as what they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dpkernels.engine import Ranks
from dpkernels.opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    seed_of,
)
from dpkernels.privacy.mechanism import Poisson, Sampling, Shuffled
from dpkernels.privacy.private_sampler import PrivateSampler
from dpkernels.privacy.samplers import PoissonSampler
from dpkernels.run.loader import PrivateLoader


class DPDataLoader(PrivateLoader):
    """A loader whose batches hold each record with probability ``sample_rate``, independently.

    Batches differ in size, and may be empty: tensors of 0 records. Who is in a batch comes from the
    operating system's entropy; with a ``generator``, from its seed, with a warning.

    sampler: in place of ``sample_rate``, for loaders with other batches.
    drop_last, batch_first: as Opacus takes them. Sampled batches have no last one to be dropped,
        and which axis counts records is seen from what ``collate_fn`` returns.
    kwargs: as ``DataLoader`` takes them: num_workers, pin_memory, ...
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: PrivateSampler | None = None,
        *,
        sample_rate: float | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        distributed: bool = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        check_rand_on_empty(rand_on_empty)
        if (sampler is None) is (sample_rate is None):
            raise ValueError(
                f"DPDataLoader: pass sample_rate, got sample_rate={sample_rate} and "
                f"sampler={sampler}"
            )
        if sampler is None:
            assert sample_rate is not None
            sampler = poisson_sampler(dataset, sample_rate, distributed, generator)
        self.given_collate_fn = collate_fn
        super().__init__(dataset, sampler, collate_fn=collate_fn, generator=generator, **kwargs)

    @property
    def sample_rate(self) -> float:
        """The part of the records that a batch holds, as expected."""
        return self.expected_batch_size / self.private_sampler.num_records

    @property
    def whole_batch_size(self) -> float:
        """The expected batch size rounded down, as Opacus takes it, at least 1."""
        # 98 * (1 / 49) is 2 but for a rounding.
        return float(max(1, math.floor(self.expected_batch_size * (1 + 1e-12))))

    @classmethod
    def from_data_loader(  # type: ignore[override]
        cls,
        data_loader: DataLoader[Any],
        *,
        distributed: bool = False,
        generator: torch.Generator | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_rate: float | None = None,
    ) -> DPDataLoader:
        """Return a loader that samples, and is otherwise as ``data_loader`` is.

        sample_rate: 1 / len(data_loader) if None, so that batches are as large, as expected.
        """
        check_rand_on_empty(rand_on_empty)
        rate = 1 / batches_of(data_loader) if sample_rate is None else sample_rate
        generator = data_loader.generator if generator is None else generator
        sampler = poisson_sampler(data_loader.dataset, rate, distributed, generator)
        return cls.with_sampler(data_loader, sampler)

    @classmethod
    def with_sampler(cls, data_loader: DataLoader[Any], sampler: PrivateSampler) -> DPDataLoader:
        """Return a loader of the sampler's batches that is otherwise as ``data_loader`` is."""
        if isinstance(data_loader, DPDataLoader):
            data_loader = data_loader.plain()
        loader = super().from_data_loader(data_loader, sampler)
        assert isinstance(loader, DPDataLoader)
        return loader

    def plain(self) -> DataLoader[Any]:
        """Return an ordinary loader of the same data set, for another ``make_private``."""
        own = getattr(self.private_sampler, "batches", None)
        return DataLoader(
            self.dataset,
            batch_size=int(self.whole_batch_size) if own is None else own.batch_size,
            sampler=None if own is None else own.sampler,
            drop_last=False if own is None else own.drop_last,
            collate_fn=self.given_collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )


class OwnOrder(PrivateSampler):
    """The batches of an ordinary loader, in its own order, shuffled or not.

    Adjacency: replace one record. Accounted without amplification, from nothing but this: a record
    is in at most one batch of an epoch. That is checked, and an epoch that was broken off is gone
    on with by the next ``iter()``. The order need not be secret, and a checkpoint keeps it.

    batches: the loader's batch sampler.
    """

    _finishes_epochs = True

    def __init__(self, data_loader: DataLoader[Any]) -> None:
        steps = batches_of(data_loader)
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        super().__init__(records, steps, seed=None, rank=0, world_size=1)
        self.sampling = Shuffled(steps)
        self.expected_batch_size = records * (1 / steps)
        self.batches = data_loader.batch_sampler
        self._drawn: tuple[int, list[list[int]]] | None = None  # an epoch, and all of its batches

    def _draw(self, epoch: int, index: int) -> Tensor:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._whole_epoch()
        return torch.tensor(self._drawn[1][index])

    def _whole_epoch(self) -> list[list[int]]:
        assert self.batches is not None
        batches = [list(batch) for batch in self.batches]
        records = [record for batch in batches for record in batch]
        if len(set(records)) < len(records) or len(batches) != len(self):
            raise RuntimeError(
                f"data_loader: an epoch of {len(batches)} batches holds {len(records)} records, "
                f"{len(set(records))} different ones; each must be in one batch at most, of "
                f"{len(self)} batches: sample without replacement, and without padding"
            )
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the place and, in the middle of an epoch, all of its batches."""
        begun = self._drawn if self._position > 0 else None
        return super().state_dict() | {"batches": begun and begun[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint; no record comes up twice in the epoch."""
        super().load_state_dict(state)
        self._drawn = (state["epoch"], state["batches"]) if state["position"] else None

    def __repr__(self) -> str:
        return f"OwnOrder({self.num_records}, steps={len(self)})"


def poisson_sampler(
    dataset: Any, rate: float, distributed: bool, generator: torch.Generator | None
) -> PrivateSampler:
    """Return a Poisson sampler of all records, or of this process' share of them."""
    if distributed:
        return DistributedUniformWithReplacementSampler(
            total_size=len(dataset), sample_rate=rate, generator=generator
        )
    return UniformWithReplacementSampler(
        num_samples=len(dataset), sample_rate=rate, generator=generator
    )


def sampling_of(
    data_loader: DataLoader[Any], poisson_sampling: bool, sample_rate: float | None
) -> Sampling:
    """Return how ``make_private`` has the loader's records sampled."""
    batches = batches_of(data_loader)
    if poisson_sampling:
        if sample_rate is None and isinstance(data_loader, DPDataLoader):
            sample_rate = getattr(data_loader.sampling, "rate", None)
        return Poisson(1 / batches if sample_rate is None else sample_rate)
    if sample_rate is not None:
        raise ValueError(
            f"make_private: sample_rate={sample_rate} is for poisson_sampling=True; leave it out"
        )
    return Shuffled(batches)


def private_loader(data_loader: DataLoader[Any], sampling: Sampling, ranks: Ranks) -> DPDataLoader:
    """Return a loader of batches that come about as ``sampling`` says.

    A ``DPDataLoader`` of such batches that no run has yet is returned as it is: under Lightning,
    the trainer holds it already.

    ranks: the processes that share the records, each of which has its own.
    """
    if isinstance(sampling, Poisson):
        if isinstance(data_loader, DPDataLoader) and data_loader.watcher is None:
            own = data_loader.private_sampler
            shares = own.rank, own.world_size
            if own.sampling == sampling and shares == (ranks.rank, ranks.size):
                return data_loader
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        seed = None if isinstance(data_loader, DPDataLoader) else seed_of(data_loader.generator)
        sampler = PoissonSampler(
            records, sampling.rate, seed=seed, rank=ranks.rank, world_size=ranks.size
        )
        return DPDataLoader.with_sampler(data_loader, sampler)
    if ranks.size > 1:
        raise ValueError(
            "make_private: poisson_sampling must be True for several processes: a "
            "DistributedSampler repeats records to make shares equal, so that one may be in two "
            "batches of an epoch"
        )
    warnings.warn(
        "make_private: poisson_sampling=False is accounted for as what it is: each record once an "
        "epoch, another one in its place, without amplification by sampling, which makes epsilon "
        "many times larger",
        stacklevel=3,
    )
    if isinstance(data_loader, DPDataLoader):
        data_loader = data_loader.plain()
    return DPDataLoader.with_sampler(data_loader, OwnOrder(data_loader))


def batches_of(data_loader: DataLoader[Any]) -> int:
    """Return len(data_loader); raise ValueError or TypeError if there is nothing to sample from."""
    records = getattr(data_loader.dataset, "__len__", None)
    if records is None:
        raise TypeError(
            "data_loader: its data set has no length, so that no record can be sampled from it; "
            "pass one with __getitem__ and __len__"
        )
    if records() == 0 or len(data_loader) == 0:
        raise ValueError(
            f"data_loader: it has {records()} records in {len(data_loader)} batches; pass a data "
            "set with records, and a batch_size of at most their number"
        )
    return len(data_loader)


def check_rand_on_empty(rand_on_empty: bool) -> None:
    """Raise ValueError: a made-up sample in place of no sample is not private."""
    if rand_on_empty:
        raise ValueError(
            "rand_on_empty: a batch of random numbers in place of an empty one makes a step with "
            "one record differ from the step without it by two clipped gradients, twice what the "
            "noise is for; leave it out: empty batches have 0 records, and steps on them are noise"
        )
