"""Privacy rules 3 and 4 for linear layers: no norm comes out low, no non-finite sample counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dpkernels.ops import clip, ghost
from python_tests.ops import ghost_linear_cases as cases
from python_tests.tolerance import assert_never_low, assert_within_rounding

OPERATIONS = cases.OPERATIONS
SLACK = 1e-6
BAD = [float("nan"), float("inf"), float("-inf")]


def summed_squares(norms: ghost.LinearNorms, a: Tensor, d: Tensor) -> np.ndarray:
    """Return the squared norms of what the weighted sum adds up, in extended precision.

    Those are the stored gradients, whatever rounding made of them; else what a and d say.
    """
    truth = cases.exact(a, d)
    parts = [truth.weight, truth.bias] if norms.bias else [truth.weight]
    if norms.stored:
        parts = [g.double().numpy().astype(np.longdouble) for g in norms.saved]
    return sum((g.reshape(len(g), -1) ** 2).sum(1) for g in parts)


def assert_clipped(a: Tensor, d: Tensor, bound: float, formula: str, bias: bool = True) -> Tensor:
    """Assert that no sample's clipped gradient is longer than the bound; return the factors."""
    result = ghost.linear_clip_and_sum(a, d, bound, formula=formula, bias=bias)
    norms = ghost.linear_norms(a, d, formula=formula, bias=bias)
    lengths = result.factors.double().numpy() * np.sqrt(summed_squares(norms, a, d))
    assert (lengths <= bound * (1 + SLACK)).all(), lengths / bound
    assert result.weight.isfinite().all()
    return result.factors


def assert_same_sums(found: ghost.LayerSum, wanted: ghost.LayerSum, a: Tensor, d: Tensor) -> None:
    """Assert that the sums are equal but for rounding, for samples with such vectors."""
    magnitude = cases.magnitude(a, d, wanted.factors)
    # Roundings of a sum over all positions, and of both transforms before it.
    terms = a[..., 0].numel() + 2 * (a.shape[-1] + d.shape[-1])
    assert found.bias is not None and wanted.bias is not None
    assert_within_rounding(found.weight, wanted.weight, terms, magnitude[:, :-1])
    assert_within_rounding(found.bias, wanted.bias, terms, magnitude[:, -1])


def scaled(shape: tuple[int, ...], dtype: torch.dtype, a_scale: float, d_scale: float):
    a, d = cases.inputs(shape, 37, 5, torch.float64)
    largest = torch.finfo(dtype).max
    return [(x * s).clamp(-largest, largest).to(dtype) for x, s in ((a, a_scale), (d, d_scale))]


SCALES = [
    (0.0, 1.0),
    (1e-42, 1.0),
    (1e-30, 1.0),
    (1e-30, 1e30),
    (1e-23, 1e15),
    (1e30, 1e-30),
    (1e30, 1.0),
    (1e18, 1e18),
    (1e4, 1e-3),
]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("bound", [1e-12, 1.0, 1e6])
def test_no_contribution_is_longer_than_the_bound(
    cpp: str, scales: tuple[float, float], bound: float
) -> None:
    for dtype in cases.DTYPES:
        for shape in ((4,), (4, 35)):
            a, d = scaled(shape, dtype, *scales)
            for formula in ("auto", *cases.FORMULAS):
                assert_clipped(a, d, bound, formula, bias=False)
                assert_clipped(a, d, bound, formula)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("scales", [(0.0, 1.0), (1e-30, 1e30), (1e-23, 1e15), (1e4, 1e-3)])
def test_no_contribution_is_longer_than_the_bound_on_any_backend(
    backend: str, scales: tuple[float, float]
) -> None:
    a, d = scaled((3, 4), torch.float32, *scales)
    for formula in cases.FORMULAS:
        assert_clipped(a, d, 1e-12, formula, bias=False)


def test_samples_within_the_bound_are_not_clipped(backend: str) -> None:
    a, d = cases.inputs((3, 4), 6, 5, torch.float32)
    longest = cases.exact(a, d).sq_norms(True).max().sqrt().item()
    for formula in cases.FORMULAS:
        factors = assert_clipped(a, d, longest * (1 + 1e-5), formula)
        assert torch.equal(factors, torch.ones(3))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.1])
@pytest.mark.parametrize("formula", cases.FORMULAS)
def test_long_sums_of_one_number(cpp: str, formula: str, value: float) -> None:
    # In float32 every addition of the same number rounds the same way.
    a, d = torch.full((2, 70, 1500), value), torch.full((2, 70, 9), 1 - value / 3)
    assert_clipped(a, d, 1.0, formula, bias=False)


@pytest.mark.parametrize("part", [1.0, 1e-1, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("formula", cases.FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_cancel_over_the_positions(
    backend: str, formula: str, part: float, dtype: torch.dtype
) -> None:
    # Errors alternate and activations hardly change, so `part` of a term is left of the gradient.
    a, d = cases.inputs((2, 1), 40, 6, torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(6)[:, None]
    noise = torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, d = (a + part * noise).to(dtype), (d * signs).to(dtype)
    norms = ghost.linear_norms(a, d, bias=False, formula=formula)
    truth = torch.from_numpy(np.float64(summed_squares(norms, a, d)))
    terms = (a.double().square().sum(2) * d.double().square().sum(2)).sqrt().sum(1)
    assert_never_low(norms.sq_norms, truth, a.shape[1], terms, dtype)
    # What is summed is the gradient, but for what rounding makes of the terms.
    exact = cases.exact(a, d).sq_norms(False)
    assert ((truth.sqrt() - exact.sqrt()).abs() <= SLACK * terms).all()
    assert_clipped(a, d, truth.min().sqrt().item() / 2, formula, bias=False)


@pytest.mark.parametrize("formula", cases.FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_vanish_have_no_negative_norm(
    backend: str, formula: str, dtype: torch.dtype
) -> None:
    a, d = cases.inputs((3, 1), 40, 6, dtype)
    a, d = torch.cat([a, a], 1), torch.cat([d, -d], 1)
    norms = ghost.linear_norms(a, d, formula=formula)
    assert (norms.sq_norms >= 0).all()
    terms = (a.double().square().sum(2) * d.double().square().sum(2)).sqrt().sum(1)
    assert (norms.sq_norms.sqrt() <= 1e-6 * terms).all()
    # What rounding leaves of a zero is clipped, too.
    assert_clipped(a, d, 1e-3, formula)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("where", "bad"), [("activations", BAD[0]), ("errors", BAD[1])])
@pytest.mark.parametrize("shape", [(5,), (5, 4)])
def test_a_non_finite_sample_contributes_zero(
    backend: str, shape: tuple[int, ...], where: str, bad: float
) -> None:
    a, d = cases.inputs(shape, 6, 3, torch.float32)
    others = a[[0, 1, 3, 4]], d[[0, 1, 3, 4]]
    (a if where == "activations" else d)[2].view(-1)[-1] = bad
    # Nothing may hide an infinity: not even zeros on the other side.
    (d if where == "activations" else a)[2] = 0
    for formula in ("auto", *cases.FORMULAS):
        result = ghost.linear_clip_and_sum(a, d, 1.0, formula=formula)
        assert not clip.reference.valid(result.sq_norms)[2] and result.factors[2] == 0
        assert clip.reference.valid(result.sq_norms).sum() == 4
        wanted = ghost.linear_clip_and_sum(*others, 1.0, formula=formula)
        assert_same_sums(result, wanted, *others)


@pytest.mark.parametrize("right", [None, "full", "diagonal", "low_rank"])
def test_a_non_finite_sample_is_dropped_behind_factors(cpp: str, right: str | None) -> None:
    a, d = cases.inputs((5, 2), 6, 3, torch.float32)
    sides = {"left": cases.factor("full", 3, torch.float32)}
    sides["right"] = cases.factor(right, 6, torch.float32)
    others = a[[0, 1, 2, 4]], d[[0, 1, 2, 4]]
    wanted = ghost.linear_clip_and_sum(*others, 1.0, **sides)
    a[3, 1, 2] = float("nan")
    result = ghost.linear_clip_and_sum(a, d, 1.0, **sides)
    assert result.factors[3] == 0
    x, y = others
    if sides["right"] is not None:
        x = x.abs() @ cases.absolute(sides["right"])
    assert_same_sums(result, wanted, x, y.abs() @ cases.absolute(sides["left"]))


def test_non_finite_samples_alone_add_up_to_zero(backend: str) -> None:
    a, d = torch.full((3, 2, 5), float("nan")), torch.ones(3, 2, 4)
    out, bias_out = torch.full((4, 5), 0.1), torch.full((4,), 0.1)
    for formula in cases.FORMULAS:
        result = ghost.linear_clip_and_sum(a, d, 1.0, formula=formula)
        assert not result.weight.any() and result.bias is not None and not result.bias.any()
        ghost.linear_clip_and_sum(
            a, d, 1.0, formula=formula, out=out, bias_out=bias_out, accumulate=True
        )
    assert torch.equal(out, torch.full((4, 5), 0.1)) and torch.equal(bias_out, out[:, 0])


def test_the_norm_with_factors_is_of_what_is_summed(cpp: str) -> None:
    # Rank one: norms come from the very vectors that are summed, whatever the transform rounds.
    a, d = cases.inputs((7,), 30, 20, torch.float32)
    sides = {
        name: cases.factor("full", n, torch.float32) for name, n in (("left", 20), ("right", 30))
    }
    norms = ghost.linear_norms(a, d, bias=False, **sides)
    for index in range(7):
        alone = torch.zeros(7)
        alone[index] = 1.0
        weight, _ = norms.weighted_sum(alone)
        length = weight.double().norm().item()
        assert length == pytest.approx(norms.sq_norms[index].sqrt().item(), rel=1e-7)
