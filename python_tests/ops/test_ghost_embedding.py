"""Embedding: repeated tokens, padding, factors, bags, against autograd on single samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.ops.clip import clip_factors
from dpkernels.ops.factor import Diagonal, Factor
from dpkernels.ops.ghost import (
    EmbeddingNorms,
    embedding_clip_and_sum,
    embedding_norms,
    embedding_plan,
)
from python_tests.ops import ghost_cases as cases

OPERATIONS = ("ghost_embedding_sq_norms", "ghost_embedding_weighted_sum_", "clip_factors")

VOCABULARY = 11


def inputs(
    batch: int = 3, tokens: int = 9, width: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Tokens that repeat within a sample, and errors (small integers in float64: exact sums)."""
    torch.manual_seed(batch + tokens + width)
    indices = torch.randint(0, VOCABULARY, (batch, tokens))
    errors = torch.randn(batch, tokens, width).to(dtype)
    return indices, (4 * errors).round() if dtype == torch.float64 else errors


def plain_sums(indices: Tensor, errors: Tensor, factors: Tensor, padding: int | None) -> Tensor:
    weighted = errors.to(factors.dtype) * factors.view(-1, *[1] * (errors.dim() - 1))
    module = nn.Embedding(VOCABULARY, errors.shape[-1], padding_idx=padding).to(factors.dtype)
    return torch.autograd.grad((module(indices) * weighted).sum(), module.weight)[0]


def check(
    norms: EmbeddingNorms, indices: Tensor, errors: Tensor, padding: int | None = None
) -> None:
    """Assert that norms and sum are those of autograd, one sample at a time."""
    dtype = cases.sum_dtype(errors.dtype)
    module = nn.Embedding(VOCABULARY, errors.shape[-1], padding_idx=padding)
    exact = cases.autograd_loop(module, indices, errors)
    cases.check_norms(norms.sq_norms, exact, dtype)
    factors = 0.25 * torch.arange(1, len(errors) + 1, dtype=dtype)
    plain = [plain_sums(indices, errors, factors, padding)]
    cases.check_sums(norms.weighted_sum(factors), exact, factors, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_norms_and_sums_are_those_of_autograd(
    backend: str, padding: int | None, dtype: torch.dtype
) -> None:
    indices, errors = inputs(dtype=dtype)
    arguments: dict[str, Any] = {"num_embeddings": VOCABULARY, "padding_idx": padding}
    check(embedding_norms(indices, errors, **arguments), indices, errors, padding)


@pytest.mark.parametrize(
    ("batch", "tokens", "width"),
    [(0, 3, 4), (1, 1, 1), (2, 0, 3), (2, 5, 0), (1, 6, 129), (5, 3, 17)],
)
def test_sizes(backend: str, batch: int, tokens: int, width: int) -> None:
    indices, errors = inputs(batch, tokens, width)
    norms = embedding_norms(indices, errors, num_embeddings=VOCABULARY)
    assert norms.sq_norms.shape == (batch,)
    check(norms, indices, errors)


def test_repeated_tokens_count_with_their_cross_terms(backend: str) -> None:
    errors = torch.tensor([[[3.0], [4.0]], [[3.0], [4.0]], [[3.0], [-3.0]]])
    indices = torch.tensor([[1, 2], [1, 1], [1, 1]])
    norms = embedding_norms(indices, errors, num_embeddings=3)
    assert norms.sq_norms[:2].tolist() == [25.0, 49.0]
    # Of what cancels, the bound of float64 rounding is left: two roundings of 3 + 3.
    assert 0 <= norms.sq_norms[2].sqrt() <= 2 * 6 * 2.0**-52


@given(
    indices=st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    width=st.integers(1, 40),
    padding=st.none() | st.integers(-VOCABULARY, VOCABULARY - 1),
)
def test_any_tokens(cpp: str, indices: list[list[int]], width: int, padding: int | None) -> None:
    tokens = torch.tensor(indices)
    errors = torch.randint(-4, 5, (*tokens.shape, width)).double()
    norms = embedding_norms(tokens, errors, num_embeddings=VOCABULARY, padding_idx=padding)
    check(norms, tokens, errors, padding)


@pytest.mark.parametrize("kind", [None, "full", "diagonal", "low_rank"])
@pytest.mark.parametrize("on_vocabulary", [False, True])
def test_factors(backend: str, kind: str | None, on_vocabulary: bool) -> None:
    indices, errors = inputs()
    left: Factor | None = None if kind is None else cases.factors_of_size(5)[kind]
    right = cases.factors_of_size(VOCABULARY)["diagonal"] if on_vocabulary else None
    assert right is None or isinstance(right, Diagonal)
    raw = cases.autograd_loop(nn.Embedding(VOCABULARY, 5), indices, errors)

    def both(tables: Tensor) -> Tensor:
        # The table is [V, D]: the left factor acts on its columns, the right one on its rows.
        return cases.apply(right, cases.apply(left, tables).mT).mT

    exact = [both(raw[0])]
    norms = embedding_norms(indices, errors, num_embeddings=VOCABULARY, left=left, right=right)
    cases.check_norms(norms.sq_norms, exact, torch.float32, [both(raw[0].float())])
    factors = torch.tensor([0.5, 2.0, 1.0])
    plain = both(plain_sums(indices, errors, factors, None))
    cases.check_sums(norms.weighted_sum(factors), exact, factors, [plain])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_is_one_error_at_every_position(backend: str, mode: str) -> None:
    indices, _ = inputs()
    errors = torch.randn(3, 5)
    spread = errors.unsqueeze(1).expand(-1, 9, -1)
    norms = embedding_norms(
        indices, spread / 9 if mode == "mean" else spread, num_embeddings=VOCABULARY
    )
    module = nn.EmbeddingBag(VOCABULARY, 5, mode=mode)
    exact = cases.autograd_loop(module, indices, errors)
    torch.testing.assert_close(norms.sq_norms, cases.sq_norms(exact), rtol=1e-6, atol=0)
    total, _ = norms.weighted_sum(torch.ones(3))
    torch.testing.assert_close(total, exact[0].sum(0).float())


def test_layouts_and_more_axes(backend: str) -> None:
    indices, errors = inputs(3, 12, 5)
    grid = indices.view(3, 4, 3), errors.view(3, 4, 3, 5)
    whole = embedding_norms(indices, errors, num_embeddings=VOCABULARY)
    views = [
        grid,
        (indices.int(), errors),
        (indices.T.contiguous().T, errors.transpose(0, 2).contiguous().transpose(0, 2)),
        (indices, torch.stack([errors, errors], 1)[:, 1]),
    ]
    for tokens, d in views:
        norms = embedding_norms(tokens, d, num_embeddings=VOCABULARY)
        torch.testing.assert_close(norms.sq_norms, whole.sq_norms, rtol=1e-14, atol=0)
        factors = torch.tensor([0.5, 2.0, 1.0])
        assert torch.equal(norms.weighted_sum(factors)[0], whole.weighted_sum(factors)[0])


def test_a_buffer_is_written_or_added_to(backend: str) -> None:
    indices, errors = inputs()
    norms = embedding_norms(indices, errors, num_embeddings=VOCABULARY)
    factors = torch.tensor([0.5, 2.0, 1.0])
    total, bias = norms.weighted_sum(factors)
    out = torch.full_like(total, 3.0)
    assert norms.weighted_sum(factors, out=out, accumulate=True)[0] is out and bias is None
    torch.testing.assert_close(out, total + 3.0)
    norms.weighted_sum(factors, out=out)
    assert torch.equal(out, total)


@pytest.mark.parametrize("width", [7, 40])
def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int, width: int) -> None:
    indices, errors = inputs(20, 50, width)
    factors = torch.rand(20)
    several = embedding_norms(indices, errors, num_embeddings=VOCABULARY)
    sums = several.weighted_sum(factors)[0]
    torch.set_num_threads(1)
    alone = embedding_norms(indices, errors, num_embeddings=VOCABULARY)
    assert torch.equal(several.sq_norms, alone.sq_norms)
    assert torch.equal(sums, alone.weighted_sum(factors)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_clipped_gradient_exceeds_the_bound(backend: str, dtype: torch.dtype) -> None:
    indices, errors = inputs(2, 8, 5)
    indices[:, :6] = 4
    awkward = [errors, 0 * errors, 1e-7 * errors, 1e4 * errors, torch.full_like(errors, 1 / 3)]
    if dtype != torch.float16:
        awkward += [1e-30 * errors, 1e30 * errors]
    cancelling = errors.clone()
    cancelling[:, 1:6:2] = -cancelling[:, 0:6:2] * (1 + 1e-6)
    for d in [*awkward, cancelling]:
        d = d.to(dtype)
        norms = embedding_norms(indices, d, num_embeddings=VOCABULARY)
        module = nn.Embedding(VOCABULARY, 5)
        exact = cases.sq_norms(cases.autograd_loop(module, indices, d)).sqrt()
        for bound in (1.0, 1e-20, 1e20):
            factors = clip_factors(norms.sq_norms, bound, dtype=cases.sum_dtype(dtype))
            assert (factors.double() * exact <= bound * cases.BOUND_SLACK).all()
            # Not by dropping everything: only factors that no float can hold are zero.
            assert ((factors > 0) | (bound < 1e-38 * exact)).all()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_contributes_nothing(
    backend: str, bad: float, place: int
) -> None:
    # Position 0 of the sample is padding: it has no gradient, but the sample is dropped as well.
    indices, errors = inputs()
    indices[1, 0], indices[1, 1] = 0, 5
    spoilt = errors.clone()
    spoilt[1, place, 2] = bad
    kept = torch.tensor([0, 2])
    arguments: dict[str, Any] = {"num_embeddings": VOCABULARY, "padding_idx": 0}
    result = embedding_clip_and_sum(indices, spoilt, 1.0, **arguments)
    alone = embedding_clip_and_sum(indices[kept], errors[kept], 1.0, **arguments)
    assert not result.sq_norms[1].isfinite() and result.factors[1] == 0
    assert torch.equal(result.sq_norms[kept], alone.sq_norms)
    assert torch.equal(result.weight, alone.weight)


def test_the_plan_counts_what_is_read() -> None:
    plan = embedding_plan((4, 6), (4, 6, 8), num_embeddings=VOCABULARY)
    assert plan.formula == "segments" and plan.flops == 5 * 4 * 6 * 8
    assert plan.kept_bytes == 0
    # Errors twice, rows of the table read and written, the table zeroed, tokens twice.
    assert plan.bytes == 4 * (4 * 192 + VOCABULARY * 8) + 2 * 8 * 24
    dense = cases.factors_of_size(8)["full"]
    more = embedding_plan((4, 6), (4, 6, 8), num_embeddings=VOCABULARY, left=dense)
    assert more.flops == plan.flops + 2 * 24 * 8 * 8 and more.kept_bytes == 4 * 4 * 6 * 8
    assert more.bytes == plan.bytes + 4 * (2 * 192 + 64)
    scale = cases.factors_of_size(VOCABULARY)["diagonal"]
    right = embedding_plan((4, 6), (4, 6, 8), num_embeddings=VOCABULARY, right=scale)
    assert right.kept_bytes == 8 * VOCABULARY


def test_bad_input_is_refused_with_the_reason() -> None:
    indices, errors = inputs()
    v: dict[str, Any] = {"num_embeddings": VOCABULARY}
    factor = cases.factors_of_size(VOCABULARY)["full"]
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "scale_grad_by_freq", lambda: embedding_norms(
            indices, errors, **v, scale_grad_by_freq=True)),
        (ValueError, r"\[B, ..., D\]", lambda: embedding_norms(indices, errors[:, 1:], **v)),
        (ValueError, "int64 or int32", lambda: embedding_norms(indices.float(), errors, **v)),
        (ValueError, "float32, bf16", lambda: embedding_norms(indices, errors.int(), **v)),
        (ValueError, "no formula 'gram'", lambda: embedding_norms(
            indices, errors, **v, formula="gram")),
        (ValueError, "padding_idx must be in", lambda: embedding_norms(
            indices, errors, **v, padding_idx=VOCABULARY)),
        (ValueError, "Diagonal over the vocabulary", lambda: embedding_norms(
            indices, errors, **v, right=factor)),
        (ValueError, "left must act on vectors of 5", lambda: embedding_norms(
            indices, errors, **v, left=factor)),
        (IndexError, r"\[0, 3\), got", lambda: embedding_norms(indices, errors, num_embeddings=3)),
        (IndexError, "got -1", lambda: embedding_norms(0 * indices - 1, errors, **v)),
        (ValueError, "has no bias", lambda: embedding_norms(indices, errors, **v).weighted_sum(
            torch.ones(3), bias_out=torch.ones(5))),
        (ValueError, "factors must be", lambda: embedding_norms(indices, errors, **v).weighted_sum(
            torch.ones(4))),
        (ValueError, "out must be contiguous", lambda: embedding_norms(
            indices, errors, **v).weighted_sum(torch.ones(3), out=torch.zeros(5, VOCABULARY).T)),
        (ValueError, "needs out", lambda: embedding_norms(indices, errors, **v).weighted_sum(
            torch.ones(3), accumulate=True)),
    ]  # fmt: skip
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
