"""Keys of many rows: from the operating system, no counter twice, not across forks or restarts."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels import NoiseKey
from dpkernels.ops.noise import RowKeys, add_row_noise_
from python_tests.ops.test_noise_key import refused_in_a_fork

ROWS = torch.tensor([4, 0, 2])


@pytest.fixture
def seeded() -> Iterator[RowKeys]:
    """Six reproducible keys, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield RowKeys.from_seed(7, 6)


def drawn(keys: RowKeys, rows: Tensor = ROWS) -> Tensor:
    """Return the noise of the rows' next counters."""
    x = torch.zeros(len(rows), 50)
    add_row_noise_(x, 1.0, *keys.reserve(rows))
    return x


def test_keys_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = RowKeys(50)
    assert len(keys) == 50 and keys.seed is None
    assert keys.keys.dtype == keys.counters.dtype == torch.int64
    assert keys.keys.unique().numel() == keys.counters.unique().numel() == 50
    assert (keys.counters >= 0).all() and (keys.counters < 2**62).all()
    assert (keys.keys < 0).any() and (keys.counters >= 2**61).any()
    calls = []
    monkeypatch.setattr(os, "urandom", lambda n: calls.append(n) or b"\xff" * n)
    keys = RowKeys(3)
    assert calls == [48]
    assert keys.keys.tolist() == [-1] * 3 and keys.counters.tolist() == [2**62 - 1] * 3


def test_torch_s_seed_does_not_reach_the_keys() -> None:
    torch.manual_seed(0)
    first = RowKeys(3).keys
    torch.manual_seed(0)
    assert not (RowKeys(3).keys == first).any()


def test_a_seed_warns_is_recorded_and_reproduces() -> None:
    with pytest.warns(UserWarning, match=r"RowKeys.*seed 3.*subtract.*use RowKeys\(n\)") as warned:
        first = RowKeys.from_seed(3, 4)
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="fixed seed"):
        second = RowKeys.from_seed(3, 4)
    with pytest.warns(UserWarning, match="fixed seed"):
        other = RowKeys.from_seed(4, 4)
    assert first.seed == 3 and first.counters.tolist() == [0] * 4
    rows = torch.arange(4)
    assert torch.equal(drawn(first, rows), drawn(second, rows))
    assert not (first.keys == other.keys).any()


def test_a_seeded_key_does_not_depend_on_how_many_there_are(seeded: RowKeys) -> None:
    with pytest.warns(UserWarning, match="fixed seed"):
        more = RowKeys.from_seed(7, 1000)
    assert torch.equal(more.keys[:6], seeded.keys)
    assert more.keys.unique().numel() == 1000


def test_rows_of_a_seed_are_not_the_keys_and_children_of_that_seed(seeded: RowKeys) -> None:
    with pytest.warns(UserWarning, match="fixed seed"):
        key = NoiseKey.from_seed(7)
    used = {key.key, *(child.key for child in key.spawn(20))}
    assert not used & set(seeded.keys.tolist())


def test_reserve_hands_out_each_counter_once(seeded: RowKeys) -> None:
    keys, first = seeded.reserve(ROWS, 3)
    assert torch.equal(keys, seeded.keys[ROWS]) and first.tolist() == [0, 0, 0]
    _, first = seeded.reserve(torch.tensor([2, 5]))
    assert first.tolist() == [3, 0]
    _, first = seeded.reserve(ROWS, 0)
    assert first.tolist() == [3, 3, 4]
    _, first = seeded.reserve(torch.arange(6))
    assert first.tolist() == [3, 0, 4, 0, 3, 1]
    keys, first = seeded.reserve(torch.arange(0))
    assert keys.shape == first.shape == (0,)
    assert seeded.counters.tolist() == [4, 1, 5, 1, 4, 2]


def test_what_reserve_returns_is_the_caller_s(seeded: RowKeys) -> None:
    keys, first = seeded.reserve(ROWS)
    before = seeded.keys.clone()
    keys.zero_()
    first.fill_(-5)
    seeded.counters.zero_()
    assert torch.equal(seeded.keys, before) and seeded.counters[4] == 1


def test_reserved_counters_stay_used_after_an_exception(seeded: RowKeys) -> None:
    with pytest.raises(ValueError, match="std"):
        add_row_noise_(torch.zeros(3, 2), -1.0, *seeded.reserve(ROWS))
    assert seeded.counters.tolist() == [1, 0, 1, 0, 1, 0]


def test_threads_never_get_the_same_counter() -> None:
    keys = RowKeys(5)
    start = keys.counters

    def take(thread: int) -> list[Tensor]:
        rows = torch.tensor([thread % 5, (thread + 1) % 5])
        return [torch.stack((rows, keys.reserve(rows, 2)[1])) for _ in range(200)]

    with ThreadPoolExecutor(8) as pool:
        taken = torch.cat([t for each in pool.map(take, range(8)) for t in each], 1)
    assert len(set(map(tuple, taken.T.tolist()))) == taken.shape[1] == 8 * 200 * 2
    assert int((keys.counters - start).sum()) == 2 * taken.shape[1]


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "twice": (torch.tensor([1, 3, 1]), "rows names a row twice"),
    "low": (torch.tensor([0, -1]), r"rows must be in \[0, 6\), got -1 to 0"),
    "high": (torch.tensor([0, 6]), r"rows must be in \[0, 6\), got 0 to 6"),
    "int32": (torch.arange(3).int(), r"rows must be int64 \[k\].*int32"),
    "mask": (torch.ones(6).bool(), r"rows must be int64 \[k\].*bool"),
    "matrix": (torch.arange(4).view(2, 2), r"rows must be int64 \[k\].*got \[2, 2\]"),
    "away": (torch.arange(3, device="meta"), r"rows must be int64 \[k\] on the CPU.*meta"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused(seeded: RowKeys, name: str) -> None:
    rows, match = BAD_ROWS[name]
    with pytest.raises(ValueError, match=rf"RowKeys.reserve: {match}"):
        seeded.reserve(rows)
    assert seeded.counters.tolist() == [0] * 6


def test_negative_numbers_are_refused(seeded: RowKeys) -> None:
    with pytest.raises(ValueError, match=r"RowKeys.reserve: count must be >= 0, got -1"):
        seeded.reserve(ROWS, -1)
    assert seeded.counters.tolist() == [0] * 6
    for make in (RowKeys, lambda n: RowKeys.from_seed(1, n)):
        with pytest.raises(ValueError, match=r"RowKeys: n must be >= 0, got -1"):
            make(-1)


def test_no_rows_are_as_good_as_some() -> None:
    keys = RowKeys(0)
    assert len(keys) == 0 and keys.reserve(torch.arange(0))[0].shape == (0,)
    keys.load_state_dict(keys.state_dict())
    assert drawn(keys, torch.arange(0)).shape == (0, 50)


def test_used_up_counters_are_not_used_again(seeded: RowKeys) -> None:
    last = torch.tensor([0, 2**63 - 4, 0, 0, 0, 0])
    with pytest.warns(UserWarning, match="fixed seed 7"):
        seeded.load_state_dict({**seeded.state_dict(), "counters": last})
    for count in (4, 2**63 - 1, 2**63, 2**70):
        with pytest.raises(RuntimeError, match="all counters of a row are used; make a new"):
            seeded.reserve(torch.tensor([0, 1]), count)
        assert torch.equal(seeded.counters, last)
    assert seeded.reserve(torch.tensor([0, 1]), 3)[1].tolist() == [0, 2**63 - 4]
    with pytest.raises(RuntimeError, match="all counters of a row are used"):
        seeded.reserve(torch.tensor([1]))


def test_a_restarted_run_never_meets_the_noise_before() -> None:
    keys = RowKeys(6)
    state = keys.state_dict()
    assert set(state.values()) == {None}, "a checkpoint would tell the noise"
    old, before = keys.keys, drawn(keys)
    keys.load_state_dict(state)
    assert keys.seed is None and len(keys) == 6
    assert not (keys.keys == old).any()
    assert not (drawn(keys) == before).all(1).any()


def test_a_seeded_run_goes_on_where_it_was_saved(seeded: RowKeys) -> None:
    drawn(seeded)
    state = pickle.loads(pickle.dumps(seeded.state_dict()))
    wanted = [drawn(seeded), drawn(seeded, torch.arange(6))]
    resumed = RowKeys(6)
    with pytest.warns(UserWarning, match="fixed seed 7"):
        resumed.load_state_dict(state)
    assert resumed.seed == 7
    assert torch.equal(drawn(resumed), wanted[0])
    assert torch.equal(drawn(resumed, torch.arange(6)), wanted[1])
    # The state is not a window on the counters that are in use.
    assert state["counters"].tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("lost", ["seed", "counters"])
def test_a_state_without_the_counters_is_refused(seeded: RowKeys, lost: str) -> None:
    state = seeded.state_dict()
    del state[lost]
    with pytest.raises(ValueError, match=rf"RowKeys.load_state_dict: state lacks {lost}; pass"):
        seeded.load_state_dict(state)


@pytest.mark.parametrize(
    "counters", [None, [0] * 6, torch.zeros(6), torch.zeros(5).long(), torch.arange(6) - 1]
)
def test_a_state_with_impossible_counters_is_refused(seeded: RowKeys, counters: object) -> None:
    drawn(seeded)
    before = seeded.counters
    with pytest.raises(ValueError, match=r"counters must be int64 \[6\] in \[0, 2\^63\)"):
        seeded.load_state_dict({**seeded.state_dict(), "counters": counters})
    assert torch.equal(seeded.counters, before)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_keys_are_never_duplicated(duplicate: object, seeded: RowKeys) -> None:
    assert callable(duplicate)
    for keys in (seeded, RowKeys(2)):
        with pytest.raises(TypeError, match=r"a RowKeys cannot be copied.*RowKeys\(n\) for other"):
            duplicate(keys)


def test_a_forked_process_cannot_use_its_parent_s_keys() -> None:
    keys = RowKeys(3)
    assert refused_in_a_fork(lambda: keys.reserve(torch.arange(2))) == 1
    keys.reserve(torch.arange(2))


def test_nothing_shows_a_key(seeded: RowKeys) -> None:
    assert repr(seeded) == "RowKeys(6 rows, seed 7)"
    assert repr(RowKeys(3)) == "RowKeys(3 rows, operating system)"
