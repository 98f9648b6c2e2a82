"""Only backward passes that would give parameters a gradient are training; the others are free."""

from __future__ import annotations

import pytest
import torch

from python_tests.engine.models import made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    private,
    sample_gradients,
    square,
)

CASES = ["linear 3-D", "conv2d", "transposed 2d", "layer norm", "lstm cell", "tied linears"]


def saliency(loss, x):
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def backward_to_inputs(loss, x):
    loss.backward(inputs=[x], retain_graph=True)
    found, x.grad = x.grad, None
    return found


def floating_case(name):
    model, inputs = made(name)
    if not inputs[0].is_floating_point():
        pytest.skip("tokens have no gradient")
    return model, inputs


@pytest.mark.parametrize("ask", [saliency, backward_to_inputs])
@pytest.mark.parametrize("name", CASES)
def test_a_pass_for_inputs_alone_leaves_the_step_as_it_was(name, ask):
    model, (x, *rest) = floating_case(name)
    gradients = sample_gradients(model, (x, *rest))
    x.requires_grad_()
    wanted = torch.autograd.grad(square(model(x, *rest)).sum(), x)[0]
    bound = median_norm(gradients)
    training, optimizer = private(model, bound)
    loss = square(model(x, *rest)).sum()
    torch.testing.assert_close(ask(loss, x), wanted)
    assert training.samples == 0 and training.microbatches == 0
    loss.backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def test_adversarial_training_counts_each_sample_once():
    model, (x,) = made("linear 3-D")
    moved = x.clone().requires_grad_()
    step = torch.autograd.grad(square(model(moved)).sum(), moved)[0].sign()
    attacked = (x + 0.1 * step).detach()
    gradients = sample_gradients(model, (attacked,))
    bound = median_norm(gradients)
    training, optimizer = private(model, bound)
    moved = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(square(model(moved)).sum(), moved)
    square(model(x + 0.1 * gradient.sign())).sum().backward()
    assert training.samples == len(x)
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def test_one_record_of_many_saliency_passes_moves_the_sum_by_the_bound_at_most():
    model, (x,) = made("linear 3-D")
    sums = []
    for batch in (x, x[1:]):
        private_model, _ = made("linear 3-D")
        private_model.load_state_dict(model.state_dict())
        _, optimizer = private(private_model, 0.01)
        batch = batch.clone().requires_grad_()
        loss = square(private_model(batch)).sum()
        for _ in range(3):
            torch.autograd.grad(loss, batch, retain_graph=True)
        loss.backward()
        optimizer.step()
        sums.append(torch.cat([g.flatten() for g in gradients_of(private_model).values()]))
    assert (sums[0] - sums[1]).norm() <= 0.01 * (1 + 1e-6)


def test_inputs_may_name_the_parameters_of_all_layers_or_of_some():
    model, (x,) = made("linear 3-D")
    names = [name for name, _ in model.named_parameters()]
    gradients = sample_gradients(model, (x,))
    last = names[-1].split(".")[0]
    for chosen in (names, [name for name in names if name.startswith(last)]):
        own = [
            {n: g if n in chosen else torch.zeros_like(g) for n, g in one.items()}
            for one in gradients
        ]
        bound = median_norm(own)
        training, optimizer = private(model, bound)
        square(model(x)).sum().backward(inputs=[model.get_parameter(name) for name in chosen])
        optimizer.step()
        # The learning rate is 1: back to the model that the gradients are of.
        found = gradients_of(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += found[name]
        assert_same(found, clipped_sum(own, bound))
        training.detach()


def test_a_part_of_a_layer_and_gradients_without_noise_are_refused():
    model, (x,) = made("linear 3-D")
    training, _ = private(model, 1.0)
    first = next(iter(model.parameters()))
    with pytest.raises(RuntimeError, match="some of its parameters"):
        square(model(x)).sum().backward(inputs=[first])
    with pytest.raises(RuntimeError, match="does not hand out without noise"):
        torch.autograd.grad(square(model(x)).sum(), list(model.parameters()))
    assert training.samples == 0


def test_a_penalty_on_input_gradients_is_refused():
    model, (x,) = made("linear 3-D")
    private(model, 1.0)
    x.requires_grad_()
    loss = square(model(x)).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError):
        (loss + gradient.square().sum()).backward()
