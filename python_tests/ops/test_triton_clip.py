"""The Triton clip kernels where one tile, one block or one program ends and the next begins."""

from __future__ import annotations

import pytest
import torch

from dpkernels.ops.clip import reference, triton_impl
from python_tests.tolerance import assert_as_accurate

WIDEST = triton_impl._WIDTHS[torch.float32][-1]
ALONG = triton_impl._LONG_WIDTHS[-1]


def compare(grads, max_norms, *, accumulate=False, normalise=False):
    """Run ``clip_and_sum_`` here and in the reference, and hold the first to the second."""
    dtype = reference.sum_dtype(grads[0].dtype)
    before = [torch.linspace(-1, 1, g.shape[1], dtype=dtype) for g in grads]
    ours = [b.clone() for b in before]
    plain = [b.clone() for b in before]
    exact = [b.double() for b in before]
    arguments = (max_norms, normalise, 0.01, accumulate)
    sq_norms, factors = triton_impl.clip_and_sum_(ours, grads, *arguments)
    wanted, wanted_factors = reference.clip_and_sum_(plain, grads, *arguments)
    reference.clip_and_sum_(exact, [g.double() for g in grads], *arguments)
    assert torch.equal(sq_norms.isfinite(), wanted.isfinite())
    finite = wanted.isfinite()
    torch.testing.assert_close(sq_norms[finite], wanted[finite], rtol=1e-13, atol=0)
    again = triton_impl.clip_factors(wanted, max_norms, normalise, 0.01, dtype)
    assert torch.equal(again, wanted_factors)
    assert factors.dtype == dtype and factors.shape == wanted_factors.shape
    for a, p, e in zip(ours, plain, exact, strict=True):
        assert_as_accurate(a, p, e)


def tiles():
    return triton_impl._tiles(triton_impl._WIDTHS[torch.float32], torch.float32)


@pytest.mark.parametrize("tile", [tiles()[0], tiles()[1], tiles()[2]], ids=str)
@pytest.mark.parametrize("extra", [0, 1])
def test_whole_rows_around_the_edge_of_a_tile(tile, extra: int) -> None:
    assert triton_impl._tile_of_whole_rows(tile.columns, torch.float32) == tile
    programs = triton_impl._INTERPRETED_SMS * triton_impl._WARPS_PER_SM // tile.warps
    # One row more than one tile for each program, so that programs take more than one tile.
    rows = programs * tile.rows + extra
    compare([torch.randn(rows, tile.columns + extra)], [0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_longest_row_that_is_read_once_and_the_next(dtype: torch.dtype) -> None:
    assert triton_impl._tile_of_whole_rows(WIDEST, torch.float32) is not None
    assert triton_impl._tile_of_whole_rows(WIDEST + 1, torch.float32) is None
    for columns in (WIDEST, WIDEST + 1):
        grads = torch.randn(3, columns).to(dtype)
        grads[1, columns - 1] = torch.nan
        compare([grads], [0.1], accumulate=True, normalise=True)


def test_float64_rows_are_half_as_long() -> None:
    assert triton_impl._tile_of_whole_rows(WIDEST // 2, torch.float64) is not None
    assert triton_impl._tile_of_whole_rows(WIDEST // 2 + 1, torch.float64) is None


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("columns", [ALONG - 1, ALONG, ALONG + 1, 3 * ALONG + 1])
def test_rows_and_columns_split_among_programs(rows: int, columns: int) -> None:
    grads = torch.randn(rows, columns)
    norms = triton_impl.row_sq_norms([grads], False)
    torch.testing.assert_close(norms, grads.double().square().sum(1), rtol=1e-13, atol=0)
    # A list of two has one norm over both, so the rows are gone through twice.
    compare([grads, torch.randn(rows, 3)], [0.5])


def test_the_sum_over_rows_is_split_and_every_part_is_added() -> None:
    grads, factors = torch.ones(70, 10), torch.ones(1, 70)
    assert triton_impl._partial_weighted_sums(grads, factors[0]).shape[0] > 1
    out = torch.full((10,), 5.0)
    triton_impl.weighted_row_sum_([out], [grads], factors, True)
    assert torch.equal(out, torch.full((10,), 75.0))


@pytest.mark.parametrize("count", [0, 1, 8, 9, 64, 65, 130])
def test_any_number_of_partial_sums_is_added_up(count: int) -> None:
    partials = torch.arange(float(count * 67)).reshape(count, 67)
    out = torch.full((67,), torch.nan)
    triton_impl._add_rows_(out, partials, accumulate=False)
    assert torch.equal(out, partials.sum(0))


@pytest.mark.parametrize("columns", [8, 10, 4 * ALONG])
def test_unaligned_and_strided_rows(columns: int) -> None:
    buffer = torch.full((6, columns + 9), torch.nan)
    buffer[:, 3 : 3 + columns] = torch.randn(6, columns)
    view = buffer[:, 3 : 3 + columns]
    assert triton_impl._vector(view) == 1
    compare([view], [0.5])
    compare([view, torch.randn(columns, 6).t()], [0.5])
    compare([torch.randn(1, columns).expand(6, columns)], [0.5])


def test_wide_loads_need_aligned_rows_of_whole_vectors() -> None:
    assert triton_impl._vector(torch.empty(4, 8)) == 4
    assert triton_impl._vector(torch.empty(4, 8, dtype=torch.bfloat16)) == 8
    assert triton_impl._vector(torch.empty(4, 8, dtype=torch.float64)) == 2
    assert triton_impl._vector(torch.empty(4, 6)) == 1
    assert triton_impl._vector(torch.empty(4, 16)[:, :6]) == 1
    assert triton_impl._vector(torch.empty(4, 9)[:, :8]) == 1
    assert triton_impl._vector(torch.empty(4, 12)[:, 1:9]) == 1


def test_repeated_sums_are_bitwise_equal() -> None:
    grads = torch.randn(70, 300)
    sums = [torch.empty(300), torch.empty(300)]
    for out in sums:
        triton_impl.clip_and_sum_([out], [grads], [0.1], False, 0.0, False)
    assert torch.equal(*sums)
