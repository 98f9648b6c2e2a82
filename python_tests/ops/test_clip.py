"""Norms, factors and sums of ``clip`` against extended precision, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops import clip
from python_tests.conftest import CPP
from python_tests.ops import clip_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = cases.OPERATIONS

GAMMA = 0.01


def as_list(value: Tensor | list[Tensor]) -> list[Tensor]:
    """Return a sum as the list of its tensors."""
    return [value] if isinstance(value, Tensor) else value


def check_norms(actual: Tensor, grads: list[Tensor]) -> None:
    """Assert that ``actual`` ``[B]`` are the squared norms over all of ``grads``."""
    exact = np.sum([cases.exact_sq_norms(g) for g in grads], axis=0).astype(np.float64)
    norms = [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in grads]
    plain = torch.stack(norms).square().sum(0)
    assert_as_accurate(actual, plain, torch.from_numpy(exact))


def check_clipped(
    actual: clip.ClippedSum,
    grads: list[Tensor],
    bounds: list[float],
    mode: clip.Mode,
    start: list[Tensor] | None = None,
) -> None:
    """Assert that ``actual`` is the clipped sum of ``grads``, on top of ``start``.

    Norms and factors against the true ones; the sum against the true sum with these factors.
    """
    per_layer = mode == "per_layer"
    groups = [[g] for g in grads] if per_layer else [grads]
    batch = grads[0].shape[0]
    wanted = (len(grads), batch) if per_layer else (batch,)
    assert actual.sq_norms.shape == actual.factors.shape == wanted
    sq_norms = actual.sq_norms.view(len(groups), batch)
    all_factors = actual.factors.view(len(groups), batch)
    for group, norms, factors, bound in zip(groups, sq_norms, all_factors, bounds, strict=True):
        check_norms(norms, group)
        plain = cases.plain_factors(group, bound, mode, GAMMA)
        assert_as_accurate(factors, plain, cases.exact_factors(group, bound, mode, GAMMA))
    for index, (total, g) in enumerate(zip(as_list(actual.sum), grads, strict=True)):
        factors = all_factors[index if per_layer else 0]
        cases.assert_sum(total, g, factors, None if start is None else start[index])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("batch", "width"), cases.SIZES)
def test_norms_of_one_tensor(backend: str, batch: int, width: int, dtype: torch.dtype) -> None:
    grads = cases.gradients(batch, width, dtype)
    check_norms(clip.row_sq_norms(grads), [grads])
    check_norms(clip.row_sq_norms(grads, per_tensor=True)[0], [grads])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("widths", cases.WIDTHS)
def test_norms_of_a_list(backend: str, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    grads = [cases.gradients(17, width, dtype, seed) for seed, width in enumerate(widths)]
    check_norms(clip.row_sq_norms(grads), grads)
    each = clip.row_sq_norms(grads, per_tensor=True)
    assert each.shape == (len(grads), 17)
    for norms, g in zip(each, grads, strict=True):
        check_norms(norms, [g])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", clip.MODES)
@pytest.mark.parametrize("batch", [0, 1, 3, 65, 1025])
def test_factors(backend: str, batch: int, mode: clip.Mode, dtype: torch.dtype) -> None:
    layers = 3 if mode == "per_layer" else 1
    bounds = [0.5, 1.0, 2.0][-layers:]
    generator = torch.Generator().manual_seed(batch)
    norms = torch.empty(layers, batch, dtype=torch.float64)
    norms.log_normal_(0.0, 2.0, generator=generator)
    column = torch.tensor(bounds, dtype=torch.float64).unsqueeze(1)
    divided = column / (norms + GAMMA if mode == "automatic" else norms)
    plain = column.to(dtype) / (norms.to(dtype) + GAMMA if mode == "automatic" else norms.to(dtype))
    if mode != "automatic":
        divided, plain = divided.clamp(max=1), plain.clamp(max=1)
    sq_norms = norms.square()
    if mode == "per_layer":
        factors = clip.clip_factors(sq_norms, bounds, mode, gamma=GAMMA, dtype=dtype)
    else:
        sq_norms, divided, plain = sq_norms[0], divided[0], plain[0]
        factors = clip.clip_factors(sq_norms, bounds[0], mode, gamma=GAMMA, dtype=dtype)
    assert_as_accurate(factors, plain, divided)


def test_factors_of_special_norms(backend: str) -> None:
    special = [0.0, 1.0, 4.0, float("inf"), float("nan"), 1e300, 5e-324, -1e-300, -1.0]
    sq_norms = torch.tensor(special, dtype=torch.float64)
    flat = clip.clip_factors(sq_norms, 2.0)
    assert flat[:5].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0] and flat[6] == 1.0
    assert 0 <= flat[5].item() <= 2e-150
    normalised = clip.clip_factors(sq_norms, 2.0, "automatic", gamma=1.0)
    assert normalised[:2].tolist() == [2.0, 1.0] and normalised[3:5].tolist() == [0.0, 0.0]
    assert clip.clip_factors(sq_norms[:1], 2.0, "automatic", gamma=0.0).isfinite().all()
    # A squared norm that came out negative is no norm: its sample is left out, not let through.
    assert flat[7:].tolist() == normalised[7:].tolist() == [0.0, 0.0]
    layers = clip.clip_factors(torch.stack((sq_norms, sq_norms.flip(0))), [2.0, 2.0], "per_layer")
    assert layers[:, [0, 1, 7, 8]].count_nonzero() == 0


@pytest.mark.parametrize("accumulate", [None, False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("batch", "width"), cases.SIZES)
def test_weighted_sum(
    backend: str, batch: int, width: int, dtype: torch.dtype, accumulate: bool | None
) -> None:
    grads = cases.gradients(batch, width, dtype)
    sums = cases.sum_dtype(dtype)
    factors = torch.linspace(-1, 2, batch, dtype=sums)
    start = torch.full((width,), 3.0 if accumulate else float("nan"), dtype=sums)
    if accumulate is None:
        total = clip.weighted_row_sum(grads, factors)
    else:
        out = start.clone()
        total = clip.weighted_row_sum(grads, factors, out=out, accumulate=accumulate)
        assert total is out
    assert isinstance(total, Tensor)
    cases.assert_sum(total, grads, factors, start if accumulate else None)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shared", [True, False])
def test_weighted_sum_of_a_list(backend: str, shared: bool, dtype: torch.dtype) -> None:
    grads = [cases.gradients(19, width, dtype) for width in (33, 0, 1, 257)]
    factors = torch.linspace(-1, 2, 4 * 19, dtype=cases.sum_dtype(dtype)).view(4, 19)
    totals = clip.weighted_row_sum(grads, factors[0] if shared else factors)
    for index, (total, g) in enumerate(zip(totals, grads, strict=True)):
        cases.assert_sum(total, g, factors[0 if shared else index])


@pytest.mark.parametrize("mode", clip.MODES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("batch", "width"), cases.SIZES)
def test_clipped_sum(
    backend: str, batch: int, width: int, dtype: torch.dtype, mode: clip.Mode
) -> None:
    grads = cases.gradients(batch, width, dtype)
    bound = cases.median_bound([grads])
    result = clip.clip_and_sum(grads, [bound] if mode == "per_layer" else bound, mode, gamma=GAMMA)
    check_clipped(result, [grads], [bound], mode)


@pytest.mark.parametrize("accumulate", [None, False, True])
@pytest.mark.parametrize("mode", clip.MODES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("widths", cases.WIDTHS)
def test_clipped_sum_of_a_list(
    backend: str,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    mode: clip.Mode,
    accumulate: bool | None,
) -> None:
    grads = [cases.gradients(21, width, dtype, seed) for seed, width in enumerate(widths)]
    if mode == "per_layer":
        bounds = [cases.median_bound([g]) for g in grads]
    else:
        bounds = [cases.median_bound(grads)]
    start = [
        torch.full((w,), -2.0 if accumulate else float("nan"), dtype=cases.sum_dtype(dtype))
        for w in widths
    ]
    out = None if accumulate is None else [s.clone() for s in start]
    max_norm = bounds if mode == "per_layer" else bounds[0]
    result = clip.clip_and_sum(
        grads, max_norm, mode, gamma=GAMMA, out=out, accumulate=bool(accumulate)
    )
    if out is not None:
        assert all(a is b for a, b in zip(result.sum, out, strict=True))
    check_clipped(result, grads, bounds, mode, start if accumulate else None)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_layouts(backend: str, layout: str, dtype: torch.dtype) -> None:
    grads = [cases.gradients(13, width, dtype) for width in (129, 1, 65)]
    laid_out = [cases.LAYOUTS[layout](g) for g in grads]
    before = [g.clone() for g in laid_out]
    bound = cases.median_bound(grads)
    check_norms(clip.row_sq_norms(laid_out), laid_out)
    result = clip.clip_and_sum(laid_out, bound, gamma=GAMMA)
    check_clipped(result, laid_out, [bound], "flat")
    totals = clip.weighted_row_sum(laid_out, result.factors)
    for total, g in zip(totals, laid_out, strict=True):
        cases.assert_sum(total, g, result.factors)
    assert all(torch.equal(a, b) for a, b in zip(laid_out, before, strict=True))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_expanded_gradients(backend: str, dtype: torch.dtype) -> None:
    row = cases.gradients(1, 67, dtype).expand(9, 67)
    column = cases.gradients(9, 1, dtype).expand(9, 67)
    for grads in (row, column):
        bound = cases.median_bound([grads]) / 2
        check_clipped(clip.clip_and_sum(grads, bound), [grads], [bound], "flat")


def test_factors_and_norms_may_be_strided(backend: str) -> None:
    grads = cases.gradients(11, 33, torch.float32)
    sq_norms = torch.full((11, 2), float("nan"), dtype=torch.float64)[:, 1]
    sq_norms.copy_(clip.row_sq_norms(grads))
    factors = torch.full((11, 3), float("nan"))[:, 1].copy_(clip.clip_factors(sq_norms, 1.0))
    assert torch.equal(factors, clip.clip_factors(sq_norms.contiguous(), 1.0))
    total = clip.weighted_row_sum(grads, factors)
    assert isinstance(total, Tensor)
    assert torch.equal(total, torch.as_tensor(clip.weighted_row_sum(grads, factors.contiguous())))


def test_gradients_may_require_grad_and_the_result_does_not(backend: str) -> None:
    grads = cases.gradients(5, 7, torch.float32)
    result = clip.clip_and_sum(grads.clone().requires_grad_(), 1.0)
    assert isinstance(result.sum, Tensor) and not result.sum.requires_grad
    check_clipped(result, [grads], [1.0], "flat")


@given(
    batch=st.integers(0, 40),
    widths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    dtype=st.sampled_from(cases.DTYPES),
    mode=st.sampled_from(clip.MODES),
    layout=st.sampled_from(sorted(cases.LAYOUTS)),
)
def test_any_shape(
    backend: str,
    batch: int,
    widths: list[int],
    dtype: torch.dtype,
    mode: clip.Mode,
    layout: str,
) -> None:
    grads = [cases.gradients(batch, width, dtype, seed) for seed, width in enumerate(widths)]
    bounds = [1.0 + index for index in range(len(grads) if mode == "per_layer" else 1)]
    grads = [cases.LAYOUTS[layout](g) for g in grads]
    max_norm = bounds if mode == "per_layer" else bounds[0]
    result = clip.clip_and_sum(grads, max_norm, mode, gamma=GAMMA)
    check_clipped(result, grads, bounds, mode)


@pytest.mark.parametrize(("batch", "width"), [(1, 3000), (2, 65), (7, 20011), (513, 130)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_any_number_of_threads(
    cpp: str, threads: int, batch: int, width: int, dtype: torch.dtype
) -> None:
    grads = [cases.gradients(batch, width, dtype), cases.gradients(batch, 9, dtype)]
    bound = cases.median_bound(grads)
    check_clipped(clip.clip_and_sum(grads, bound), grads, [bound], "flat")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_samples(backend: str, dtype: torch.dtype) -> None:
    batch = 2_000 if backend == "triton" else 100_000
    grads = cases.gradients(batch, 5, dtype)
    bound = cases.median_bound([grads])
    check_clipped(clip.clip_and_sum(grads, bound), [grads], [bound], "flat")


@pytest.mark.parametrize("cpp", CPP[-1:], indirect=True)
def test_more_than_2_to_the_31_elements(cpp: str) -> None:
    batch, width = 2049, 2**20 + 3
    # Pages that were never written share one page of zeros: 4.3 GB of addresses, little memory.
    zeros = np.zeros(batch * width, dtype=np.int16)
    grads = torch.from_numpy(zeros).view(torch.bfloat16).view(batch, width)
    assert grads.numel() > 2**31
    grads[0, 0], grads[1024, 5], grads[-1, -1], grads[-1, 0] = 1.0, 2.0, 3.0, 4.0
    result = clip.clip_and_sum(grads, 1.0)
    exact = torch.zeros(width, dtype=torch.float64)
    exact[0], exact[5], exact[-1] = 1.8, 1.0, 0.6
    assert isinstance(result.sum, Tensor)
    wanted = {0: 1.0, 1024: 4.0, batch - 1: 25.0}
    assert {int(i): result.sq_norms[i].item() for i in result.sq_norms.nonzero()} == wanted
    assert_as_accurate(result.sum, exact.float(), exact)


@pytest.mark.parametrize(
    "bound", [2, np.float32(2), torch.tensor(2.0)], ids=["int", "numpy", "0-d"]
)
def test_a_bound_may_be_any_number(backend: str, bound: object) -> None:
    grads = cases.gradients(5, 9, torch.float32)
    wanted = clip.clip_and_sum(grads, 2.0)
    assert torch.equal(clip.clip_and_sum(grads, bound).sum, wanted.sum)
