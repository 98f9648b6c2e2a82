"""Modules that are not as their constructors made them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    private,
    private_sum,
    sample_gradients,
    square,
)

REORDERED = {
    "linear": (lambda: nn.Linear(4, 4), (5, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
    "convolution": (lambda: nn.Conv2d(4, 4, 1), (5, 4, 3, 3)),
}


@pytest.mark.parametrize("name", REORDERED)
def test_a_weight_that_was_registered_after_the_bias_gets_its_own_gradient(name):
    make, shape = REORDERED[name]
    torch.manual_seed(0)
    module = make().double()
    weight = nn.Parameter(module.weight.detach() + torch.rand_like(module.weight))
    del module.weight
    module.weight = weight
    assert [key for key, _ in module.named_parameters()] == ["bias", "weight"]
    model, inputs = nn.Sequential(module, nn.Flatten()), (torch.randn(shape, dtype=torch.float64),)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_inputs_of_a_normalisation_in_half_precision_are_not_dropped(make, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(make().to(dtype), nn.Flatten())
    x = (3e4 * torch.randn(4, 8, 8).clamp(-2, 2)).to(dtype)
    training, optimizer = private(model, 0.5)
    square(model(x).float()).sum().backward()
    optimizer.step()
    assert training.nonfinite_samples == 0
    assert all(g.isfinite().all() and g.any() for g in gradients_of(model).values())
