"""Keys: from the operating system, no counter twice, not across ranks, forks or restarts."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dpkernels import NoiseKey
from dpkernels.ops.noise import add_gaussian_noise_


@pytest.fixture
def seeded() -> Iterator[NoiseKey]:
    """A reproducible key, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield NoiseKey.from_seed(7)


def drawn(key: NoiseKey, n: int = 50) -> torch.Tensor:
    """Return the noise of the key's next counter."""
    x = torch.zeros(n)
    add_gaussian_noise_(x, 1.0, key.key, key.reserve())
    return x


def test_keys_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [NoiseKey() for _ in range(50)]
    assert len({k.key for k in keys}) == len({k.counter for k in keys}) == 50
    assert all(-(2**63) <= k.key < 2**63 and 0 <= k.counter < 2**62 for k in keys)
    assert all(k.seed is None for k in keys)
    monkeypatch.setattr(os, "urandom", lambda n: b"\xff" * n)
    key = NoiseKey()
    assert (key.key, key.counter) == (-1, 2**62 - 1)


def test_torch_s_seed_does_not_reach_the_keys() -> None:
    torch.manual_seed(0)
    first = NoiseKey().key
    torch.manual_seed(0)
    assert NoiseKey().key != first


def test_a_seed_warns_is_recorded_and_reproduces() -> None:
    with pytest.warns(UserWarning, match=r"seed 3.*subtract.*NoiseKey\(\)"):
        first = NoiseKey.from_seed(3)
    with pytest.warns(UserWarning, match="fixed seed"):
        second = NoiseKey.from_seed(3)
    with pytest.warns(UserWarning, match="fixed seed"):
        other = NoiseKey.from_seed(4)
    assert first.seed == 3 and "seed 3" in repr(first)
    assert torch.equal(drawn(first), drawn(second))
    assert first.key != other.key
    assert "operating system" in repr(NoiseKey())


def test_reserve_hands_out_each_counter_once(seeded: NoiseKey) -> None:
    firsts = [seeded.reserve(count) for count in (1, 3, 0, 2, 1)]
    assert firsts == [0, 1, 4, 4, 6]
    assert seeded.counter == 7


def test_reserved_counters_stay_used_after_an_exception(seeded: NoiseKey) -> None:
    before = seeded.counter
    with pytest.raises(ValueError, match="std"):
        add_gaussian_noise_(torch.zeros(3), -1.0, seeded.key, seeded.reserve(2))
    assert seeded.counter == before + 2


def test_threads_never_get_the_same_counter() -> None:
    key = NoiseKey()
    start = key.counter

    def take(_: int) -> list[int]:
        return [key.reserve(1 + i % 3) for i in range(300)]

    with ThreadPoolExecutor(8) as pool:
        firsts = [c for taken in pool.map(take, range(8)) for c in taken]
    counts = [1 + i % 3 for _ in range(8) for i in range(300)]
    used = [c + i for c, count in zip(firsts, counts, strict=True) for i in range(count)]
    assert sorted(used) == list(range(start, start + sum(counts)))
    assert key.counter == start + sum(counts)


@pytest.mark.parametrize("method", ["reserve", "spawn"])
def test_a_negative_count_is_refused(seeded: NoiseKey, method: str) -> None:
    with pytest.raises(ValueError, match=rf"NoiseKey.{method}: count must be >= 0, got -1"):
        getattr(seeded, method)(-1)
    assert seeded.counter == 0


def test_used_up_counters_are_not_used_again(seeded: NoiseKey) -> None:
    with pytest.warns(UserWarning, match="fixed seed 7"):
        seeded.load_state_dict({**seeded.state_dict(), "counter": 2**63 - 2})
    with pytest.raises(RuntimeError, match=r"all counters are used; make a new NoiseKey\(\)"):
        seeded.reserve(3)
    assert seeded.reserve(2) == 2**63 - 2
    with pytest.raises(RuntimeError, match="all counters are used"):
        seeded.reserve()


def test_ranks_get_keys_of_their_own(seeded: NoiseKey) -> None:
    for parent in (seeded, NoiseKey()):
        ranks = [*parent.spawn(4), *parent.spawn(4), *parent.spawn(0)]
        keys = {parent.key, *(rank.key for rank in ranks)}
        assert len(keys) == 9
        grandchildren = [child for rank in ranks for child in rank.spawn(2)]
        assert len(keys | {g.key for g in grandchildren}) == 25
        noise = torch.stack([drawn(rank, 4096) for rank in (parent, *ranks)])
        # 5 standard errors of a correlation of independent normals.
        correlations = torch.corrcoef(noise).fill_diagonal_(0)
        assert correlations.abs().max() < 5 / 4096**0.5


def test_children_of_a_seed_are_reproducible(seeded: NoiseKey) -> None:
    with pytest.warns(UserWarning, match="fixed seed"):
        again = NoiseKey.from_seed(7)
    one_by_one = [again.spawn(1)[0], *again.spawn(2)]
    assert [k.key for k in seeded.spawn(3)] == [k.key for k in one_by_one]
    assert all(child.seed == 7 for child in one_by_one)


def test_a_restarted_run_never_meets_the_noise_before() -> None:
    key = NoiseKey()
    old = key.key
    state = key.state_dict()
    before = [drawn(key) for _ in range(3)]
    restarted = NoiseKey()
    restarted.load_state_dict(state)
    key.load_state_dict(state)
    assert len({old, key.key, restarted.key}) == 3
    for run in (key, restarted):
        assert run.seed is None
        after = [drawn(run) for _ in range(3)]
        assert not any(torch.equal(a, b) for a in after for b in before)


def test_a_checkpoint_does_not_tell_the_noise() -> None:
    key = NoiseKey()
    key.reserve(5)
    assert set(key.state_dict().values()) == {None}


def test_a_seeded_run_goes_on_where_it_was_saved(seeded: NoiseKey) -> None:
    drawn(seeded)
    seeded.spawn(2)
    state = pickle.loads(pickle.dumps(seeded.state_dict()))
    wanted = [drawn(seeded), drawn(seeded)]
    child = seeded.spawn(1)[0]
    resumed = NoiseKey()
    with pytest.warns(UserWarning, match="fixed seed 7"):
        resumed.load_state_dict(state)
    assert state["counter"] == 1 and state["spawned"] == 2
    assert resumed.seed == 7
    assert all(torch.equal(drawn(resumed), z) for z in wanted)
    assert resumed.spawn(1)[0].key == child.key


@pytest.mark.parametrize("lost", ["key", "counter", "spawned", "seed"])
def test_a_state_without_the_counter_is_refused(seeded: NoiseKey, lost: str) -> None:
    seeded.reserve(5)
    state = seeded.state_dict()
    del state[lost]
    with pytest.raises(ValueError, match=rf"state lacks {lost}; pass what state_dict\(\)"):
        seeded.load_state_dict(state)
    assert seeded.counter == 5


@pytest.mark.parametrize("counter", [-1, 2**63 + 1, 5.0, None])
def test_a_state_with_an_impossible_counter_is_refused(seeded: NoiseKey, counter: object) -> None:
    seeded.reserve(5)
    with pytest.raises(ValueError, match=r"counter must be an int in \[0, 2\^63\], got"):
        seeded.load_state_dict({**seeded.state_dict(), "counter": counter})
    assert seeded.counter == 5


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_key_is_never_duplicated(duplicate: object, seeded: NoiseKey) -> None:
    assert callable(duplicate)
    for key in (seeded, NoiseKey()):
        with pytest.raises(TypeError, match=r"two copies would draw the same noise; use.*spawn"):
            duplicate(key)


def refused_in_a_fork(*methods: Callable[[], object]) -> int:
    """Return how many of these methods of keys refuse to run in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        refused = 0
        for method in methods:
            try:
                method()
            except RuntimeError as error:
                refused += "belongs to the parent process" in str(error)
        os.write(write, bytes([refused]))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        return answer.read()[0]


def test_a_forked_process_cannot_use_its_parent_s_key() -> None:
    key = NoiseKey()
    assert refused_in_a_fork(key.reserve, lambda: key.spawn(1)) == 2
    assert key.reserve() == key.counter - 1
