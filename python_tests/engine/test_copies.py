"""Copies of a model in private training compute as it does, and do not train without being told."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import dpkernels
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

CASES = ["linear 3-D", "conv2d", "lstm cell", "layer norm", "tied", "repeated", "positions [T]"]


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "save": saved_and_loaded,
    "again": lambda m: copy.deepcopy(saved_and_loaded(m)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_copy_computes_and_refuses_gradients_until_it_is_private_or_plain(name, way):
    model, inputs = made(name)
    training, optimizer = private(model, 1.0)
    copied = WAYS[way](model)
    torch.testing.assert_close(copied(*inputs), model(*inputs))
    with torch.no_grad():
        copied(*inputs)
    other = torch.optim.SGD(copied.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        square(copied(*inputs)).sum().backward()
    other.step()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), copied.parameters(), strict=True)
    )

    gradients = sample_gradients(dpkernels.make_plain(copy.deepcopy(copied)), inputs)
    bound = median_norm(gradients)
    own, own_optimizer = private(copied, bound)
    square(copied(*inputs)).sum().backward()
    own_optimizer.step()
    assert_same(gradients_of(copied), clipped_sum(gradients, bound))
    assert training.samples == 0
    optimizer.step()
    assert training.steps == 1 and own.noise_key is not training.noise_key


def test_a_copy_of_model_and_optimizer_together_does_not_train():
    model, inputs = made("linear 3-D")
    _, optimizer = private(model, 1.0)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in copied.parameters()]
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        square(copied(*inputs)).sum().backward()
    its_optimizer.step()
    assert all(map(torch.equal, copied.parameters(), before))


def test_a_copy_of_a_part_does_not_train():
    model, (x,) = made("linear 3-D")
    private(model, 1.0)
    part = copy.deepcopy(model[0])
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        part(x).sum().backward()


def test_a_plain_copy_trains_and_has_nothing_left_of_ours():
    model, inputs = made("linear 3-D")
    private(model, 1.0)
    copied = dpkernels.make_plain(copy.deepcopy(model))
    square(copied(*inputs)).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert not any({"forward", "zero_grad"} & vars(m).keys() for m in copied.modules())


def test_parameters_that_are_unfrozen_in_a_copy_are_refused_as_well():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    private(model, 1.0)
    copied = copy.deepcopy(model)
    copied[0].weight.requires_grad_(False)
    copied[1].requires_grad_(False)
    x = torch.randn(2, 4)
    copied(x)
    copied[0].bias.requires_grad_()
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        copied(x).sum().backward()
