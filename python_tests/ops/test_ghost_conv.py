"""Convolution: every option against autograd on single samples, on every backend and formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.ops.clip import clip_factors
from dpkernels.ops.factor import Diagonal, Factor, Full
from dpkernels.ops.ghost import ConvNorms, conv_clip_and_sum, conv_norms, conv_plan
from python_tests.ops import ghost_cases as cases
from python_tests.tolerance import assert_never_low

OPERATIONS = ("ghost_conv_norms", "row_sq_norms", "weighted_row_sum_", "clip_factors")

CLASSES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# Channels in and out, input size, and the layer's options.
LAYERS: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any]]] = {
    "padded": (3, 5, (6, 7), {"kernel_size": 3, "padding": 1}),
    "one channel": (1, 1, (4, 9), {"kernel_size": (2, 4)}),
    "pointwise": (5, 4, (3, 3), {"kernel_size": 1}),
    "strided": (2, 3, (9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "stride beyond the kernel": (2, 3, (9, 11), {"kernel_size": 2, "stride": (3, 4)}),
    "dilated": (2, 4, (10, 9), {"kernel_size": 3, "dilation": (2, 3), "padding": (2, 3)}),
    "all at once": (4, 6, (9, 11), {"kernel_size": (3, 2), "stride": (2, 3), "padding": (3, 1),
                                    "dilation": (1, 2), "groups": 2}),
    "no bias": (3, 2, (5, 5), {"kernel_size": 3, "bias": False}),
    "grouped": (6, 4, (5, 4), {"kernel_size": 3, "padding": 1, "groups": 2}),
    "depthwise": (4, 4, (5, 5), {"kernel_size": 3, "padding": 1, "groups": 4}),
    "depthwise times two": (3, 6, (6, 5), {"kernel_size": 2, "groups": 3, "bias": False}),
    "one position": (4, 7, (3, 2), {"kernel_size": (3, 2)}),
    "one position, grouped": (4, 6, (3,), {"kernel_size": 3, "groups": 2}),
    "one position, dilated": (2, 3, (5, 5), {"kernel_size": 2, "dilation": 4}),
    "mostly padding": (2, 3, (2, 2), {"kernel_size": 3, "padding": 2}),
    "1-D": (3, 4, (17,), {"kernel_size": 5, "padding": 2, "stride": 2}),
    "3-D": (2, 3, (4, 3, 5), {"kernel_size": (2, 3, 2), "padding": (1, 1, 0), "stride": (1, 1, 2)}),
    "over a block of positions": (1, 2, (35,), {"kernel_size": 3}),
}  # fmt: skip


def layer(name: str, batch: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return a module, its input and errors, and its options as ``conv_norms`` takes them.

    For float64, where the truth has no more digits, the values are small integers: every sum is
    exact, in any order.
    """
    channels, out_channels, size, options = LAYERS[name]
    torch.manual_seed(len(name))
    module = CLASSES[len(size)](channels, out_channels, **options)
    x = torch.randn(batch, channels, *size).to(dtype)
    errors = torch.randn_like(module(x.float())).to(dtype)
    if dtype == torch.float64:
        x, errors = (4 * x).round(), (4 * errors).round()
    return module, x, errors, options


def plain_sums(x: Tensor, errors: Tensor, factors: Tensor, module: nn.Module) -> list[Tensor]:
    """The weighted sums as PyTorch's own gradient of the whole batch, in the sums' dtype."""
    module, x = module.to(factors.dtype), x.to(factors.dtype)
    weighted = errors.to(factors.dtype) * factors.view(-1, *[1] * (errors.dim() - 1))
    return list(torch.autograd.grad((module(x) * weighted).sum(), list(module.parameters())))


def check_never_low(
    norms: ConvNorms, exact: list[Tensor], x: Tensor, errors: Tensor, gain: float
) -> None:
    """Assert the contract of norms; ``exact``: what is summed; ``gain``: of its right factor."""
    lengths = [v.double().flatten(1).norm(dim=1) for v in (x, errors)]
    positions, taps = errors[0, 0].numel(), exact[0][0, 0].numel()
    # A pixel is in at most as many patches as there are taps; the bias adds up all errors.
    terms = gain * (taps**0.5 * lengths[0] + positions**0.5) * lengths[1]
    assert_never_low(
        norms.sq_norms, cases.sq_norms(exact), positions, terms, x.dtype, positions + 2
    )


def check_summed(
    norms: ConvNorms,
    module: nn.Module,
    x: Tensor,
    errors: Tensor,
    left: Factor | None,
    right: Factor | None,
    homogeneous: bool,
) -> None:
    """Assert that norms are those of what is summed: from transformed errors, or as it is saved."""
    if norms.saved and norms.formula == "materialised":
        # A diagonal right factor goes onto the sum, others are on what is saved.
        shapes = [p.shape for p in module.parameters()]
        saved = [g.double().view(-1, *s) for g, s in zip(norms.saved, shapes, strict=False)]
        if isinstance(right, Diagonal) and norms._right is not None:
            exact = cases.precondition(saved, None, right, homogeneous)
            check_never_low(norms, exact, x, errors, right.values.abs().max().item())
        else:
            torch.testing.assert_close(norms.sq_norms, cases.sq_norms(saved), rtol=1e-12, atol=0)
        return
    raw = cases.autograd_loop(module, x.double(), norms._errors)
    exact = cases.precondition(raw, None, right, homogeneous)
    gain = 1.0 if right is None else right.dense().double().norm().item()
    check_never_low(norms, exact, x, norms._errors, gain)


def check(norms: ConvNorms, x: Tensor, errors: Tensor, module: nn.Module) -> None:
    """Assert that norms and sums are those of autograd, one sample at a time."""
    exact = cases.autograd_loop(module, x.double(), errors)
    dtype = cases.sum_dtype(x.dtype)
    if norms.formula == "rank_one":
        cases.check_norms(norms.sq_norms, exact, dtype)
    else:
        check_never_low(norms, exact, x, errors, 1.0)
    factors = 0.25 * torch.arange(1, len(x) + 1, dtype=dtype)
    plain = plain_sums(x, errors, factors, module)
    cases.check_sums(norms.weighted_sum(factors), exact, factors, plain)


def formulas(name: str) -> list[str]:
    return ["auto", "gram", "materialised"] + ["rank_one"] * name.startswith("one position")


# The interpreter takes seconds where the compiled kernels take none.
FOR_TRITON = ("all at once", "depthwise", "3-D", "1-D", "one position, dilated",
              "over a block of positions")  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_sums_are_those_of_autograd(backend: str, name: str) -> None:
    if backend == "triton" and name not in FOR_TRITON:
        pytest.skip("the interpreter gets a few layers that have every option")
    module, x, errors, options = layer(name, batch=2)
    for formula in formulas(name):
        norms = conv_norms(x, errors, **options, formula=formula)
        assert formula in ("auto", norms.formula)
        check(norms, x, errors, module)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["all at once", "one position, grouped"])
def test_other_dtypes(backend: str, name: str, dtype: torch.dtype) -> None:
    module, x, errors, options = layer(name, dtype=dtype)
    for formula in formulas(name):
        check(conv_norms(x, errors, **options, formula=formula), x, errors, module)


@pytest.mark.parametrize("formula", ["gram", "materialised"])
@pytest.mark.parametrize(
    ("channels", "out_channels", "size"),
    [(16, 32, (14, 14)), (33, 7, (5, 5)), (3, 64, (40, 30)), (70, 5, (4, 4)), (1, 3, (600,))],
)
def test_sizes_beyond_one_tile(
    cpp: str, formula: str, channels: int, out_channels: int, size: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    module = CLASSES[len(size)](channels, out_channels, 3, padding=1)
    x = torch.randn(3, channels, *size)
    errors = torch.randn(3, out_channels, *size)
    norms = conv_norms(x, errors, kernel_size=3, padding=1, formula=formula)
    check(norms, x, errors, module)


@given(
    channels=st.integers(1, 5),
    out_channels=st.integers(1, 7),
    groups=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    room=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    bias=st.booleans(),
    formula=st.sampled_from(["auto", "gram", "materialised"]),
)
def test_any_geometry(
    cpp: str,
    channels: int,
    out_channels: int,
    groups: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    room: tuple[int, int],
    bias: bool,
    formula: str,
) -> None:
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [max(1, s - 2 * p) + r for s, p, r in zip(spans, padding, room, strict=True)]
    options: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": bias,
    }
    module = nn.Conv2d(channels * groups, out_channels * groups, **options).double()
    # Small integers: every sum is exact.
    x = torch.randint(-4, 5, (2, channels * groups, *size)).double()
    errors = torch.randint_like(module(x), -4, 5)
    check(conv_norms(x, errors, **options, formula=formula), x, errors, module)


def plain_preconditioned(
    sums: list[Tensor], left: Factor | None, right: Factor | None, homogeneous: bool
) -> list[Tensor]:
    """Sums of weight and bias under dense factors, in their own dtype."""
    one = [s.unsqueeze(0) for s in sums]
    return [s.squeeze(0) for s in cases.precondition(one, left, right, homogeneous)]


@pytest.mark.parametrize("kind", ["full", "diagonal", "low_rank"])
@pytest.mark.parametrize("sides", ["left", "right", "both", "homogeneous"])
@pytest.mark.parametrize("name", ["padded", "one position"])
def test_factors(backend: str, name: str, sides: str, kind: str) -> None:
    if backend == "triton" and kind == "low_rank":
        pytest.skip("dense factors are applied outside of the kernels: one of them is enough here")
    module, x, errors, options = layer(name)
    columns = module.weight[0].numel() + (sides == "homogeneous")
    left = None if sides == "right" else cases.factors_of_size(module.out_channels)[kind]
    right = None if sides == "left" else cases.factors_of_size(columns)[kind]
    raw = cases.autograd_loop(module, x.double(), errors)
    exact = cases.precondition(raw, left, right, sides == "homogeneous")
    rough = cases.precondition([g.float() for g in raw], left, right, sides == "homogeneous")
    factors = torch.linspace(0.3, 1.7, len(x))
    sums = plain_sums(x, errors, factors, module)
    plain = plain_preconditioned(sums, left, right, sides == "homogeneous")
    wanted = ["auto", "materialised"] + ["gram"] * (right is None)
    for formula in wanted + ["rank_one"] * (name == "one position"):
        norms = conv_norms(x, errors, **options, left=left, right=right, formula=formula)
        if norms.formula == "rank_one":
            cases.check_norms(norms.sq_norms, exact, torch.float32, rough)
        else:
            check_summed(norms, module, x, errors, left, right, sides == "homogeneous")
        cases.check_sums(norms.weighted_sum(factors), exact, factors, plain)


def test_gradients_too_large_to_keep_are_computed_again(backend: str) -> None:
    torch.manual_seed(2)
    module, options = nn.Conv2d(4, 9, 3), {"kernel_size": 3}
    x, errors = torch.randn(3, 4, 4, 4), torch.randn(3, 9, 2, 2)
    small = conv_norms(torch.randn(3, 1, 9, 9), torch.randn(3, 2, 7, 7), kernel_size=3)
    for right in [None, *cases.factors_of_size(36).values()]:
        norms = conv_norms(x, errors, **options, right=right, formula="materialised")
        assert small.saved and not norms.saved
        raw = cases.autograd_loop(module, x.double(), errors)
        exact = cases.precondition(raw, None, right, False)
        check_summed(norms, module, x, errors, None, right, False)
        factors = torch.tensor([0.5, 0.0, 2.0])
        sums = plain_sums(x, errors, factors, module)
        plain = plain_preconditioned(sums, None, right, False)
        cases.check_sums(norms.weighted_sum(factors), exact, factors, plain)


@pytest.mark.parametrize("formula", ["gram", "materialised"])
def test_buffers_are_written_or_added_to(backend: str, formula: str) -> None:
    module, x, errors, options = layer("grouped")
    norms = conv_norms(x, errors, **options, formula=formula)
    factors = torch.tensor([0.5, 2.0, 1.0])
    weight, bias = norms.weighted_sum(factors)
    assert weight.shape == module.weight.shape and bias is not None
    out, bias_out = torch.full_like(weight, 3.0), torch.full_like(bias, -1.0)
    result = norms.weighted_sum(factors, out=out, bias_out=bias_out, accumulate=True)
    assert result[0] is out and result[1] is bias_out
    torch.testing.assert_close(out, weight + 3.0)
    torch.testing.assert_close(bias_out, bias - 1.0)
    norms.weighted_sum(factors, out=out, bias_out=bias_out)
    assert torch.equal(out, weight) and torch.equal(bias_out, bias)


def test_strides_do_not_matter(backend: str) -> None:
    module, x, errors, options = layer("padded")
    views = [
        (x.to(memory_format=torch.channels_last), errors.to(memory_format=torch.channels_last)),
        (torch.stack([x, x], -1)[..., 1], torch.stack([errors] * 3, 1)[:, 2]),
        (x[:1].expand(3, -1, -1, -1), errors),
    ]
    for strided_x, strided_errors in views:
        for formula in ("gram", "materialised"):
            norms = conv_norms(strided_x, strided_errors, **options, formula=formula)
            check(norms, strided_x, strided_errors, module)


def test_no_samples_and_no_memory_of_the_last_ones(backend: str) -> None:
    _, x, errors, options = layer("padded")
    for formula in ("gram", "materialised"):
        norms = conv_norms(x[:0], errors[:0], **options, formula=formula)
        weight, bias = norms.weighted_sum(torch.zeros(0))
        assert norms.sq_norms.shape == (0,)
        assert bias is not None and not weight.any() and not bias.any()


@pytest.mark.parametrize("formula", ["gram", "materialised"])
def test_any_number_of_threads_gives_the_same_norms(cpp: str, threads: int, formula: str) -> None:
    torch.manual_seed(0)
    x, errors = torch.randn(7, 3, 8, 8), torch.randn(7, 5, 8, 8)
    several = conv_norms(x, errors, kernel_size=3, padding=1, formula=formula).sq_norms
    torch.set_num_threads(1)
    alone = conv_norms(x, errors, kernel_size=3, padding=1, formula=formula).sq_norms
    assert torch.equal(several, alone)


def test_one_call_is_norms_factors_and_sum(backend: str) -> None:
    _, x, errors, options = layer("strided")
    norms = conv_norms(x, errors, **options)
    bound = norms.sq_norms.sqrt().median().item()
    factors = clip_factors(norms.sq_norms, bound)
    result = conv_clip_and_sum(x, errors, bound, **options)
    assert torch.equal(result.sq_norms, norms.sq_norms) and torch.equal(result.factors, factors)
    weight, bias = norms.weighted_sum(factors)
    assert result.bias is not None and bias is not None
    assert torch.equal(result.weight, weight) and torch.equal(result.bias, bias)
    assert (factors < 1).any() and (factors == 1).any()


def test_the_plan_is_what_auto_does_and_the_cheapest_that_applies() -> None:
    wide = conv_plan((8, 512, 4, 4), (8, 512, 4, 4), kernel_size=3, padding=1)
    long = conv_plan((8, 3, 32, 32), (8, 16, 32, 32), kernel_size=3, padding=1)
    single = conv_plan((8, 64, 3, 3), (8, 10, 1, 1), kernel_size=3)
    assert [p.formula for p in (wide, long, single)] == ["gram", "materialised", "rank_one"]
    for plan in (wide, long, single):
        assert plan.flops == plan.alternatives[plan.formula] and plan.reason
        assert plan.flops == min(plan.alternatives.values())
    assert set(single.alternatives) == {"rank_one", "gram", "materialised"}
    assert wide.kept_bytes == 0 and long.kept_bytes == 4 * 8 * 16 * 28
    # Inputs twice and the sum; inputs once, gradients written and read, and the sum.
    assert wide.bytes == 4 * (2 * 8 * 2 * 512 * 16 + 512 * 512 * 9)
    assert long.bytes == 4 * (8 * 19 * 1024 + (2 * 8 + 1) * 16 * 27)
    x, errors = torch.randn(2, 40, 2, 2), torch.randn(2, 30, 2, 2)
    plan = conv_plan((2, 40, 2, 2), (2, 30, 2, 2), kernel_size=3, padding=1)
    assert conv_norms(x, errors, kernel_size=3, padding=1).formula == plan.formula == "gram"


@pytest.mark.parametrize("name", ["padded", "one position", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_the_plan_keeps_is_what_is_saved(name: str, dtype: torch.dtype) -> None:
    module, x, errors, options = layer(name, dtype=dtype)
    lefts = cases.factors_of_size(module.out_channels)
    rights = cases.factors_of_size(module.weight[0].numel())
    for left, right in ((None, None), ("full", None), (None, "full"), (None, "diagonal")):
        sides = {"left": lefts.get(left or ""), "right": rights.get(right or "")}
        size = x.element_size()
        plan = conv_plan(tuple(x.shape), tuple(errors.shape), **options, **sides,
                         element_bytes=size)  # fmt: skip
        norms = conv_norms(x, errors, **options, **sides)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in (*norms.saved, norms._activations, norms._errors)}  # fmt: skip
        for own in (x, errors):
            held.pop(own.untyped_storage().data_ptr(), None)
        assert sum(held.values()) == plan.kept_bytes


def test_a_right_factor_that_cancels_does_not_lose_the_norm(backend: str) -> None:
    # Gradients along the direction that the factor all but removes: float32 has no digit of the
    # result left, and what the clipped sum applies the factor to is not what the norm was taken of.
    torch.manual_seed(3)
    x, errors = torch.ones(2, 1, 5, 5), torch.randn(2, 2, 3, 3)
    removed = torch.full((9, 9), 1 / 9, dtype=torch.float64)
    right = Full((torch.eye(9, dtype=torch.float64) - (1 - 1e-8) * removed).float())
    raw = cases.autograd_loop(nn.Conv2d(1, 2, 3), x.double(), errors)
    exact = cases.precondition(raw, None, right, False)
    for bias in (False, True):
        norms = conv_norms(x, errors, kernel_size=3, right=right, bias=bias)
        truth = cases.sq_norms(exact if bias else exact[:1])
        assert (norms.sq_norms.sqrt() >= truth.sqrt() * (1 - 1e-6)).all()
