"""Convolution: clipped gradients stay below the bound; what is not finite contributes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkernels.ops.clip import clip_factors
from dpkernels.ops.ghost import conv_clip_and_sum, conv_norms
from python_tests.ops import ghost_cases as cases
from python_tests.tolerance import assert_never_low

OPERATIONS = ("ghost_conv_norms", "row_sq_norms", "weighted_row_sum_", "clip_factors")

FORMULAS = ["gram", "materialised"]
SIZE = (1, 3, 6, 6)


def alternating(scale: float) -> tuple[Tensor, Tensor]:
    """Errors that change sign from position to position, so that the terms all but cancel."""
    torch.manual_seed(5)
    x = 1 + scale * torch.randn(2, 3, 6, 6)
    signs = 1 - 2 * (torch.arange(36) % 2).view(6, 6)
    errors = torch.rand(2, 2, 1, 1) * signs * (1 + scale * torch.randn(2, 2, 6, 6))
    return x, errors


def awkward_samples(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and errors of a 3 x 3 convolution with padding 1, by what is awkward about them."""
    torch.manual_seed(4)
    x, errors = torch.randn(2, 3, 6, 6), torch.randn(2, 2, 6, 6)
    tiny = {torch.float16: 1e-7, torch.bfloat16: 1e-39}.get(dtype, 1e-42)
    found = {
        "usual": (x, errors),
        "zeros": (0 * x, errors),
        "denormals": (tiny * x.sign(), errors),
        "equal terms": (torch.full_like(x, 1 / 3), torch.full_like(errors, 1 / 7)),
        "cancelling": alternating(1e-4),
        "cancelling further": alternating(1e-6),
        "one sign": (x.abs(), errors.abs()),
    }
    if dtype != torch.float16:
        found["tiny"] = (1e-30 * x, 1e-30 * errors)
        found["huge and tiny"] = (1e30 * x, 1e-25 * errors)
        found["huge"] = (1e30 * x, 1e5 * errors)
    return {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in found.items()}


def exact_norms(x: Tensor, errors: Tensor) -> Tensor:
    module = nn.Conv2d(x.shape[1], errors.shape[1], 3, padding=1)
    return cases.sq_norms(cases.autograd_loop(module, x.double(), errors)).sqrt()


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_no_clipped_gradient_exceeds_the_bound(
    backend: str, formula: str, dtype: torch.dtype
) -> None:
    for name, (x, errors) in awkward_samples(dtype).items():
        if backend == "triton" and name not in ("cancelling", "cancelling further", "huge"):
            continue
        norms = conv_norms(x, errors, kernel_size=3, padding=1, formula=formula)
        exact = exact_norms(x, errors)
        for bound in (exact.max().item() / 3, 1.0, 1e-20):
            if bound == 0:
                continue
            factors = clip_factors(norms.sq_norms, bound, dtype=cases.sum_dtype(dtype))
            clipped = factors.double() * exact
            assert (clipped <= bound * cases.BOUND_SLACK).all(), f"{name}: {clipped} > {bound}"
            # Not by dropping everything: only factors that no float can hold are zero.
            assert ((factors > 0) | (bound < 1e-38 * exact)).all(), name


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_long_sums_of_equal_terms_do_not_lose_the_norm(
    cpp: str, value: float, formula: str
) -> None:
    # Float additions of equal terms all round the same way. 5,041 positions, 900 channels.
    for shape in ((1, 1, 71, 71), (1, 900, 2, 2)):
        x = torch.full(shape, value)
        errors = torch.full((1, 2, *shape[2:]), 1 / value)
        if formula == "gram" and shape[1] == 1:
            x, errors = x[..., :30], errors[..., :30]
        norms = conv_norms(x, errors, kernel_size=3, padding=1, formula=formula)
        exact = exact_norms(x, errors)
        factors = clip_factors(norms.sq_norms, 1.0)
        assert (factors.double() * exact <= cases.BOUND_SLACK).all()
        terms = exact  # all of one sign: nothing cancels
        positions = errors[0, 0].numel()
        assert_never_low(norms.sq_norms, exact.square(), positions, terms, torch.float32)


@pytest.mark.parametrize("scale", [1e-4, 1e-6])
@pytest.mark.parametrize("formula", FORMULAS)
def test_norms_of_gradients_that_cancel_are_right(backend: str, formula: str, scale: float) -> None:
    x, errors = alternating(scale)
    arguments = {"kernel_size": 3, "bias": False}
    errors = errors[..., 1:-1, 1:-1]
    norms = conv_norms(x, errors, **arguments, formula=formula)
    module = nn.Conv2d(3, 2, 3, bias=False)
    exact = cases.sq_norms(cases.autograd_loop(module, x.double(), errors))
    terms = 9 * x.double().square().sum((1, 2, 3)) * errors.double().square().sum((1, 2, 3))
    # This far apart float32 products have no digit left, so this cannot pass by luck.
    assert (exact < 1e-6 * terms).all()
    assert_never_low(norms.sq_norms, exact, errors[0, 0].numel(), terms.sqrt(), torch.float32)


@pytest.mark.parametrize("formula", ["gram", "materialised", "rank_one"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_contributes_nothing(
    backend: str, formula: str, bad: float
) -> None:
    torch.manual_seed(6)
    size = (2, 2) if formula == "rank_one" else (5, 5)
    x = torch.randn(4, 3, *size)
    errors = torch.randn(4, 2, size[0] - 1, size[1] - 1)
    spoilt_x, spoilt_errors = x.clone(), errors.clone()
    spoilt_x[1, 2, 0, 1] = bad
    spoilt_errors[3, 0, -1, 0] = bad
    finite = torch.tensor([True, False, True, False])
    result = conv_clip_and_sum(spoilt_x, spoilt_errors, 1.0, kernel_size=2, formula=formula)
    assert torch.equal(result.sq_norms.isfinite() & (result.sq_norms >= 0), finite)
    assert torch.equal(result.factors > 0, finite)
    alone = conv_clip_and_sum(x[finite], errors[finite], 1.0, kernel_size=2, formula=formula)
    assert torch.equal(result.sq_norms[finite], alone.sq_norms)
    assert result.bias is not None and alone.bias is not None
    torch.testing.assert_close(result.weight, alone.weight)
    torch.testing.assert_close(result.bias, alone.bias)


def test_a_pixel_that_nothing_meets_counts_too(backend: str) -> None:
    x, errors = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 2, 2)
    x[0, 0, 1, 3] = float("nan")
    for formula in FORMULAS:
        norms = conv_norms(x, errors, kernel_size=1, stride=2, formula=formula)
        assert norms.sq_norms.isfinite().tolist() == [False, True]
    one = errors[..., :1, :1]
    single = conv_norms(x[:, :, 1:, 2:], one, kernel_size=1, stride=3, formula="rank_one")
    assert single.sq_norms.isfinite().tolist() == [False, True]


def test_a_zero_factor_leaves_any_sample_out(backend: str) -> None:
    x, errors = torch.randn(2, 3, 5, 5), torch.randn(2, 2, 4, 4)
    x[0, 0, 0, 0] = float("nan")
    for formula in FORMULAS:
        weight, bias = conv_norms(x, errors, kernel_size=2, formula=formula).weighted_sum(
            torch.tensor([0.0, 0.0])
        )
        assert bias is not None and not weight.any() and not bias.any()
