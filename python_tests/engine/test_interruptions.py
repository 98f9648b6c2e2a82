"""A step that is broken off anywhere leaves model, optimizer and noise counter usable."""

from __future__ import annotations

import copy
import sys
import warnings

import pytest
import torch
from torch import nn

import dpkernels
from dpkernels.engine import distributed
from dpkernels.engine.capture import Capture
from dpkernels.engine.clipping import Flat
from dpkernels.ops.ghost import linear
from python_tests.engine.models import made
from python_tests.engine.oracle import gradients_of, private, square


def last_linear(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


# What is broken off, as an object and the name of its function.
PLACES = {
    "forward": lambda model: (last_linear(model), "forward"),
    "capture": lambda model: (Capture, "take"),
    "norms": lambda model: (linear, "norms_unchecked"),
    "factors": lambda model: (Flat, "factors"),
    "sums": lambda model: (linear.LinearNorms, "add_to"),
    "noise": lambda model: (distributed, "add_gaussian_noise_"),
    "end of the step": lambda model: (Flat, "end_step"),
    "optimizer": lambda model: (sys.modules[torch.optim.SGD.__module__], "sgd"),
}
# How many noisy gradients are released though the step is broken off.
RELEASED = {place: int(place == "optimizer") for place in PLACES}


def then_raise(function, error):
    """Return what does its work, so that there is something to be undone, and then raises."""

    def broken(*args, **kwargs):
        function(*args, **kwargs)
        raise error

    return broken


def noisy(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        key = dpkernels.NoiseKey.from_seed(1)
    return private(model, 0.2, noise_multiplier=1.0, noise_key=key)


def take_step(model, optimizer, inputs):
    square(model(*inputs)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["linear 3-D", "tied", "repeated", "lstm cell"])
def test_the_next_step_is_that_of_a_fresh_engine(name, place, error, monkeypatch):
    model, inputs = made(name)
    fresh_model = copy.deepcopy(model)
    training, optimizer = noisy(model)
    take_step(model, optimizer, inputs)
    counter = training.noise_key.counter
    with monkeypatch.context() as patch:
        owner, function = PLACES[place](model)
        patch.setattr(owner, function, then_raise(getattr(owner, function), error))
        with pytest.raises(error):
            take_step(model, optimizer, inputs)
    assert training.steps == 1 + RELEASED[place]
    # Noise that was drawn is never drawn again, whether it was released or not.
    drawn = place in ("noise", "end of the step", "optimizer")
    assert (training.noise_key.counter > counter) == drawn

    fresh_model.load_state_dict(model.state_dict())
    fresh, fresh_optimizer = noisy(fresh_model)
    with pytest.warns(UserWarning, match="fixed seed"):
        fresh.load_state_dict(training.state_dict())
    take_step(model, optimizer, inputs)
    take_step(fresh_model, fresh_optimizer, inputs)
    wanted = gradients_of(fresh_model)
    assert all(torch.equal(g, wanted[key]) for key, g in gradients_of(model).items())
    pairs = zip(model.parameters(), fresh_model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert training.steps == fresh.steps == 2 + RELEASED[place]
    assert training.noise_key.counter == fresh.noise_key.counter


def test_layers_called_after_a_call_that_was_interrupted_are_not_part_of_it(monkeypatch):
    model, (x,) = made("linear 3-D")
    private(model, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(model[2], "forward", then_raise(model[2].forward, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(x)
    loss = square(model[0](x)).sum() + square(model[0](x.flip(0))).sum()
    with pytest.raises(RuntimeError, match="called twice, outside of a call of the model"):
        loss.backward()


def test_sums_without_noise_are_gone_after_a_break(monkeypatch):
    model, inputs = made("linear 3-D")
    _, optimizer = noisy(model)
    with monkeypatch.context() as patch:
        patch.setattr(Flat, "end_step", then_raise(Flat.end_step, MemoryError))
        with pytest.raises(MemoryError):
            take_step(model, optimizer, inputs)
    assert all(p.grad is None for p in model.parameters())
