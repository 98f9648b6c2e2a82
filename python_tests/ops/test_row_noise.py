"""Noise of many rows in one call is, bit for bit, that of each row alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.noise import add_gaussian_noise_, add_row_noise_, reference, triton_impl
from python_tests.ops.test_noise import check_noisy
from python_tests.ops.test_noise_tails import KEY as TAIL_KEY
from python_tests.ops.test_noise_tails import LARGEST, ZEROS

OPERATIONS = ("add_row_noise_", "add_gaussian_noise_")

# All bits of both count. Keys come twice with other counters, and counters with other keys.
KEYS = torch.tensor([0, -1, -(2**63), 2**63 - 1, 0x0123_4567_89AB_CDEF, -1, 17])
COUNTERS = torch.tensor([0, 2**32 - 1, 2**63 - 1, 5, 2**32, 2**62 + 12345, 5])
STD, SCALE = 0.7, -0.3


def row_by_row(x: Tensor, keys: Tensor = KEYS, counters: Tensor = COUNTERS) -> Tensor:
    """Return what ``add_gaussian_noise_`` makes of each row, in memory of its own."""
    rows = [row.clone() for row in x]
    for row, key, counter in zip(rows, keys.tolist(), counters.tolist(), strict=True):
        add_gaussian_noise_(row, STD, key, counter, scale=SCALE)
    return torch.stack(rows) if rows else x.clone()


def check_rows(x: Tensor, keys: Tensor = KEYS, counters: Tensor = COUNTERS) -> None:
    """Assert that one call for all rows of ``x`` writes what a call for each does."""
    wanted = row_by_row(x, keys, counters)
    add_row_noise_(x, STD, keys, counters, scale=SCALE)
    assert torch.equal(x, wanted)


# Rows of one program and of several, on either side of where the Triton kernel takes larger ones.
SIZES = [0, 1, 63, 64, 65, 512, 513, 1000, 1023, 1024, 2049]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", SIZES)
def test_every_row_is_that_row_alone(backend: str, n: int, dtype: torch.dtype) -> None:
    check_rows(torch.linspace(-1, 1, 7 * n, dtype=dtype).view(7, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1, 3, 64])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_what_lies_between_rows_is_left_alone(
    backend: str, n: int, gap: int, dtype: torch.dtype
) -> None:
    base = torch.full((9, n + gap), torch.nan, dtype=dtype)
    view = base[1:8, gap // 2 : gap // 2 + n]
    view.copy_(torch.linspace(-1, 1, 7 * n, dtype=dtype).view(7, n))
    check_rows(view)
    assert not view.isnan().any()
    view.fill_(torch.nan)
    assert base.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(500, 640), (3, 100_003), (1, 65_537), (2000, 3)])
def test_any_number_of_threads_gives_the_same_bits(
    cpp: str, threads: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    keys = torch.arange(shape[0]) * 0x9E37_79B9_7F4A_7C15 % 2**62
    check_rows(torch.zeros(shape, dtype=dtype), keys, keys // 7)


def test_a_row_does_not_depend_on_the_others(backend: str) -> None:
    x = torch.linspace(-1, 1, 7 * 200).view(7, 200)
    together = x.clone()
    add_row_noise_(together, STD, KEYS, COUNTERS)
    for rows in (torch.tensor([3]), torch.tensor([6, 0, 4]), torch.arange(7).flip(0)):
        some = x[rows]
        add_row_noise_(some, STD, KEYS[rows], COUNTERS[rows])
        assert torch.equal(some, together[rows])


def test_no_two_rows_have_the_same_noise(backend: str) -> None:
    z = torch.zeros(7, 4096)
    add_row_noise_(z, 1.0, KEYS, COUNTERS)
    # 5 standard errors of a correlation of independent normals, and of their mean square.
    correlations = torch.corrcoef(z).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 4096**0.5
    assert (z.square().mean(1) - 1).abs().max() < 5 * (2 / 4096) ** 0.5


def test_rows_have_any_shape(backend: str) -> None:
    for shape in ((7,), (7, 1), (7, 5, 13), (7, 2, 3, 4), (7, 0, 3), (7, 3, 0)):
        check_rows(torch.ones(shape))
    check_rows(torch.ones(21)[::3])
    check_rows(torch.ones(14, 5, 13)[::2])
    check_rows(torch.ones(5, 3).as_strided((1, 4), (0, 1)), KEYS[:1], COUNTERS[:1])
    for shape in ((0,), (0, 5), (0, 0), (0, 3, 5)):
        check_rows(torch.ones(shape), KEYS[:0], COUNTERS[:0])


def test_keys_and_counters_may_be_views(backend: str) -> None:
    spaced = torch.stack((KEYS, COUNTERS), 1)
    check_rows(torch.ones(7, 70), *spaced.unbind(1))
    check_rows(torch.ones(3, 70), torch.tensor([5]).expand(3), torch.arange(3))
    check_rows(torch.ones(3, 70), torch.arange(3), torch.tensor([5]).expand(3))
    assert torch.equal(spaced, torch.stack((KEYS, COUNTERS), 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_words_that_need_more_bits_are_continued_in_their_own_stream(
    backend: str, dtype: torch.dtype
) -> None:
    counters = torch.tensor([LARGEST[0], 0, *LARGEST[1:]])
    keys = torch.full_like(counters, TAIL_KEY)
    for n in (64, 1100):
        check_rows(torch.zeros(len(keys), n, dtype=dtype), keys, counters)
    counters = torch.tensor([ZEROS[0][0], 4, ZEROS[1][0]])
    check_rows(torch.zeros(3, 10_300, dtype=dtype), keys[:3], counters)
    z = torch.zeros(3, 10_300, dtype=dtype)
    add_row_noise_(z, 1.0, keys[:3], counters)
    assert (z != 0).all()


def test_rows_more_than_two_to_the_31_elements_apart(backend: str, tmp_path: Path) -> None:
    # A file with a hole: none of its pages is there until it is written.
    far = torch.from_file(str(tmp_path / "far"), shared=True, size=2**31 + 65)
    check_rows(far.as_strided((2, 65), (2**31, 1)), KEYS[:2], COUNTERS[:2])


@pytest.mark.parametrize("std", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.0])
def test_noise_is_added_then_scaled(backend: str, std: float, scale: float) -> None:
    x = torch.linspace(-5, 5, 7 * 111).view(7, 111)
    actual = x.clone()
    add_row_noise_(actual, std, KEYS, COUNTERS, scale=scale)
    for i in range(7):
        check_noisy(actual[i], x[i], std, int(KEYS[i]), int(COUNTERS[i]), scale)
    if std == 0:
        assert torch.equal(actual, x * scale)


@given(
    streams=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1)),
        unique=True,
        max_size=5,
    ),
    n=st.integers(0, 200),
    gap=st.integers(0, 9),
)
def test_any_streams(backend: str, streams: list[tuple[int, int]], n: int, gap: int) -> None:
    keys, counters = torch.tensor(streams, dtype=torch.int64).view(-1, 2).unbind(1)
    check_rows(torch.ones(len(streams), n + gap)[:, :n], keys, counters)


REPEATS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), max_size=8)


@given(streams=REPEATS)
def test_repeated_streams_are_refused_and_no_others(
    backend: str, streams: list[tuple[int, int]]
) -> None:
    keys, counters = torch.tensor(streams, dtype=torch.int64).view(-1, 2).unbind(1)
    x = torch.ones(len(streams), 2)
    if len(set(streams)) == len(streams):
        check_rows(x, keys, counters)
        return
    with pytest.raises(ValueError, match="two rows have the same key and counter"):
        add_row_noise_(x, 1.0, keys, counters)
    assert (x == 1).all()


@pytest.mark.parametrize("at", [0, 1, 4999, 9998])
def test_one_repeated_stream_of_many_is_found(backend: str, at: int) -> None:
    keys = torch.arange(10_000) * 2**40
    counters = torch.arange(10_000) * 2**33
    add_row_noise_(torch.ones(10_000, 0), 1.0, keys, counters)
    keys[-1], counters[-1] = keys[at], counters[at]
    with pytest.raises(ValueError, match="two rows have the same key and counter"):
        add_row_noise_(torch.ones(10_000, 0), 1.0, keys, counters)


def test_triton_loads_vectors_only_where_rows_and_gaps_are_whole_ones() -> None:
    x = torch.zeros(4, 64)
    assert triton_impl._vector(x, 64, 64) == 4
    assert triton_impl._vector(x, 62, 64) == triton_impl._vector(x, 64, 66) == 1
    assert triton_impl._vector(x.view(-1)[1:], 64, 64) == 1
    assert triton_impl._vector(x.double(), 62, 66) == 2


def test_streams_of_the_reference_are_those_of_one_key() -> None:
    many = reference.standard_normals(130, KEYS, COUNTERS, dtype=torch.float64)
    for row, key, counter in zip(many, KEYS.tolist(), COUNTERS.tolist(), strict=True):
        alone = reference.standard_normals(130, key, counter, dtype=torch.float64)
        assert torch.equal(row, alone)
