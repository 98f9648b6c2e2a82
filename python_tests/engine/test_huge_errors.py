"""A sample with an error that float32 just holds, and no activation, moves sums by C at most.

Its norm is small, so that it is not clipped, and an averaged loss or automatic clipping has factors
above 1: errors must not become infinite before they meet activations.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels import clipping
from dpkernels.engine.sides import Scale
from dpkernels.precondition import FixedSides, Sides
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    private,
    sample_gradients,
    square,
)

BATCH, C = 64, 1.0
MODES = {
    "flat": lambda: clipping.Flat(C),
    "per layer": lambda: clipping.PerLayer(C),
    "adaptive": lambda: clipping.Adaptive(C),
    "automatic": lambda: clipping.Automatic(C),
    "automatic, gamma 0": lambda: clipping.Automatic(C, 0.0),
}
MODELS = {
    "linear": (lambda: nn.Linear(3, 1, bias=False), (3,)),
    "positions": (lambda: nn.Linear(3, 1, bias=False), (5, 3)),
    "convolution": (lambda: nn.Conv2d(1, 2, 3, bias=False), (1, 4, 4)),
    "two layers": (lambda: nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in "ab")), (3,)),
}


def moved(model, shape, mode, reduction, activation, error, **options):
    """Return by how much one such sample moves the sum, beside ordinary ones."""
    torch.manual_seed(0)
    x, weight = torch.randn(BATCH, *shape), torch.randn(BATCH)
    sums = []
    for present in (False, True):
        x[-1], weight[-1] = activation * present, error * present
        training, optimizer = private(model, MODES[mode](), loss_reduction=reduction, **options)
        # Twice what float32 holds, if the loss is a sum.
        losses = model(x).flatten(1).sum(1) * weight * 2
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
        with torch.no_grad():
            before = [p.clone() for p in model.parameters()]
            optimizer.step()
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        sums.append(torch.cat([g.flatten() for g in gradients_of(model).values()]).double())
        training.detach()
    assert sums[0].isfinite().all() and sums[0].norm() > C
    return float((sums[1] - sums[0]).norm())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("activation", "error"), [(0.0, 3e38), (1e-40, 3e38), (0.0, 5.0), (1e-40, 5.0), (1e-30, 1e37)]
)
def test_it_moves_the_sum_by_the_bound_at_most(kind, mode, reduction, activation, error):
    make, shape = MODELS[kind]
    torch.manual_seed(1)
    # What the other samples' float32 sums are rounded by is no part of it.
    rounding = 1e-5
    assert moved(make(), shape, mode, reduction, activation, error) <= C * (1 + 1e-6) + rounding


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [0.0, 1e-40])
def test_so_it_does_with_a_scale_for_each_weight(mode, reduction, activation):
    scale = Scale({"weight": torch.tensor([[2.0, 0.5, 1.0]])})
    fixed = FixedSides({"": Sides(scale=scale)})
    make, shape = MODELS["linear"]
    torch.manual_seed(1)
    far = moved(make(), shape, mode, reduction, activation, 3e38, preconditioner=fixed)
    assert far <= C * (1 + 1e-6) + 1e-5


@pytest.mark.parametrize("sizes", [(3, 40, 7), (40, 3), (0, 5)])
def test_microbatches_of_any_sizes_add_up_if_losses_are_averages(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(sum(sizes), 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x], square)
    _, optimizer = private(model, 0.5, loss_reduction="mean")
    for part in x.split(list(sizes)):
        losses = square(model(part))
        (losses.mean() if len(part) else losses.sum()).backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, 0.5))
