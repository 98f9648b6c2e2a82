"""Scale and shift: the affine part of PyTorch's normalisation layers, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.ops.clip import clip_factors
from dpkernels.ops.ghost import (
    ScaleShiftNorms,
    scale_shift_clip_and_sum,
    scale_shift_norms,
    scale_shift_plan,
)
from python_tests.ops import ghost_cases as cases

OPERATIONS = ("ghost_scale_shift_grads", "row_sq_norms", "weighted_row_sum_", "clip_factors")

FIRST = {"channel_axis": 1}
# The layer, the same one without weights, the input's shape, and our arguments.
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "LayerNorm": (lambda a: nn.LayerNorm(7, elementwise_affine=a), (3, 5, 7), {}),
    "LayerNorm 2-D": (lambda a: nn.LayerNorm(7, elementwise_affine=a), (3, 7), {}),
    "LayerNorm over two axes": (
        lambda a: nn.LayerNorm((4, 5), elementwise_affine=a), (3, 2, 4, 5), {"normalised_dims": 2}),
    "LayerNorm without bias": (
        lambda a: nn.LayerNorm(33, elementwise_affine=a, bias=False), (2, 3, 33), {"bias": False}),
    "RMSNorm": (lambda a: nn.RMSNorm(9, elementwise_affine=a), (3, 2, 4, 9), {"bias": False}),
    "GroupNorm": (lambda a: nn.GroupNorm(3, 6, affine=a), (3, 6, 5, 3), FIRST),
    "GroupNorm, no positions": (lambda a: nn.GroupNorm(2, 6, affine=a), (3, 6), FIRST),
    "InstanceNorm": (lambda a: nn.InstanceNorm2d(4, affine=a), (3, 4, 5, 7), FIRST),
}  # fmt: skip


def check(
    norms: ScaleShiftNorms, x: Tensor, errors: Tensor, exact: list[Tensor], positions: Any
) -> None:
    dtype = cases.sum_dtype(errors.dtype)
    cases.check_norms(norms.sq_norms, exact, dtype)
    factors = 0.25 * torch.arange(1, len(errors) + 1, dtype=dtype)
    weighted = errors.to(dtype) * factors.view(-1, *[1] * (errors.dim() - 1))
    plain = [(x.to(dtype) * weighted).sum(positions), weighted.sum(positions)]
    shaped = [p.reshape(e.shape[1:]) for p, e in zip(plain, exact, strict=False)]
    cases.check_sums(norms.weighted_sum(factors), exact, factors, shaped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_sums_are_those_of_autograd(backend: str, name: str, dtype: torch.dtype) -> None:
    make, shape, arguments = LAYERS[name]
    torch.manual_seed(len(name))
    errors = torch.randn(shape).to(dtype)
    x = make(False)(torch.randn(shape)).to(dtype)
    if dtype == torch.float64:  # small integers: every sum is exact
        x, errors = (4 * x).round(), (4 * errors).round()
    norms = scale_shift_norms(x, errors, **arguments)
    dims = arguments.get("normalised_dims", 1)
    kept = [1] if arguments.get("channel_axis") == 1 else range(len(shape) - dims, len(shape))
    positions = [axis for axis in range(1, len(shape)) if axis not in kept]
    product = x.double() * errors.double()
    exact = [product.sum(positions) if positions else product]
    if arguments.get("bias", True):
        exact.append(errors.double().sum(positions) if positions else errors.double())
    check(norms, x, errors, exact, [0, *positions])
    if dtype == torch.float32:
        # The formula itself is what autograd has for the real layer.
        module, inputs = make(True).double(), torch.randn(shape, dtype=torch.float64)
        module.eval()
        normalised = make(False).double().eval()(inputs)
        truth = cases.autograd_loop(module, inputs, errors)
        mine = scale_shift_norms(normalised, errors.double(), **arguments)
        torch.testing.assert_close(mine.sq_norms, cases.sq_norms(truth), rtol=1e-12, atol=0)


@given(
    batch=st.integers(0, 4),
    positions=st.integers(0, 9),
    width=st.integers(1, 40),
    first=st.booleans(),
    bias=st.booleans(),
)
def test_any_size(
    cpp: str, batch: int, positions: int, width: int, first: bool, bias: bool
) -> None:
    shape = (batch, width, positions) if first else (batch, positions, width)
    # Small integers: every sum is exact.
    x, errors = (torch.randint(-4, 5, shape).double() for _ in range(2))
    axis = 2 if first else 1
    norms = scale_shift_norms(x, errors, channel_axis=1 if first else -1, bias=bias)
    exact = [(x * errors).sum(axis)] + [errors.sum(axis)] * bias
    check(norms, x, errors, exact, [0, axis])


@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_factors(backend: str, sides: str) -> None:
    torch.manual_seed(0)
    x, errors = torch.randn(3, 4, 7), torch.randn(3, 4, 7)
    left = None if sides == "right" else cases.factors_of_size(7, 1)["diagonal"]
    right = None if sides == "left" else cases.factors_of_size(7, 2)["diagonal"]
    raw = [(x.double() * errors.double()).sum(1), errors.double().sum(1)]
    exact = [cases.apply(right, cases.apply(left, raw[0])), cases.apply(left, raw[1])]
    norms = scale_shift_norms(x, errors, left=left, right=right)
    cases.check_norms(norms.sq_norms, exact, torch.float32)
    factors = torch.tensor([0.5, 2.0, 1.0])
    plain = cases.weighted([g.float() for g in exact], factors)
    cases.check_sums(norms.weighted_sum(factors), exact, factors, plain)


@pytest.mark.parametrize("axis", [-1, 1])
def test_sizes_beyond_one_block(backend: str, axis: int) -> None:
    torch.manual_seed(1)
    x, errors = torch.randn(1, 35, 37), torch.randn(1, 35, 37)
    other = 1 if axis == -1 else 2
    exact = [(x.double() * errors.double()).sum(other), errors.double().sum(other)]
    check(scale_shift_norms(x, errors, channel_axis=axis), x, errors, exact, [0, other])


def test_strides_do_not_matter(backend: str) -> None:
    x, errors = torch.randn(7, 4, 3).permute(2, 1, 0), torch.randn(3, 4, 14)[..., ::2]
    norms = scale_shift_norms(x, errors)
    same = scale_shift_norms(x.contiguous(), errors.contiguous())
    assert torch.equal(norms.sq_norms, same.sq_norms)


def test_buffers_are_written_or_added_to(backend: str) -> None:
    norms = scale_shift_norms(torch.randn(3, 4, 7), torch.randn(3, 4, 7))
    factors = torch.tensor([0.5, 2.0, 1.0])
    weight, bias = norms.weighted_sum(factors)
    assert bias is not None
    out, bias_out = torch.full_like(weight, 3.0), torch.full_like(bias, -1.0)
    result = norms.weighted_sum(factors, out=out, bias_out=bias_out, accumulate=True)
    assert result[0] is out and result[1] is bias_out
    torch.testing.assert_close(out, weight + 3.0)
    torch.testing.assert_close(bias_out, bias - 1.0)
    norms.weighted_sum(factors, out=out, bias_out=bias_out)
    assert torch.equal(out, weight) and torch.equal(bias_out, bias)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_clipped_gradient_exceeds_the_bound(backend: str, dtype: torch.dtype, axis: int) -> None:
    torch.manual_seed(2)
    x, errors = torch.randn(2, 8, 6), torch.randn(2, 8, 6)
    pairs = [(x, errors), (0 * x, errors), (torch.full_like(x, 1 / 3), torch.full_like(x, 1 / 7))]
    signs = 1 - 2 * (torch.arange(8) % 2).view(1, 8, 1)
    pairs.append((1 + 1e-6 * x, signs * (1 + 1e-6 * errors)))
    if dtype != torch.float16:
        pairs += [(1e30 * x, 1e-25 * errors), (1e30 * x, errors), (1e-30 * x, 1e-42 * errors)]
    other = 1 if axis == -1 else 2
    for a, d in pairs:
        a, d = a.to(dtype), d.to(dtype)
        norms = scale_shift_norms(a, d, channel_axis=axis)
        truth = [(a.double() * d.double()).sum(other), d.double().sum(other)]
        exact = cases.sq_norms(truth).sqrt()
        for bound in (1.0, 1e-20, 1e20):
            factors = clip_factors(norms.sq_norms, bound, dtype=cases.sum_dtype(dtype))
            assert (factors.double() * exact <= bound * cases.BOUND_SLACK).all()
            # Not by dropping everything: only factors that no float can hold are zero.
            assert ((factors > 0) | (bound < 1e-38 * exact)).all()


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sample_that_is_not_finite_contributes_nothing(
    backend: str, bias: bool, bad: float, axis: int
) -> None:
    x, errors = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    spoilt_x, spoilt_errors = x.clone(), errors.clone()
    spoilt_x[1, 2, 3] = bad
    spoilt_errors[3, 4, 5] = bad
    kept = torch.tensor([0, 2])
    arguments: dict[str, Any] = {"channel_axis": axis, "bias": bias}
    result = scale_shift_clip_and_sum(spoilt_x, spoilt_errors, 1.0, **arguments)
    alone = scale_shift_clip_and_sum(x[kept], errors[kept], 1.0, **arguments)
    assert result.sq_norms.isfinite().tolist() == [True, False, True, False]
    assert torch.equal(result.sq_norms[kept], alone.sq_norms)
    torch.testing.assert_close(result.weight, alone.weight)
    assert (result.bias is None) == (alone.bias is None) == (not bias)


def test_the_plan_counts_what_is_read_and_kept() -> None:
    plan = scale_shift_plan((4, 6, 8))
    assert plan.formula == "materialised" and plan.kept_bytes == 2 * 4 * 4 * 8
    # Inputs once; gradients written and read twice; the sums.
    assert plan.bytes == 4 * (2 * 192 + 3 * 64 + 16)
    assert plan.flops == 3 * 4 * 6 * 8 + 4 * 2 * 4 * 8
    assert scale_shift_plan((4, 6, 8), channel_axis=1, bias=False).kept_bytes == 4 * 4 * 6


def test_bad_input_is_refused_with_the_reason() -> None:
    x, errors = torch.randn(3, 4, 7), torch.randn(3, 4, 7)
    full = cases.factors_of_size(7)["full"]
    refused: list[tuple[str, Any]] = [
        ("one shape", lambda: scale_shift_norms(x, errors[:, 1:])),
        ("one dtype", lambda: scale_shift_norms(x, errors.double())),
        ("float32, bf16", lambda: scale_shift_norms(x.int(), errors.int())),
        ("channel_axis must be -1 or 1", lambda: scale_shift_norms(x, errors, channel_axis=2)),
        ("must be 1 for channel_axis=1",
         lambda: scale_shift_norms(x, errors, channel_axis=1, normalised_dims=2)),
        ("batch axis", lambda: scale_shift_norms(x, errors, normalised_dims=3)),
        ("batch axis", lambda: scale_shift_norms(x[:, 0, 0], errors[:, 0, 0])),
        ("no formula 'gram'", lambda: scale_shift_norms(x, errors, formula="gram")),
        ("must be a Diagonal", lambda: scale_shift_norms(x, errors, left=full)),
        ("right must act on vectors of 7", lambda: scale_shift_norms(
            x, errors, right=cases.factors_of_size(6)["diagonal"])),
        ("with bias=False", lambda: scale_shift_norms(x, errors, bias=False).weighted_sum(
            torch.ones(3), bias_out=torch.ones(7))),
        ("shares memory", lambda: _into_one_buffer(x, errors)),
    ]  # fmt: skip
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def _into_one_buffer(x: Tensor, errors: Tensor) -> None:
    buffer = torch.zeros(10)
    scale_shift_norms(x, errors).weighted_sum(torch.ones(3), out=buffer[:7], bias_out=buffer[3:])
