"""Two calls of the model in one backward pass, and what may change or listen between steps."""

from __future__ import annotations

import copy

import pytest
import torch

import dpkernels
from dpkernels.engine.clipping import Flat
from python_tests.engine.models import CASES, made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    private,
    sample_gradients,
    square,
)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("linear", "conv"))])
def test_gradients_of_calls_about_the_same_samples_are_added_before_the_clip(case):
    model, inputs = made(case)
    others = tuple(x.flip(0) * 1.5 if x.is_floating_point() else x.flip(0) for x in inputs)
    pairs = zip(sample_gradients(model, inputs), sample_gradients(model, others), strict=True)
    gradients = [{name: a[name] + b[name] for name in a} for a, b in pairs]
    bound = median_norm(gradients)

    trained = copy.deepcopy(model)
    _, optimizer = private(trained, bound, several_calls="same samples")
    for _ in range(2):
        optimizer.zero_grad()
        trained.load_state_dict(model.state_dict())
        (square(trained(*inputs)).sum() + square(trained(*others)).sum()).backward()
        optimizer.step()
        assert_same(gradients_of(trained), clipped_sum(gradients, bound))


def test_a_call_without_a_backward_pass_changes_nothing():
    model, inputs = made("linear")
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    _, optimizer = private(model, bound, several_calls="same samples")
    model(inputs[0] * 3)
    square(model(*inputs)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def test_calls_of_different_sizes_in_one_backward_pass_are_refused():
    model, inputs = made("linear")
    private(model, 1.0, several_calls="same samples")
    loss = square(model(*inputs)).sum() + square(model(inputs[0][1:])).sum()
    with pytest.raises(RuntimeError, match="two calls of the model"):
        loss.backward()


def test_a_backward_pass_ends_what_is_about_the_same_samples():
    model, inputs = made("linear")
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    _, optimizer = private(model, bound, several_calls="same samples")
    for _ in range(2):
        square(model(*inputs)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients + gradients, bound))


def test_unknown_choices_are_refused():
    model, _ = made("linear")
    for option in ("several_calls", "loss_reduction"):
        with pytest.raises(ValueError, match=f"{option} must be one of"):
            private(model, 1.0, **{option: "maybe"})


def test_noise_and_bound_follow_what_is_set_between_steps():
    model = torch.nn.Linear(400, 250, bias=False)
    training, optimizer = private(model, 1.0)
    with pytest.warns(UserWarning, match="fixed seed"):
        training.noise_key.load_state_dict(dpkernels.NoiseKey.from_seed(3).state_dict())
    for sigma, bound in ((2.0, 0.5), (0.5, 3.0)):
        training.noise_multiplier, training.clipping = sigma, Flat(bound)
        assert training.noise_multiplier == sigma and training.sensitivity == bound
        optimizer.step()
        # 100,000 draws: the sample deviation is within 5 / sqrt(2 * 100,000) = 1.1% of the true.
        std = float(model.weight.grad.std())
        assert std == pytest.approx(sigma * bound, rel=5 / (2 * 1e5) ** 0.5)


@pytest.mark.parametrize("name", ["noise_multiplier", "clipping"])
def test_nothing_is_set_in_the_middle_of_a_step(name):
    model, inputs = made("linear")
    training, optimizer = private(model, 1.0)
    square(model(*inputs)).sum().backward()
    value = 2.0 if name == "noise_multiplier" else Flat(2.0)
    with pytest.raises(RuntimeError, match="between backward"):
        setattr(training, name, value)
    optimizer.step()
    setattr(training, name, value)
    with pytest.raises(ValueError, match="noise_multiplier"):
        training.noise_multiplier = float("nan")


def test_listeners_hear_of_every_release_before_it_and_can_refuse():
    model, inputs = made("linear")
    training, optimizer = private(model, 1.0, noise_multiplier=1.0)
    heard = []
    remove = training.before_release(
        lambda: heard.append((training.samples, training.steps, training.noise_key.counter))
    )
    counter = training.noise_key.counter
    square(model(*inputs)).sum().backward()
    optimizer.step()
    assert heard == [(len(inputs[0]), 0, counter)] and training.samples == 0

    def refuse():
        raise RuntimeError("no more budget")

    training.before_release(refuse)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    square(model(*inputs)).sum().backward()
    counter = training.noise_key.counter
    with pytest.raises(RuntimeError, match="no more budget"):
        optimizer.step()
    assert training.steps == 1 and training.noise_key.counter == counter and training.samples == 0
    assert_same(dict(model.named_parameters()), before)
    remove()
    with pytest.raises(RuntimeError, match="no more budget"):
        optimizer.step()
    assert len(heard) == 2


@pytest.mark.parametrize("case", ["linear", "conv2d"])
def test_a_copy_of_a_model_in_private_training_is_its_own_and_refuses_to_train(case):
    model, inputs = made(case)
    wanted = model(*inputs).detach()
    _, optimizer = private(model, 1.0)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(*inputs), wanted)
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        square(copied(*inputs)).sum().backward()
    # Nothing of it gets into the sums of the original.
    optimizer.step()
    assert all(not p.grad.any() for p in model.parameters())
    training, _ = private(copied, 1.0)
    training.detach()
    assert torch.equal(copied(*inputs), wanted)
    square(copied(*inputs)).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
