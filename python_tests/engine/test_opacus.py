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
from python_tests.engine.oracle import gradients_of, private

opacus = pytest.importorskip("opacus")
layers = pytest.importorskip("opacus.layers")


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


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_opacus(family):
    torch.manual_seed(0)
    make, inputs = FAMILIES[family]
    (ours, theirs), x = make(), inputs()
    ours, theirs = ours.double(), theirs.double()
    x = x.double() if x.is_floating_point() else x
    y = torch.randint(10, (x.shape[0],))
    bound = 0.5
    _, optimizer = private(ours, bound, expected_batch_size=len(y), loss_reduction="mean")
    cross_entropy(ours(x), y).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, wrapped_optimizer, _ = opacus.PrivacyEngine().make_private(
            module=theirs,
            optimizer=torch.optim.SGD(theirs.parameters(), 1.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(y)),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
        )
        cross_entropy(wrapped(x), y).backward()
        wrapped_optimizer.step()
    wanted = gradients_of(theirs)
    for name, gradient in gradients_of(ours).items():
        # Opacus divides by norm + 1e-6, and norms here are above 0.1 wherever they are clipped.
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6 * bound)
