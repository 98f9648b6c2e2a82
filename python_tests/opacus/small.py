"""A small classifier to be trained privately, for tests of what surrounds it."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.opacus import PrivacyEngine

RECORDS, BATCH = 20, 5


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def records(count=RECORDS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def arguments(**changes):
    """Return arguments of ``make_private``, quiet but for what ``changes`` are about."""
    model = changes.pop("module", None) or classifier()
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.5),
        "data_loader": DataLoader(records(), batch_size=BATCH),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.3,
    } | changes


def made(engine=None, **changes):
    """Return what ``make_private`` returns, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (engine or PrivacyEngine(accountant="rdp")).make_private(**arguments(**changes))


def made_of_halves(**changes):
    """Return the same with two batches an epoch: each is empty once in 2^20 times."""
    return made(data_loader=DataLoader(records(), batch_size=RECORDS // 2), **changes)


def train(model, optimizer, loader, epochs=1, before=lambda: None):
    """Train in the usual loop."""
    for _ in range(epochs):
        for x, y in loader:
            before()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def parameters_of(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
