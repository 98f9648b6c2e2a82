"""The private loader: the sampler's batches, split, in order, and a place that is the user's."""

from __future__ import annotations

import itertools
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dpkernels import make_private
from dpkernels.privacy.samplers import PoissonSampler, PrivateSampler, ShuffledSampler
from dpkernels.run import PrivateLoader

RECORDS = 24


@pytest.fixture(autouse=True)
def quiet_seeds() -> Iterator[None]:
    """Seeds without their warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*with the fixed seed")
        yield


class Numbers(Dataset[int]):
    """Records that are their own indices."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Records in an order of their own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(RECORDS))


def poisson(seed: int | None = 1, rate: float = 0.2) -> PoissonSampler:
    return PoissonSampler(RECORDS, rate, seed=seed)


def shuffled(seed: int | None = 1) -> ShuffledSampler:
    return ShuffledSampler(RECORDS, 5, seed=seed)


def stay_put(worker: int) -> None:
    """Initialise a worker in no way."""


SAMPLERS: dict[str, Callable[..., PrivateSampler]] = {"poisson": poisson, "shuffled": shuffled}


@given(st.integers(0, 1_000), st.integers(1, 9), st.sampled_from([0.02, 0.2, 1.0]))
def test_microbatches_make_up_the_logical_batches(seed: int, largest: int, rate: float) -> None:
    loader = PrivateLoader(Numbers(), poisson(seed, rate), max_physical_batch_size=largest)
    expected = list(poisson(seed, rate))
    seen: list[list[int]] = [[]]
    for microbatch in loader:
        seen[-1] += microbatch.tolist()
        logical = expected[len(seen) - 1]
        assert loader.batch_size_now == len(logical)
        assert loader.batches_handed_out == len(seen)
        assert loader.is_last_microbatch == (len(seen[-1]) == len(logical))
        assert len(microbatch) == largest or loader.is_last_microbatch
        assert 0 < len(microbatch) <= largest or not logical
        if loader.is_last_microbatch:
            seen.append([])
    assert seen == [*expected, []]
    assert len(loader) == len(expected)


def test_the_physical_size_may_change_between_epochs() -> None:
    loader = PrivateLoader(Numbers(), shuffled())
    assert [len(batch) for batch in loader] == [5, 5, 5, 5, 4]
    loader.max_physical_batch_size = 3
    assert [len(batch) for batch in loader] == [3, 2, 3, 2, 3, 2, 3, 2, 3, 1]
    assert loader.sampling == shuffled().sampling and loader.expected_batch_size == 5


def test_a_batch_without_records_is_a_step_of_noise() -> None:
    data = TensorDataset(torch.ones(RECORDS, 3), torch.zeros(RECORDS, 2))
    loader = PrivateLoader(data, PoissonSampler(RECORDS, 2.0**-45, steps=2))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.warns(UserWarning, match="adds no noise"):
        training = make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
            loss_reduction="sum",
        )
    before = model.weight.clone()
    for x, y in loader:
        nn.functional.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
    assert training.steps == 2 and torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_workers_ahead_leave_the_place_at_what_was_handed_out(kind: str) -> None:
    whole = SAMPLERS[kind]()
    batches = [*whole, *whole]
    loader = PrivateLoader(
        Numbers(),
        SAMPLERS[kind](),
        max_physical_batch_size=2,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
    )
    states = [loader.state_dict()]
    seen: list[list[int]] = [[]]
    for microbatch in itertools.chain(loader, loader):
        seen[-1] += microbatch.tolist()
        assert loader.batches_handed_out == len(seen)
        assert loader.batch_size_now == len(batches[len(seen) - 1])
        if loader.is_last_microbatch:
            seen.append([])
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert seen == [*batches, []]
    for taken, state in enumerate(states):
        resumed = PrivateLoader(Numbers(), SAMPLERS[kind]())
        resumed.load_state_dict(state)
        rest = [batch.tolist() for batch in itertools.chain(resumed, resumed)]
        assert rest[: len(batches) - taken] == batches[taken:]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_shuffled_epoch_broken_off_with_workers_goes_on_without_a_loss(persistent: bool) -> None:
    loader = PrivateLoader(
        Numbers(), shuffled(None), num_workers=1, prefetch_factor=4, persistent_workers=persistent
    )
    first = [batch.tolist() for batch in itertools.islice(loader, 2)]
    rest = [batch.tolist() for batch in loader]
    assert sorted(itertools.chain(*first, *rest)) == list(range(RECORDS))
    assert loader.batches_handed_out == len(loader)


def test_a_state_in_the_middle_of_a_logical_batch_is_behind_it() -> None:
    loader = PrivateLoader(Numbers(), shuffled(None), max_physical_batch_size=2)
    got = next(iter(loader)).tolist()
    assert not loader.is_last_microbatch
    resumed = PrivateLoader(Numbers(), shuffled(None))
    resumed.load_state_dict(loader.state_dict())
    later = [i for batch in resumed for i in batch.tolist()]
    assert len(later) == RECORDS - 5 and not {*later} & {*got}


def test_an_iteration_is_void_once_another_has_begun() -> None:
    loader = PrivateLoader(Numbers(), shuffled(), max_physical_batch_size=2)
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="iterate once at a time"):
        next(old)


def test_an_ordinary_loader_is_taken_over() -> None:
    def collate(records: list[int]) -> Tensor:
        return torch.tensor(records) + 100

    generator = torch.Generator()
    options: dict[str, Any] = {
        "num_workers": 1,
        "timeout": 30,
        "worker_init_fn": stay_put,
        "multiprocessing_context": "fork",
        "prefetch_factor": 3,
        "persistent_workers": True,
        "generator": generator,
    }
    ordinary = DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=collate, **options)
    loader = PrivateLoader.from_data_loader(ordinary, shuffled(), max_physical_batch_size=3)
    assert loader.dataset is ordinary.dataset and loader.max_physical_batch_size == 3
    for name in (*options, "pin_memory"):
        assert getattr(loader, name) == getattr(ordinary, name), name
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(100, 100 + RECORDS))


def test_what_workers_get_can_be_pickled() -> None:
    loader = PrivateLoader(Numbers(), poisson())
    collate = pickle.loads(pickle.dumps(loader.collate_fn))
    assert collate([]).shape == (0,) and collate([3, 4]).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (WeightedRandomSampler([1.0] * RECORDS, RECORDS), "WeightedRandomSampler"),
        (SubsetRandomSampler(range(5)), "SubsetRandomSampler"),
        (RandomSampler(range(RECORDS), replacement=True), "RandomSampler"),
        (RandomSampler(range(RECORDS), num_samples=3), "RandomSampler"),
        (SequentialSampler(range(RECORDS)), None),
        (RandomSampler(range(RECORDS)), None),
        (DistributedSampler(Numbers(), num_replicas=1, rank=0), None),
    ],
)
def test_only_samplers_that_take_all_records_alike_are_replaced(
    sampler: Any, name: str | None
) -> None:
    ordinary = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    if name is None:
        assert len(list(PrivateLoader.from_data_loader(ordinary, shuffled()))) == 5
        return
    with pytest.raises(ValueError, match=f"draws with a {name} of its own.* take a Subset"):
        PrivateLoader.from_data_loader(ordinary, shuffled())


def test_loaders_with_batches_of_their_own_or_of_other_ranks_are_refused() -> None:
    class Own(BatchSampler):
        """Somebody's own batches."""

    for ordinary in (
        DataLoader(Numbers(), batch_sampler=Own(range(RECORDS), 4, False)),
        DataLoader(Numbers(), batch_size=None),
        PrivateLoader(Numbers(), poisson()),
    ):
        with pytest.raises(ValueError, match="loader has its own batches"):
            PrivateLoader.from_data_loader(ordinary, shuffled())
    part = DistributedSampler(Numbers(), num_replicas=2, rank=1)
    with pytest.raises(ValueError, match="for rank 1 of 2, sampler for rank 0 of 1"):
        PrivateLoader.from_data_loader(DataLoader(Numbers(), sampler=part), shuffled())


def test_data_sets_that_cannot_be_sampled_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Stream is an IterableDataset.* none can be sampled"):
        PrivateLoader(Stream(), poisson())
    with pytest.raises(TypeError, match="Stream is an IterableDataset"):
        PrivateLoader.from_data_loader(DataLoader(Stream(), batch_size=4), poisson())
    with pytest.raises(TypeError, match="dataset must have a length"):
        PrivateLoader(object(), poisson())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got one of length 0"):
        PrivateLoader(TensorDataset(torch.zeros(0, 2)), poisson())
    with pytest.raises(ValueError, match=r"must have the 24 records .* got 3"):
        PrivateLoader(TensorDataset(torch.zeros(3, 2)), poisson())


def test_options_that_would_change_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="drop_last, shuffle cannot be set"):
        PrivateLoader(Numbers(), poisson(), shuffle=True, drop_last=True)
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"max_physical_batch_size must be .* got {wrong}"):
            PrivateLoader(Numbers(), poisson(), max_physical_batch_size=wrong)  # type: ignore[arg-type]
