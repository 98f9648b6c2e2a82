"""Norms and sums of linear layers against autograd and extended precision, on every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.ops import clip, ghost
from python_tests.conftest import CPP, running_on
from python_tests.ops import ghost_linear_cases as cases
from python_tests.ops.clip_cases import LAYOUTS
from python_tests.tolerance import assert_as_accurate, assert_within_rounding

OPERATIONS = cases.OPERATIONS

# Positions (with B), I, O: none, odd, one over a tile or a chain of products. Enough samples that
# the largest error of plain PyTorch says something.
SMALL = [
    ((0, 3), 4, 5),
    ((3, 0), 4, 5),
    ((2, 3), 5, 0),
    ((2, 3), 0, 5),
    ((64,), 7, 3),
    ((9, 33), 17, 9),
    ((64, 2, 3), 33, 34),
]
# For the interpreter, which takes milliseconds for every block of every sample: one over a block.
INTERPRETED = [((16,), 7, 3), ((16, 33), 3, 2), ((16, 2), 33, 3), ((16, 2), 2, 34)]
# One over every block of the CPU kernels.
LARGE = [((11, 65), 257, 33), ((8, 170), 17, 85), ((8, 300), 130, 19)]


def captured(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return activations, errors, and each sample's gradients of weight and bias by autograd."""
    gradients = []
    errors = []
    for sample in x:
        y = layer(sample.unsqueeze(0))
        y.retain_grad()
        loss = (y.sin() * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
        layer.zero_grad()
        loss.backward()
        gradients.append((layer.weight.grad.clone(), layer.bias.grad.clone()))
        errors.append(y.grad[0])
    return x, torch.stack(errors), gradients


@pytest.mark.parametrize("shape", [(4,), (4, 6), (3, 2, 5), (2, 2, 3, 2)])
def test_norms_and_sums_are_those_of_autograd(backend: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    layer = nn.Linear(7, 5).double()
    a, d, gradients = captured(layer, torch.randn(*shape, 7, dtype=torch.float64))
    stacked = [torch.stack(g) for g in zip(*gradients, strict=True)]
    squares = [g.square().flatten(1).sum(1) for g in stacked]
    factors = torch.linspace(0.1, 1, shape[0], dtype=torch.float64)
    for formula in ("auto", *cases.FORMULAS):
        for bias in (True, False):
            norms = ghost.linear_norms(a, d, bias=bias, formula=formula)
            wanted = squares[0] + squares[1] if bias else squares[0]
            torch.testing.assert_close(norms.sq_norms, wanted, rtol=1e-12, atol=0)
            weight, total = norms.weighted_sum(factors)
            torch.testing.assert_close(weight, torch.tensordot(factors, stacked[0], 1))
            if bias:
                torch.testing.assert_close(total, torch.tensordot(factors, stacked[1], 1))
            else:
                assert total is None


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("shape", "features", "outputs"), SMALL)
@pytest.mark.parametrize("backend", ["reference", *CPP], indirect=True)
def test_small_sizes(
    backend: str, shape: tuple[int, ...], features: int, outputs: int, dtype: torch.dtype
) -> None:
    a, d = cases.inputs(shape, features, outputs, dtype)
    for formula in ("auto", *cases.FORMULAS):
        cases.check(a, d, formula=formula)
    cases.check(a, d, bias=False)


@pytest.mark.parametrize(("shape", "features", "outputs"), [*SMALL[:4], *INTERPRETED])
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_small_sizes_on_triton(
    backend: str, shape: tuple[int, ...], features: int, outputs: int
) -> None:
    a, d = cases.inputs(shape, features, outputs, torch.float32)
    for formula in cases.FORMULAS:
        cases.check(a, d, formula=formula)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_other_dtypes_on_triton(backend: str, dtype: torch.dtype) -> None:
    a, d = cases.inputs((16, 3), 5, 4, dtype)
    for formula in cases.FORMULAS:
        cases.check(a, d, formula=formula)


def test_a_bias_without_inputs_over_a_block_of_outputs_on_triton() -> None:
    with running_on("triton", OPERATIONS):
        a, d = cases.inputs((3, 2), 0, 35, torch.float32)
        cases.check(a, d, formula="gram")


def test_single_samples_of_a_single_number(backend: str) -> None:
    pairs = [cases.inputs((1, 1), 1, 1, torch.float32, seed) for seed in range(12)]
    # The gradient of one number is stored.
    for formula in ("rank_one", "materialised"):
        found = torch.cat([ghost.linear_norms(a, d, formula=formula).sq_norms for a, d in pairs])
        a, d = (torch.cat(x) for x in zip(*pairs, strict=True))
        plain = cases.plain_sq_norms(a, d, formula, bias=True)
        assert_as_accurate(found, plain, cases.exact(a, d).sq_norms(bias=True))
    for a, d in pairs:
        cases.check_never_low(ghost.linear_norms(a, d, formula="gram"), apart=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "features", "outputs"), LARGE)
def test_sizes_beyond_every_block(
    cpp: str, shape: tuple[int, ...], features: int, outputs: int, dtype: torch.dtype
) -> None:
    a, d = cases.inputs(shape, features, outputs, dtype)
    for formula in cases.FORMULAS:
        assert cases.check(a, d, formula=formula).formula == formula


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("formula", cases.FORMULAS)
def test_any_number_of_threads(formula: str, count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        # Few samples are cut into blocks, many are dealt out whole.
        for batch in (1, 11):
            a, d = cases.inputs((batch, 140), 90, 180, torch.float32)
            cases.check(a, d, formula=formula)
    finally:
        torch.set_num_threads(before)


def check_factors(
    left: str | None, right: str | None, shape: tuple[int, ...], homogeneous: bool
) -> None:
    """Assert that every formula is right with such factors."""
    features, outputs = 9, 6
    for dtype in (torch.float32, torch.float64):
        a, d = cases.inputs(shape, features, outputs, dtype)
        sides = {
            "left": cases.factor(left, outputs, dtype),
            "right": cases.factor(right, features + homogeneous, dtype),
        }
        for formula in ("auto", *cases.FORMULAS):
            cases.check(a, d, formula=formula, **sides)
        if not homogeneous:
            cases.check(a, d, bias=False, **sides)


KINDS = [("full", "full"), ("diagonal", "low_rank"), ("low_rank", "diagonal"), (None, "full")]


@pytest.mark.parametrize(("left", "right"), KINDS)
@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize("shape", [(400,), (64, 3), (64, 40)])
@pytest.mark.parametrize("backend", ["reference", *CPP], indirect=True)
def test_factors(
    backend: str, left: str | None, right: str, homogeneous: bool, shape: tuple[int, ...]
) -> None:
    check_factors(left, right, shape, homogeneous)


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_full_factors_on_triton(backend: str, homogeneous: bool) -> None:
    check_factors("full", "full", (40, 2), homogeneous)


def test_half_precision_is_widened_before_it_is_transformed(cpp: str) -> None:
    a, d = cases.inputs((16, 3), 9, 6, torch.bfloat16)
    right = cases.factor("full", 10, torch.float32)
    for formula in ("auto", *cases.FORMULAS):
        assert cases.check(a, d, right=right, formula=formula).saved[0].dtype == torch.float32


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_layouts(backend: str, layout: str) -> None:
    a, d = cases.inputs((6,), 13, 11, torch.float32)
    cases.check(LAYOUTS[layout](a), LAYOUTS[layout](d))
    a, d = cases.inputs((3 * 5,), 13, 11, torch.float32)
    a, d = (LAYOUTS[layout](x).unflatten(0, (3, 5)) for x in (a, d))
    for formula in cases.FORMULAS:
        cases.check(a, d, formula=formula)
    # Positions before samples, as recurrent layers have them.
    for formula in cases.FORMULAS:
        cases.check(a.transpose(0, 1), d.transpose(0, 1), formula=formula)


def test_expanded_inputs(backend: str) -> None:
    a, d = cases.inputs((3, 1), 5, 4, torch.float32)
    for formula in cases.FORMULAS:
        cases.check(a.expand(3, 6, 5), d.expand(3, 6, 4), formula=formula)
    cases.check(a[:1].expand(3, 1, 5), d)


@pytest.mark.parametrize("backend", ["reference", *CPP], indirect=True)
@given(st.data())
def test_all_formulas_agree_on_any_shape(backend: str, data: st.DataObject) -> None:
    size = st.integers(1, 40)
    batch, positions, features, outputs = (data.draw(size) for _ in range(4))
    a, d = cases.inputs((batch, positions), features, outputs, torch.float64, seed=positions)
    names = [*cases.FORMULAS, *(["rank_one"] if positions == 1 else [])]
    found = [ghost.linear_norms(a, d, formula=name) for name in names]
    factors = torch.rand(batch, dtype=torch.float64)
    sums = [norms.weighted_sum(factors) for norms in found]
    magnitude = cases.magnitude(a, d, factors)
    for norms, (weight, bias) in zip(found[1:], sums[1:], strict=True):
        torch.testing.assert_close(norms.sq_norms, found[0].sq_norms, rtol=1e-10, atol=0)
        assert bias is not None and sums[0][1] is not None
        terms = batch * positions + 1
        assert_within_rounding(weight, sums[0][0], terms, magnitude[:, :-1])
        assert_within_rounding(bias, sums[0][1], terms, magnitude[:, -1])


@pytest.mark.parametrize("shape", [(6,), (6, 9)])
def test_clip_and_sum_is_norms_factors_and_sum(backend: str, shape: tuple[int, ...]) -> None:
    a, d = cases.inputs(shape, 9, 7, torch.float32)
    bound = ghost.linear_norms(a, d).sq_norms.median().sqrt().item()
    result = ghost.linear_clip_and_sum(a, d, bound)
    truth = cases.exact(a, d)
    factors = clip.clip_factors(result.sq_norms, bound)
    assert torch.equal(result.factors, factors) and 0 < (factors < 1).sum() < 6
    x, y = cases.plain_vectors(a, d, None, None)
    scaled = (y * factors[:, None, None]).flatten(0, 1)
    weight, bias = truth.sums(factors)
    assert_as_accurate(result.weight, scaled.T @ x.flatten(0, 1), weight)
    assert result.bias is not None
    assert_as_accurate(result.bias, scaled.sum(0), bias)
    out, bias_out = torch.ones(7, 9), torch.ones(7)
    ghost.linear_clip_and_sum(a, d, bound, out=out, bias_out=bias_out, accumulate=True)
    terms, magnitude = a[..., 0].numel() + 2, cases.magnitude(a, d, factors) + 1
    assert_within_rounding(out, result.weight + 1, terms, magnitude[:, :-1])
    assert_within_rounding(bias_out, result.bias + 1, terms, magnitude[:, -1])
