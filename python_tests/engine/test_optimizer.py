"""Before each step: the optimizer holds private parameters and frozen ones, and nothing else."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import dpkernels
from python_tests.engine.oracle import square


def made(kind=torch.optim.SGD, **options):
    """Return a half frozen model, all of which is in the optimizer, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    optimizer = kind(model.parameters(), 0.1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        key = dpkernels.NoiseKey.from_seed(1)
    training = dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        loss_reduction="sum",
        noise_key=key,
    )
    return model, training, torch.randn(4, 4)


def unfreeze(model, training):
    model[0].requires_grad_()


def unfreeze_and_freeze_again(model, training):
    model[0].requires_grad_()
    torch.tanh(nn.functional.linear(torch.randn(4, 4), model[0].weight)).sum().backward()
    model[0].requires_grad_(False)


def unfreeze_one_bias(model, training):
    model[0].bias.requires_grad_()


def freeze(model, training):
    model[2].weight.requires_grad_(False)


def add_a_group(model, training):
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize(
    "change", [unfreeze, unfreeze_and_freeze_again, unfreeze_one_bias, freeze, add_a_group]
)
def test_parameters_that_are_added_frozen_or_unfrozen_later_are_refused(change):
    model, training, x = made()
    square(model(x)).sum().backward()
    change(model, training)
    everything = [p for group in training.optimizer.param_groups for p in group["params"]]
    before = copy.deepcopy(everything)
    with pytest.raises(RuntimeError, match=r"detach\(\), then make_private again"):
        training.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(everything, before, strict=True))
    assert training.steps == 0 and training.noise_key.counter == 0
    assert not training.optimizer.state


def test_the_way_out_trains_what_was_unfrozen():
    model, training, x = made()
    unfreeze(model, training)
    training.detach()
    training.optimizer.zero_grad()
    again = dpkernels.make_private(
        model,
        training.optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        loss_reduction="sum",
    )
    before = copy.deepcopy(list(model.parameters()))
    square(model(x)).sum().backward()
    training.optimizer.step()
    assert again.steps == 1
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_frozen_parameters_in_the_optimizer_stay_as_they_are():
    model, training, x = made(weight_decay=0.1)
    before = copy.deepcopy(model[0])
    square(model(x)).sum().backward()
    training.optimizer.step()
    assert torch.equal(model[0].weight, before.weight) and torch.equal(model[0].bias, before.bias)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {}),
    ],
)
def test_a_scale_that_follows_the_gradients_is_refused(kind, options):
    model, training, x = made(kind, **options)
    scaler = torch.amp.GradScaler("cpu")
    before = copy.deepcopy(list(model.parameters()))
    scaler.scale(square(model(x)).sum()).backward()
    # Optimizers that are not fused do not get as far as the step: there is no gradient to unscale.
    with pytest.raises((RuntimeError, AssertionError), match=r"GradScaler|No inf checks"):
        scaler.step(training.optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert training.steps == 0 and training.noise_key.counter == 0
    training.optimizer.zero_grad()
    square(model(x)).sum().backward()
    training.optimizer.step()
    assert training.steps == 1
