"""Clipped sums of every kind of layer are those of a loop over single samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from python_tests.engine.models import CASES, made
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


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_clipped_sums_are_those_of_single_samples(name, reduction):
    model, inputs = made(name)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(
        private_sum(model, inputs, bound, reduction=reduction), clipped_sum(gradients, bound)
    )


@pytest.mark.parametrize("name", CASES)
def test_one_sample_is_a_batch_too(name):
    model, inputs = made(name, samples=1)
    gradients = sample_gradients(model, inputs)
    bound = 0.5 * median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_makes_a_step_of_noise(name):
    model, inputs = made(name, samples=0)
    _, optimizer = private(model, 1.0)
    square(model(*inputs)).sum().backward()
    optimizer.step()
    assert not any(g.any() for g in gradients_of(model).values())
    training, optimizer = private(made(name)[0], 1.0, noise_multiplier=1.0)
    square(training.model(*inputs)).sum().backward()
    optimizer.step()
    assert training.steps == 1
    assert all(g.abs().min() > 0 for g in gradients_of(training.model).values())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", [n for n in CASES if "tied" not in n])
def test_frozen_parameters_take_no_part_in_norms(name, frozen):
    model, inputs = made(name)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(frozen):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        pytest.skip(f"nothing is left to train without {frozen}")
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", CASES)
def test_sample_norms_are_those_of_single_samples(name):
    model, inputs = made(name)
    gradients = sample_gradients(model, inputs)
    training, _ = private(model, 1.0, keep_norms=True)
    square(model(*inputs)).sum().backward()
    norms = torch.stack(list(training.sample_norms().values())).square().sum(0).sqrt()
    wanted = torch.tensor(
        [torch.stack([g.square().sum() for g in one.values()]).sum().sqrt() for one in gradients],
        dtype=torch.float64,
    )
    torch.testing.assert_close(norms, wanted)


def test_the_model_computes_what_it_did():
    for name in CASES:
        model, inputs = made(name)
        plain = model(*inputs)
        private(model, 1.0)
        torch.testing.assert_close(model(*inputs), plain)


def test_without_autograd_the_layers_are_left_alone():
    model, inputs = made("linear 3-D")
    plain = model(*inputs)
    training, _ = private(model, 1.0)
    with torch.no_grad():
        assert torch.equal(model(*inputs), plain)
    training.detach()
    assert not any("forward" in vars(module) for module in model.modules())
    square(model(*inputs)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_inputs_get_their_gradients():
    model, (x,) = made("conv2d")
    x.requires_grad_()
    square(model(x)).sum().backward()
    wanted, x.grad = x.grad, None
    for p in model.parameters():
        p.grad = None
    private(model, 1.0)
    square(model(x)).sum().backward()
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("vocabulary", [5, 9])
def test_one_token_for_each_sample_is_a_token_whatever_its_value(vocabulary):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocabulary, 3), nn.Linear(3, 2)).double()
    tokens = torch.arange(5)
    gradients = sample_gradients(model, (tokens,))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (tokens,), bound), clipped_sum(gradients, bound))
