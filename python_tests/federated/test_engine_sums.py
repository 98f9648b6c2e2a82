"""Clipped sums by the engine: one copy in private training, tried out on synthetic inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpkernels.engine import Unsupported
from dpkernels.federated.local import EngineSums

SEEN: list[torch.Tensor] = []


class Noting(nn.Module):
    """Passes on what it gets, and keeps it."""

    def forward(self, x):
        SEEN.append(x.detach().clone())
        return x


class Mixing(nn.Module):
    """Lets samples influence each other."""

    def forward(self, x):
        return x - x.mean(0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Noting(), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))


def summed(outputs, labels):
    return cross_entropy(outputs, labels, reduction="sum")


def records(count=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 5, 5, generator=generator), torch.arange(count) % 4


def single(model, x, y):
    parameters = list(model.parameters())
    gradients = []
    for i in range(len(x)):
        found = torch.autograd.grad(summed(model(x[i : i + 1]), y[i : i + 1]), parameters)
        gradients.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(gradients)


def test_sums_are_those_of_clipped_single_gradients_at_any_theta():
    model, (x, y) = network().double(), records()
    x = x.double()
    sums = EngineSums(model, summed, 0.7, None, x, y)
    for scale in (1.0, 0.5):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        theta = nn.utils.parameters_to_vector(model.parameters()).detach()
        gradients = single(model, x, y)
        factors = (0.7 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
        wanted = (gradients * factors).sum(0)
        for at_a_time in (1, 3, 512):
            torch.testing.assert_close(sums.of(theta, x, y, at_a_time), wanted)
    assert not sums.of(theta, x[:0], y[:0], 512).any()


def test_the_trial_sees_no_record_and_records_go_through_the_model_once():
    model, (x, y) = network(), records()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    SEEN.clear()
    sums = EngineSums(model, summed, 1.0, None, x, y)
    tried = torch.cat([seen.flatten(1) for seen in SEEN])
    distances = torch.cdist(tried, x.flatten(1))
    assert len(tried) > 0 and distances.min() > 0.1
    for part in (x, x[:1], x[:5]):
        SEEN.clear()
        sums.of(theta, part, y[: len(part)], 512)
        assert len(SEEN) == 1 and torch.equal(SEEN[0], part)


def test_the_trial_leaves_the_generator_and_the_model_alone():
    model, (x, y) = network(), records()
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    EngineSums(model, summed, 1.0, None, x, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(model)


def test_tokens_are_drawn_from_the_table():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randint(3, (5, 4)), torch.zeros(5, dtype=torch.int64)
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    found = EngineSums(model, summed, 1e6, None, x, y).of(theta, x, y, 2)
    torch.testing.assert_close(found, single(model, x, y).sum(0), rtol=1e-5, atol=1e-6)


def test_a_model_that_mixes_records_is_refused_before_it_gets_one():
    model, (x, y) = nn.Sequential(Mixing(), nn.Flatten(), nn.Linear(25, 4)), records()
    with pytest.raises(Unsupported):
        EngineSums(model, summed, 1.0, None, torch.zeros_like(x), y)
