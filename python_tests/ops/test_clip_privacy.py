"""Privacy rules 3 and 4 for ``clip``: no norm is under-estimated, no non-finite sample counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops import clip
from python_tests.ops import clip_cases as cases

OPERATIONS = cases.OPERATIONS

# Factors are rounded towards zero, so all that is left is the rounding of the float64 norm.
SLACK = 1e-12

Factors = Callable[[Tensor, float], Tensor]


def clipped_norms(grads: list[Tensor], factors: Tensor) -> np.ndarray[tuple[int, ...], np.dtype]:
    """Return the norms of ``factors[b] * grads[b]`` in extended precision, ``[B]``."""
    weights = factors.double().numpy().astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(weights) * np.sqrt(sum(cases.exact_sq_norms(g) for g in grads)))


def assert_clipped(grads: list[Tensor], factors: Tensor, bound: float) -> None:
    """Assert that no sample's clipped contribution is longer than the bound."""
    norms = clipped_norms(grads, factors)
    assert np.isfinite(norms).all(), "a non-finite sample was not dropped"
    longest = norms.max() / bound
    assert longest <= 1 + SLACK, f"a clipped contribution is {longest} times the bound"


def assert_kept(grads: list[Tensor], factors: Tensor, bound: float) -> None:
    """Assert that samples are clipped no more than the rounding of the factor asks for."""
    info = torch.finfo(factors.dtype)
    exact = cases.exact_factors(grads, bound, "flat", 0.0)
    lowest = exact * (1 - 2 * info.eps) - info.tiny * info.eps
    assert (factors >= lowest).all(), f"factors {factors}, wanted {exact}"


def rows_at(values: list[float], width: int, dtype: torch.dtype) -> Tensor:
    """Return one row for each magnitude; magnitudes that ``dtype`` cannot hold are clamped."""
    generator = torch.Generator().manual_seed(width)
    shape = torch.rand(len(values), width, generator=generator, dtype=torch.float64) + 0.5
    largest = torch.finfo(dtype).max
    scaled = shape * torch.tensor(values, dtype=torch.float64).unsqueeze(1)
    return scaled.clamp(-largest, largest).to(dtype)


def magnitudes(dtype: torch.dtype) -> list[float]:
    """Return zero, denormals, tiny, ordinary and huge magnitudes for ``dtype``."""
    info = torch.finfo(dtype)
    denormals = [info.tiny / 2, info.tiny * info.eps, info.smallest_normal]
    # The square of what is above 1e150 overflows in float64: such rows are dropped, see below.
    return [0.0, *denormals, 1e-30, 1e-7, 1e-3, 1.0, 3.0, 1e4, 1e30, min(info.max / 4, 1e150)]


BOUNDS = [1e-42, 1e-30, 1e-6, 1.0, 1e6, 1e30]


@pytest.mark.parametrize("width", [1, 257])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_no_contribution_is_longer_than_the_bound(
    backend: str, dtype: torch.dtype, bound: float, width: int
) -> None:
    grads = rows_at(magnitudes(dtype), width, dtype)
    mixed = grads.clone()
    mixed[:, ::2] *= 1e-3
    if backend == "triton" and dtype == torch.bfloat16:
        # Triton's interpreter reads bfloat16 denormals as zero; a GPU shifts their bits, exactly.
        grads, mixed = (
            torch.where(g.abs() < torch.finfo(dtype).tiny, 0, g) for g in (grads, mixed)
        )
    for rows in (grads, mixed):
        flat = clip.clip_and_sum(rows, bound)
        assert_clipped([rows], flat.factors, bound)
        assert_kept([rows], flat.factors, bound)
        layers = clip.clip_and_sum([rows, mixed], [bound, bound / 3], "per_layer")
        assert_clipped([rows], layers.factors[0], bound)
        assert_clipped([mixed], layers.factors[1], bound / 3)
        for gamma in (0.01, 1e-30, 0.0):
            automatic = clip.clip_and_sum(rows, bound, "automatic", gamma=gamma)
            assert_clipped([rows], automatic.factors, bound)
    both = clip.clip_and_sum([grads, mixed], bound)
    assert_clipped([grads, mixed], both.factors, bound)


@pytest.mark.parametrize("gamma", [0.01, 0.0])
@pytest.mark.parametrize("mode", ["flat", "automatic"])
def test_float64_rows_whose_squares_underflow(backend: str, mode: clip.Mode, gamma: float) -> None:
    exponents = torch.arange(-170.0, -140.0, 0.25, dtype=torch.float64)
    grads = rows_at((10.0**exponents).tolist(), 3, torch.float64)
    for bound in (1.0, 1e-140, 1e-160):
        assert_clipped([grads], clip.clip_and_sum(grads, bound, mode, gamma=gamma).factors, bound)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_just_at_the_bound(backend: str, dtype: torch.dtype) -> None:
    grads = cases.gradients(40, 37, dtype)
    norms = np.sqrt(cases.exact_sq_norms(grads)).astype(np.float64)
    sq_norms = clip.row_sq_norms(grads).unsqueeze(1)
    for bounds in (norms, np.nextafter(norms, 0), np.nextafter(norms, np.inf)):
        # Each row is a layer of its own here, so that it has its own bound.
        factors = clip.clip_factors(sq_norms, bounds.tolist(), "per_layer")
        for row, factor, bound in zip(grads.split(1), factors, bounds.tolist(), strict=True):
            assert_clipped([row], factor, bound)
            assert_kept([row], factor, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_rows(backend: str, dtype: torch.dtype) -> None:
    width = 70_001 if backend == "triton" else 2**21 + 5
    # One large element, then many that float32 loses one by one against its square.
    grads = torch.full((2, width), 2.0**-6, dtype=dtype)
    grads[:, 0] = 100.0
    result = clip.clip_and_sum(grads, 1.0)
    assert_clipped([grads], result.factors, 1.0)
    assert_kept([grads], result.factors, 1.0)


def _float32_norm(grads: Tensor, bound: float) -> Tensor:
    return torch.clamp(bound / grads.float().square().sum(1).sqrt(), max=1)


def _fudge_term(grads: Tensor, bound: float) -> Tensor:
    norms = torch.linalg.vector_norm(grads, dim=1, dtype=torch.float64)
    return torch.clamp(bound / (norms + 1e-6), max=1).float()


def _sequential_float32(grads: Tensor, bound: float) -> Tensor:
    sq_norms = np.cumsum(grads.float().square().numpy(), axis=1, dtype=np.float32)[:, -1]
    return torch.clamp(bound / torch.from_numpy(sq_norms).sqrt(), max=1)


def _half_precision_norm(grads: Tensor, bound: float) -> Tensor:
    return torch.clamp(bound / grads.norm(dim=1), max=1).float()


def _ignored_bound(grads: Tensor, bound: float) -> Tensor:
    return torch.ones(grads.shape[0])


def _nan_survives(grads: Tensor, bound: float) -> Tensor:
    return torch.where(grads.double().norm(dim=1) > bound, 0.0, 1.0)


# Versions that libraries have shipped, with gradients on which each breaks the bound.
MUTANTS: dict[str, tuple[Factors, Callable[[], Tensor], float]] = {
    "underflow": (_float32_norm, lambda: torch.full((3, 5), 1e-30), 1e-31),
    "fudge term": (_fudge_term, lambda: cases.gradients(99, 64, torch.float32), 1e-3),
    "float32 loop": (
        _sequential_float32,
        lambda: torch.cat((torch.full((2, 1), 100.0), torch.full((2, 10**6), 2.0**-6)), 1),
        1.0,
    ),
    "half norm": (_half_precision_norm, lambda: cases.gradients(9, 65, torch.bfloat16), 1.0),
    "ignored bound": (_ignored_bound, lambda: cases.gradients(9, 65, torch.float32), 1.0),
    "nan survives": (_nan_survives, lambda: torch.full((1, 3), float("nan")), 1.0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_rejects_broken_clipping(name: str) -> None:
    factors, grads, bound = MUTANTS[name]
    with pytest.raises(AssertionError, match=r"times the bound|not dropped"):
        assert_clipped([grads()], factors(grads(), bound), bound)


def test_the_check_rejects_a_norm_that_overflows() -> None:
    grads = torch.full((3, 5), 1e30)
    assert_kept([grads], clip.clip_and_sum(grads, 1.0).factors, 1.0)
    with pytest.raises(AssertionError, match="wanted"):
        assert_kept([grads], _float32_norm(grads, 1.0), 1.0)


@pytest.mark.parametrize("mode", clip.MODES)
@given(
    batch=st.integers(1, 9),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    dtype=st.sampled_from(cases.DTYPES),
    bound=st.sampled_from([1e-30, 1e-3, 1.0, 1e3]),
    exponent=st.integers(-30, 30),
    data=st.data(),
)
def test_one_sample_changes_the_sum_by_at_most_the_sensitivity(
    backend: str,
    batch: int,
    widths: list[int],
    dtype: torch.dtype,
    mode: clip.Mode,
    bound: float,
    exponent: int,
    data: st.DataObject,
) -> None:
    largest = torch.finfo(dtype).max
    grads = [
        (cases.gradients(batch, width, torch.float64, seed) * 10.0**exponent)
        .clamp(-largest, largest)
        .to(dtype)
        for seed, width in enumerate(widths)
    ]
    left_out = data.draw(st.integers(0, batch - 1))
    others = [torch.cat((g[:left_out], g[left_out + 1 :])) for g in grads]
    max_norm = [bound * (1 + i) for i in range(len(widths))] if mode == "per_layer" else bound
    change = math.hypot(
        *(
            (a.double() - b.double()).norm().item()
            for a, b in zip(
                clip.clip_and_sum(grads, max_norm, mode).sum,
                clip.clip_and_sum(others, max_norm, mode).sum,
                strict=True,
            )
        )
    )
    limit = clip.sensitivity(max_norm, mode)
    # A sum of B products in any order errs by (B + 1) u sum |c_b g_b|, which is at most B C long,
    # and by one denormal for each product that underflows.
    info = torch.finfo(cases.sum_dtype(dtype))
    rounding = (batch + 1) * info.eps * batch * limit
    underflow = batch * math.sqrt(sum(widths)) * info.tiny * info.eps
    assert change <= limit * (1 + 1e-6) + 2 * (rounding + underflow)


def test_the_sensitivity_is_attained_in_every_mode(backend: str) -> None:
    long = [torch.full((1, 4), 100.0), torch.full((1, 9), -100.0)]
    for mode in clip.MODES:
        max_norm = [1.5, 2.0] if mode == "per_layer" else 2.0
        total = clip.clip_and_sum(long, max_norm, mode, gamma=0.0).sum
        length = math.hypot(*(t.double().norm().item() for t in total))
        assert length == pytest.approx(clip.sensitivity(max_norm, mode), rel=1e-6)
    # Noise scaled for one flat bound would be too small for two layers by the root of two.
    assert clip.sensitivity([3.0, 4.0], "per_layer") == 5.0


def test_the_bound_is_used(backend: str) -> None:
    grads = cases.gradients(6, 50, torch.float32)
    small, large = (clip.clip_and_sum(grads, bound) for bound in (0.1, 0.2))
    assert torch.equal(small.sq_norms, large.sq_norms)
    assert (small.factors < large.factors).all()
    for result in (small, large):
        assert isinstance(result.sum, Tensor)
        cases.assert_sum(result.sum, grads, result.factors)


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("position", [(0, 0), (0, -1), (3, 40), (-1, 0), (-1, -1)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_non_finite_sample_contributes_zero_and_is_counted(
    backend: str, dtype: torch.dtype, position: tuple[int, int], bad: float
) -> None:
    row, column = position
    poisoned = [cases.gradients(7, 81, dtype), cases.gradients(7, 6, dtype, seed=1)]
    without = [g.clone() for g in poisoned]
    poisoned[0][row, column] = bad
    for g in without:
        g[row] = 0
    for mode in ("flat", "automatic"):
        result = clip.clip_and_sum(poisoned, 1.0, mode)
        assert result.nonfinite().item() == 1
        assert result.factors[row] == 0
        for total, g in zip(result.sum, without, strict=True):
            cases.assert_sum(total, g, result.factors)
    # A NaN in one layer drops the sample from all of them.
    layers = clip.clip_and_sum(poisoned, [1.0, 1.0], "per_layer")
    assert layers.nonfinite().item() == 1
    assert layers.factors[:, row].tolist() == [0, 0]
    sq_norms = clip.row_sq_norms(poisoned, per_tensor=True)
    alone = clip.clip_factors(sq_norms, [1.0, 1.0], "per_layer", dtype=layers.factors.dtype)
    assert torch.equal(alone, layers.factors)
    for layer in (0, 1):
        cases.assert_sum(layers.sum[layer], without[layer], layers.factors[layer])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (1, 65), (5, 1), (9, 1025)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_non_finite_samples_alone_add_up_to_zero(
    backend: str, dtype: torch.dtype, batch: int, width: int, bad: float
) -> None:
    grads = torch.full((batch, width), bad, dtype=dtype)
    result = clip.clip_and_sum(grads, 1.0)
    assert isinstance(result.sum, Tensor)
    assert torch.equal(result.sum, torch.zeros_like(result.sum))
    assert result.nonfinite().item() == batch
    out = torch.full_like(result.sum, 0.1)
    before = out.clone()
    clip.clip_and_sum(grads, 1.0, "automatic", out=out, accumulate=True)
    assert torch.equal(out, before)


def test_float64_rows_whose_norm_overflows_are_dropped_and_counted(backend: str) -> None:
    grads = torch.tensor([[1e200, 1e200], [3.0, 4.0]], dtype=torch.float64)
    result = clip.clip_and_sum(grads, 5.0)
    assert result.nonfinite().item() == 1
    assert torch.equal(torch.as_tensor(result.sum), grads[1])
