"""Samplers: batches are distributed as the accountant is told, and go on after a checkpoint."""

from __future__ import annotations

import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpkernels.privacy.draws import Bits, each_with_probability, so_many
from dpkernels.privacy.mechanism import Poisson, Shuffled, WithoutReplacement
from dpkernels.privacy.samplers import (
    FixedSizeSampler,
    PoissonSampler,
    PrivateSampler,
    ShuffledSampler,
)

# Chance that a test of a correct sampler fails, where the draws are random: never, in practice.
FALSE_ALARM = 1e-9
KINDS: dict[str, Callable[..., PrivateSampler]] = {
    "poisson": lambda **seed: PoissonSampler(20, 0.2, **seed),
    "fixed": lambda **seed: FixedSizeSampler(20, 4, **seed),
    "shuffled": lambda **seed: ShuffledSampler(20, 3, **seed),
}


@pytest.fixture(autouse=True)
def quiet_seeds() -> Iterator[None]:
    """Seeds without their warning, which has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*with the fixed seed")
        yield


def drawn(sampler: PrivateSampler) -> torch.Tensor:
    """Return an epoch as ``[steps, num_records]``: how often each record is in each batch."""
    table = torch.zeros(len(sampler), sampler.num_records, dtype=torch.int64)
    for step, batch in enumerate(sampler):
        table[step] += torch.bincount(
            torch.tensor(batch, dtype=torch.int64), minlength=len(table[0])
        )
    return table


def assert_binomial(counts: torch.Tensor, trials: int, chance: float) -> None:
    """Assert that each count is between the binomial quantiles of a false alarm in any of them."""
    tail = FALSE_ALARM / counts.numel() / 2
    low, high = stats.binom.ppf([tail, 1 - tail], trials, chance)
    assert low <= counts.min() and counts.max() <= high


def assert_distributed(counts: list[int], chances: list[float]) -> None:
    """Assert by a chi-square test that outcomes come with their chances; rare ones are pooled."""
    total, pooled = sum(counts), [(0, 0.0)]
    for count, chance in zip(counts, chances, strict=True):
        # The test's approximation wants about five expected outcomes in each cell.
        if total * chance >= 5:
            pooled.append((count, chance))
        else:
            pooled[0] = pooled[0][0] + count, pooled[0][1] + chance
    cells = [cell for cell in pooled if cell[1] > 0]
    expected = [total * chance / sum(chances) for _, chance in cells]
    assert stats.chisquare([count for count, _ in cells], expected).pvalue > FALSE_ALARM


class GivenBits(Bits):
    """The bits of given 64-bit numbers: their first bytes, then the rest of those asked for."""

    def __init__(self, numbers: list[int], tied: list[int]) -> None:
        super().__init__()
        self.answers = [
            torch.tensor([number >> 56 for number in numbers], dtype=torch.uint8),
            torch.tensor([number % 2**56 - 2**62 for number in tied], dtype=torch.int64),
        ]

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        answer = self.answers.pop(0)
        assert answer.dtype == dtype and len(answer) == count
        return answer


@given(st.data(), st.floats(2.0**-40, 1.0))
def test_a_record_is_chosen_if_its_64_bits_are_below_the_rate(data: Any, rate: float) -> None:
    bound = int(Fraction(rate) * 2**64)
    near = st.integers(max(0, bound - 2), min(2**64 - 1, bound + 2))
    numbers = data.draw(st.lists(st.one_of(near, st.integers(0, 2**64 - 1)), min_size=1))
    tied = [number for number in numbers if number >> 56 == bound >> 56]
    chosen = each_with_probability(rate, len(numbers), GivenBits(numbers, tied))
    assert chosen.tolist() == [i for i, number in enumerate(numbers) if number < bound]


@pytest.mark.parametrize("seed", [None, 7])
def test_poisson_takes_every_record_at_the_rate_and_independently(seed: int | None) -> None:
    records, rate, steps = 30, 0.15, 10_000
    table = drawn(PoissonSampler(records, rate, steps=steps, seed=seed))
    assert_binomial(table.sum(0), steps, rate)
    together = (table.T @ table)[torch.triu_indices(records, records, 1).unbind()]
    assert_binomial(together, steps, rate**2)
    # A record in one step and any in the next; pairs of steps do not overlap.
    assert_binomial(table[::2].T @ table[1::2], steps // 2, rate**2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_size_of_a_poisson_batch_is_binomial_over_all_ranks_together(world_size: int) -> None:
    records, rate, steps = 40, 0.1, 5_000
    tables = [
        drawn(PoissonSampler(records, rate, steps=steps, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    sizes = torch.stack(tables).sum((0, 2)).bincount(minlength=records + 1)
    assert_distributed(sizes.tolist(), stats.binom.pmf(range(records + 1), records, rate).tolist())
    assert_binomial(sizes[0], steps, (1 - rate) ** records)


@pytest.mark.parametrize("seed", [None, 7])
def test_ranks_draw_from_parts_of_their_own_and_independently(seed: int | None) -> None:
    records, rate, steps, world_size = 12, 0.3, 4_000, 3
    tables = [
        drawn(PoissonSampler(records, rate, steps=steps, seed=seed, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    for rank, table in enumerate(tables):
        others = [i for i in range(records) if i % world_size != rank]
        assert table[:, others].sum() == 0
        assert_binomial(table[:, rank::world_size].sum(0), steps, rate)
    for one, other in itertools.combinations(range(world_size), 2):
        together = tables[one][:, one::world_size].T @ tables[other][:, other::world_size]
        assert_binomial(together, steps, rate**2)


def test_a_rate_of_one_takes_every_record() -> None:
    assert list(PoissonSampler(5, 1.0, steps=3)) == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_fixed_size_batches_are_uniform_over_all_subsets(size: int) -> None:
    subsets = [frozenset(subset) for subset in itertools.combinations(range(6), size)]
    batches = list(FixedSizeSampler(6, size, steps=8_000))
    assert all(len(batch) == len(set(batch)) == size for batch in batches)
    counts = Counter(map(frozenset, batches))
    if len(subsets) > 1:
        assert_distributed([counts[s] for s in subsets], [1 / len(subsets)] * len(subsets))


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_a_subset_has_its_size_and_no_record_twice(case: tuple[int, int]) -> None:
    records, size = case
    subset = so_many(size, records, Bits("a key")).tolist()
    assert len(set(subset)) == len(subset) == size and set(subset) <= set(range(records))


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_a_shuffled_epoch_has_every_record_once_over_all_ranks(
    records: int, share: int, world_size: int, drop_last: bool
) -> None:
    batch_size = min(share, records // world_size) * world_size
    if batch_size == 0:
        return
    ranks = [
        ShuffledSampler(records, batch_size, drop_last=drop_last, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    table = torch.stack([drawn(sampler) for sampler in ranks]).sum(0)
    assert len({len(sampler) for sampler in ranks}) == 1
    assert ranks[0].sampling == Shuffled(len(table))
    assert table.sum(0).max() <= 1 and table.sum(1).max() <= batch_size
    if drop_last:
        assert (table.sum(1) == batch_size).all()
    else:
        assert (table.sum(0) == 1).all()


def test_orders_of_epochs_are_uniform_over_all_permutations() -> None:
    sampler = ShuffledSampler(4, 1)
    counts = Counter(tuple(i for batch in sampler for i in batch) for _ in range(2_400))
    assert_distributed([counts[p] for p in itertools.permutations(range(4))], [1 / 24] * 24)


def test_each_epoch_drops_other_records() -> None:
    sampler = ShuffledSampler(5, 2, drop_last=True)
    dropped = [({*range(5)} - {i for batch in sampler for i in batch}).pop() for _ in range(2_000)]
    assert_distributed([dropped.count(i) for i in range(5)], [1 / 5] * 5)


def test_what_the_accountant_is_told() -> None:
    poisson = PoissonSampler(1_000, 0.03, world_size=4, rank=2)
    assert (poisson.sampling, poisson.expected_batch_size, len(poisson)) == (Poisson(0.03), 30, 33)
    fixed = FixedSizeSampler(10, 4)
    assert (fixed.sampling, fixed.expected_batch_size) == (WithoutReplacement(4, 10), 4)
    assert len(fixed) == 3
    shuffled = ShuffledSampler(10, 4, world_size=2, rank=1)
    assert (shuffled.sampling, shuffled.expected_batch_size) == (Shuffled(3), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_batches_and_says_that_it_protects_nobody(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"fixed seed 3: .* leave seed out"):
        sampler = KINDS[kind](seed=3)
    epochs = [list(sampler), list(sampler)]
    again, other = KINDS[kind](seed=3), KINDS[kind](seed=4)
    assert [list(again), list(again)] == epochs
    assert epochs[0] != epochs[1] and list(other) != epochs[0]
    assert sampler.seed == 3


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_batches_differ_and_come_from_no_generator_of_torch(kind: str) -> None:
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = []
        for _ in range(2):
            torch.manual_seed(0)
            sampler = KINDS[kind]()
            # Two runs of so many batches are alike with a chance below 1e-9 for every kind.
            runs.append([list(sampler) for _ in range(5)])
    assert runs[0] != runs[1] and sampler.seed is None
    torch.manual_seed(0)
    after = torch.get_rng_state()
    list(KINDS[kind]())
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)


@pytest.mark.parametrize("kind", KINDS)
@given(taken=st.integers(0, 12))
def test_a_seeded_sampler_goes_on_bit_for_bit(kind: str, taken: int) -> None:
    sampler = KINDS[kind](seed=5)
    endless = itertools.chain.from_iterable(itertools.repeat(sampler))
    list(itertools.islice(endless, taken))
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = KINDS[kind](seed=6)
    resumed.load_state_dict(state)
    rest = [list(resumed), list(resumed)]
    whole = KINDS[kind](seed=5)
    # After the last batch, while it is held, the epoch is not over: its rest is empty.
    epochs, position = divmod(max(taken - 1, 0), len(whole))
    for _ in range(epochs):
        list(whole)
    assert rest == [list(whole)[position + min(taken, 1) :], list(whole)]
    assert resumed.batches_handed_out == taken + sum(map(len, rest))


def test_a_shuffled_epoch_resumed_without_a_seed_has_no_record_twice() -> None:
    sampler = ShuffledSampler(20, 3)
    list(sampler)
    before = list(itertools.islice(sampler, 3))
    resumed = ShuffledSampler(20, 3)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    after = list(resumed)
    assert sorted(itertools.chain(*before, *after)) == list(range(20))
    assert len(list(resumed)) == len(resumed)


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_checkpoint_without_a_seed_keeps_the_place_and_no_draws(kind: str) -> None:
    sampler = KINDS[kind]()
    held = list(itertools.islice(sampler, 2))
    state = sampler.state_dict()
    place = {"epoch": 0, "position": 2, "batches_handed_out": 2, "seed": None}
    assert state == place | {"sampler": repr(sampler)}
    runs = []
    for _ in range(5):
        resumed = KINDS[kind]()
        resumed.load_state_dict(state)
        runs.append(list(resumed))
        assert len(runs[-1]) == len(sampler) - 2
    # Three batches of 20 records five times over: alike in all of them with a chance below 1e-9.
    assert any(run != runs[0] for run in runs) and len(held) == 2


def test_a_shuffled_epoch_that_was_broken_off_is_gone_on_with() -> None:
    sampler = ShuffledSampler(20, 3)
    first = list(itertools.islice(sampler, 4))
    assert sorted(itertools.chain(*first, *sampler)) == list(range(20))
    # However often it is broken off, len(sampler) batches hold a record once.
    singles = [next(iter(sampler)) for _ in range(2 * len(sampler))]
    for epoch in (singles[:7], singles[7:]):
        assert sorted(itertools.chain(*epoch)) == list(range(20))


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_after_a_break_a_new_epoch_of_independent_batches_begins(kind: str) -> None:
    sampler = KINDS[kind](seed=1)
    first = list(itertools.islice(sampler, 2))
    second = list(sampler)
    assert len(second) == len(sampler) and second[:2] != first
    assert sampler.batches_handed_out == 2 + len(sampler)


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_is_void_once_another_has_begun(kind: str) -> None:
    sampler = KINDS[kind]()
    old = iter(sampler)
    next(old)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="iterate once at a time"):
        next(old)
    new = iter(sampler)
    next(new)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(new)


def test_any_rank_goes_on_from_one_state_unless_orders_differ() -> None:
    saved = PoissonSampler(20, 0.2, world_size=2, rank=0)
    next(iter(saved))
    other = PoissonSampler(20, 0.2, world_size=2, rank=1)
    other.load_state_dict(saved.state_dict())
    assert all(i % 2 == 1 for batch in other for i in batch)
    shuffled = ShuffledSampler(20, 4, world_size=2, rank=0)
    second = ShuffledSampler(20, 4, world_size=2, rank=1)
    list(shuffled)
    second.load_state_dict(shuffled.state_dict())
    assert sorted(itertools.chain(*second)) == list(range(1, 20, 2))
    next(iter(shuffled))
    with pytest.raises(ValueError, match="this is rank 1 of 2, got the state of rank 0 of 2"):
        second.load_state_dict(shuffled.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": "PoissonSampler(21, 0.2, steps=5)"}, "make the sampler as it was"),
        ({"position": 6}, "position must be from 0 to the number of batches, 5, got 6"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = KINDS["poisson"]()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)
    with pytest.raises(ValueError, match="state lacks batches_handed_out, epoch"):
        sampler.load_state_dict({"sampler": repr(sampler), "position": 0, "seed": None})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonSampler(0, 0.1), "num_records must be an integer >= 1, got 0"),
        (lambda: PoissonSampler(2.5, 0.1), "num_records must be an integer"),
        (lambda: PoissonSampler(10, 0.0), r"rate must be in \(0, 1\], got 0.0"),
        (lambda: PoissonSampler(10, 1.5), r"rate must be in \(0, 1\], got 1.5"),
        (lambda: PoissonSampler(10, float("nan")), r"rate must be in \(0, 1\], got nan"),
        (lambda: PoissonSampler(10, 0.1, steps=0), "steps must be an integer >= 1, got 0"),
        (lambda: PoissonSampler(10, 0.1, world_size=0), "world_size must be an integer"),
        (lambda: PoissonSampler(3, 0.1, world_size=4), "world_size must be at most num_records, 3"),
        (lambda: PoissonSampler(9, 0.1, world_size=2, rank=2), "rank must be from 0 to 1, got 2"),
        (lambda: PoissonSampler(9, 0.1, rank=-1), "rank must be from 0 to 0, got -1"),
        (lambda: FixedSizeSampler(10, 0), "batch_size must be an integer >= 1, got 0"),
        (lambda: FixedSizeSampler(10, 11), "batch_size must be at most num_records, 10, got 11"),
        (
            lambda: FixedSizeSampler(10, 4, world_size=2),
            "not sampling without replacement from all",
        ),
        (lambda: ShuffledSampler(0, 1), "num_records must be an integer >= 1, got 0"),
        (lambda: ShuffledSampler(10, 11), "batch_size must be at most num_records, 10, got 11"),
        (lambda: ShuffledSampler(10, 3, world_size=2), "batch_size must be a multiple of world_si"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
