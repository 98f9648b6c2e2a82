"""In float32, too, one sample moves the sum by no more than its bound: rule 3 allows 1e-6 of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpkernels.ops.factor import Full, LowRank
from dpkernels.precondition import FixedSides, Sides
from python_tests.engine.oracle import private, square

BOUND = 0.01


def factor(kind, size):
    basis = torch.linalg.qr(torch.randn(size, size))[0]
    if kind == "full":
        return Full(((basis * (0.1 + torch.rand(size))) @ basis.T).contiguous())
    if kind == "none":
        return None
    rank = int(kind.removeprefix("rank "))
    return LowRank(basis[:, :rank].contiguous(), 0.5 + torch.rand(rank), 0.7)


@pytest.mark.parametrize("positions", [1, 7, 40])
@pytest.mark.parametrize("kind", ["none", "full", "rank 0", "rank 2"])
@pytest.mark.parametrize("seed", range(3))
def test_one_sample_moves_the_sum_by_its_bound_at_most(kind, positions, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 4))
    sides = {
        k: Sides(factor(kind, o), factor(kind, i + 1)) for k, o, i in (("0", 9, 6), ("3", 4, 9))
    }
    x = torch.randn(5, positions, 6) * 10 ** torch.empty(5, 1, 1).uniform_(-2, 3)
    x = x.squeeze(1)

    def clipped_sum(samples):
        own = copy.deepcopy(model)
        _, optimizer = private(own, BOUND, loss_reduction="mean", preconditioner=FixedSides(sides))
        square(own(samples)).mean().backward()
        optimizer.step()
        return torch.cat([p.grad.double().flatten() for p in own.parameters()])

    moved = (clipped_sum(x) - clipped_sum(x[:4])).norm().item()
    assert 0 < moved <= BOUND * (1 + 1e-6), f"{moved / BOUND - 1:.3g} over the bound"
