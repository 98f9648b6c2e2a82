"""Private runs with the optimizers of ``postprocess``, and a loop for plain parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels import NoiseKey, PoissonSampler, PrivateLoader, PrivateRun
from dpkernels.postprocess import DiSK, DPAdamBC

RECORDS = 512


def adam_bc(parameters) -> Optimizer:
    return DPAdamBC(parameters, lr=0.01)


def filtered_sgd(parameters) -> Optimizer:
    return DiSK(torch.optim.SGD(parameters, lr=0.5, momentum=0.5))


def filtered_adam(parameters) -> Optimizer:
    return DiSK(torch.optim.Adam(parameters, lr=0.02))


def filtered_adam_bc(parameters) -> Optimizer:
    return DiSK(DPAdamBC(parameters, lr=0.01))


OPTIMIZERS = [adam_bc, filtered_sgd, filtered_adam, filtered_adam_bc]


def made(build: Callable[..., Optimizer], *, sigma: float = 1.0, clip=1.0) -> PrivateRun:
    """Return a run on three separable classes, with noise and samples from a fixed seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    targets = torch.arange(RECORDS) % 3
    centres = 2 * torch.randn(3, 8)
    data = TensorDataset(centres[targets] + torch.randn(RECORDS, 8), targets)
    optimizer = build(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = PoissonSampler(RECORDS, 0.125, seed=1)
        training = dpkernels.make_private(
            model,
            optimizer,
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=sampler.expected_batch_size,
            loss_reduction="mean",
            noise_key=NoiseKey.from_seed(1),
        )
    if isinstance(optimizer, DPAdamBC | DiSK):
        optimizer.follow(training)
    return PrivateRun(training, PrivateLoader(data, sampler), accountant="rdp")


def train(run: PrivateRun, steps: int) -> None:
    """Train until ``steps`` steps are done."""
    while run.training.steps < steps:
        for x, y in run.loader:
            nn.functional.cross_entropy(run.training.model(x), y).backward()
            run.training.optimizer.step()
            run.training.optimizer.zero_grad()
            if run.training.steps == steps:
                return


def parameters_of(run: PrivateRun) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in run.training.model.parameters()])


def accuracy(run: PrivateRun) -> float:
    """Return the part of the records that the model has right."""
    x, y = run.loader.dataset.tensors
    with torch.no_grad():
        return float((run.training.model(x).argmax(1) == y).double().mean())
