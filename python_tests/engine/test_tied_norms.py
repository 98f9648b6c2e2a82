"""Norms of weights that linear layers and embeddings share are never low, however they cancel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpkernels.engine.layers.tied import TiedGroup, tie
from dpkernels.engine.rules import layers_of
from dpkernels.ops.ghost.rounding import norm_limit

BATCH, DTYPES = 4, [torch.float32, torch.float64]

# T, V, D, and the formula that they lead to.
SHAPES = {
    "rank_one": (1, 7, 5),
    "gram": (3, 12, 9),
    "stored": (40, 7, 5),
}


def group(rows: int, width: int) -> TiedGroup:
    embedding, linear = nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)
    linear.weight = embedding.weight
    (one,) = tie(layers_of(nn.ModuleList([embedding, linear])))
    return one


def single(*shape: int, scale: float = 1.0) -> Tensor:
    """Return float32 numbers, of which products are exact in float64."""
    return (scale * torch.randn(shape)).double()


def exact_norm(gradients: Tensor, e: Tensor) -> float:
    """Return the norm of a sum of terms: ``[terms, V, D]`` exact in float64, e ``[uses, V, D]``."""
    terms = torch.cat([gradients, e]).flatten(1).T.tolist()
    return math.sqrt(math.fsum(math.fsum(element) ** 2 for element in terms))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formula", SHAPES)
@pytest.mark.parametrize("left", [1e-3, 1e-6, 1e-8, 0.0])
@pytest.mark.parametrize("seed", range(5))
def test_norms_of_what_cancels_are_never_low(dtype, formula, left, seed):
    torch.manual_seed(seed)
    positions, rows, width = SHAPES[formula]
    a, d = single(BATCH, positions, width), single(BATCH, positions, rows)
    # Two uses of every token, whose sum is all but the opposite of the linear layer's gradient.
    first = single(BATCH, rows, width, scale=3.0)
    second = -(1 + left) * (d.mT @ a) - first
    a, d, first, second = (x.to(dtype) for x in (a, d, first, second))
    tokens = torch.arange(rows).repeat(BATCH, 2)
    tied = group(rows, width)
    embedding, linear = tied.members
    norms = tied.norms_of({linear: [(a, d)], embedding: [(tokens, torch.cat([first, second], 1))]})
    assert norms.linear.norms.formula == formula.replace("stored", "materialised")
    assert norms.linear.norms.stored == (formula == "stored")
    for b in range(BATCH):
        # Stored gradients are added up as they are; others are the products of their parts.
        terms = (
            norms.linear.norms.saved[0][b].double().unsqueeze(0)
            if formula == "stored"
            else d[b].double().unsqueeze(2) * a[b].double().unsqueeze(1)
        )
        truth = exact_norm(terms, torch.stack([first[b], second[b]]).double())
        assert norms.sq_norms[b].sqrt() >= truth * (1 - 1e-7), b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formula", SHAPES)
def test_what_does_not_cancel_is_raised_by_next_to_nothing(dtype, formula):
    torch.manual_seed(0)
    positions, rows, width = SHAPES[formula]
    a, d, e = (single(BATCH, n, m) for n, m in ((positions, width), (positions, rows), (8, width)))
    tokens = torch.randint(rows, (BATCH, 8))
    tied = group(rows, width)
    embedding, linear = tied.members
    norms = tied.norms_of(
        {linear: [(a.to(dtype), d.to(dtype))], embedding: [(tokens, e.to(dtype))]}
    )
    whole = (d.mT @ a).scatter_add(1, tokens.unsqueeze(2).expand_as(e), e)
    limit = norm_limit(dtype, positions)
    truth = whole.flatten(1).norm(dim=1)
    assert (norms.sq_norms.sqrt() <= truth * (1 + limit)).all()
