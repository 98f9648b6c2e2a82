"""Without noise, gradients are those of Opacus, on five families of models."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.training.models import Transformer, cnn, mlp, resnet20
from dpkernels.ops.ghost.rounding import norm_limit
from python_tests.engine.oracle import gradients_of, private
from python_tests.optional_packages import optional_package

opacus = optional_package("opacus")
layers = optional_package("opacus.layers")

BOUND = 0.5


class Recurrent(nn.Module):
    """An LSTM whose last output is classified."""

    def __init__(self, kind):
        super().__init__()
        self.lstm = kind(5, 7, batch_first=True)
        self.head = nn.Linear(7, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def lstms():
    ours, theirs = Recurrent(nn.LSTM), Recurrent(layers.DPLSTM)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            theirs.get_parameter(name).copy_(parameter)
    return ours, theirs


def twins(make):
    def made():
        model = make()
        return model, copy.deepcopy(model)

    return made


FAMILIES = {
    "MLP": (twins(lambda: mlp(20, 16)), lambda: torch.randn(6, 20)),
    "CNN": (twins(cnn), lambda: torch.randn(4, 1, 28, 28)),
    "LSTM": (lstms, lambda: torch.randn(6, 9, 5)),
    "transformer": (twins(lambda: Transformer(2, 16, 8)), lambda: torch.randint(1000, (5, 8))),
    "ResNet-20": (twins(resnet20), lambda: torch.randn(3, 3, 16, 16)),
}


def our_gradients(model, x, y):
    _, optimizer = private(model, BOUND, expected_batch_size=len(y), loss_reduction="mean")
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return gradients_of(model)


def their_gradients(model, x, y):
    """Return gradients, and the sums of what samples add to them, without signs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, optimizer, _ = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 1.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(y)),
            noise_multiplier=0.0,
            max_grad_norm=BOUND,
            poisson_sampling=False,
        )
        cross_entropy(wrapped(x), y).backward()
    rows = [g.flatten(1) for g in optimizer.grad_samples]
    norms = torch.cat(rows, 1).norm(dim=1)
    assert (norms > BOUND).any()
    factors = (BOUND / norms).clamp(max=1) / len(y)
    sizes = {id(p): factors @ g.abs() for p, g in zip(optimizer.params, rows, strict=True)}
    optimizer.step()
    magnitudes = {name: sizes[id(p)].view(p.shape) for name, p in model.named_parameters()}
    return gradients_of(model), magnitudes


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_opacus(family):
    torch.manual_seed(0)
    make, inputs = FAMILIES[family]
    (ours, theirs), x = make(), inputs()
    y = torch.randint(10, (x.shape[0],))
    narrow = our_gradients(copy.deepcopy(ours), x, y)
    x = x.double() if x.is_floating_point() else x
    gradients = our_gradients(ours.double(), x, y)
    wanted, magnitudes = their_gradients(theirs.double(), x, y)
    # Opacus divides norms n above C by n + 1e-6 instead of n, and ours may be high by a limit.
    factor = 1e-6 / BOUND + norm_limit(torch.float64, 1)
    # How far rounding reaches is measured in float32; in float64 it is so many times smaller, and
    # another factor of 4 covers two sums, each in an order of its own.
    smaller = 4 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    rounding = smaller * max(float((narrow[n] - g).abs().max()) for n, g in gradients.items())
    for name, gradient in gradients.items():
        difference = (gradient - wanted[name]).abs()
        assert (difference <= factor * magnitudes[name] + rounding).all(), name
