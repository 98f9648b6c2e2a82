"""Runs that leave batches out by what is in them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.adversary.attack import Attack, Claim, attack
from benchmarks.adversary.moved import losses, private
from dpkernels.privacy.samplers import PoissonSampler
from dpkernels.run import PrivateLoader, PrivateRun

STEPS = 60
UNCOUNTED = Claim("batches left out, uncounted", most=0)


def bad(x: Tensor) -> bool:
    """Return whether the record that the attacker looks for is in the batch."""
    return bool((x > 1e6).any())


def made() -> tuple[PrivateRun, nn.Module, torch.optim.Optimizer]:
    """Return a run over 40 records, one of them bad."""
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    x[7] = 1e7
    model = nn.Linear(3, 2)
    training, optimizer = private(model, noise_multiplier=1.0, expected_batch_size=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = PoissonSampler(40, 0.25, steps=STEPS, seed=0)
        loader = PrivateLoader(TensorDataset(x), sampler)
        return PrivateRun(training, loader, accountant="rdp"), model, optimizer


@attack(7, "if bad(x): break, then iterate again", UNCOUNTED)
def broken_off() -> float:
    """Return how many batches were drawn, looked at and dropped without being counted."""
    run, model, optimizer = made()
    while run.loader.batches_handed_out < STEPS:
        for (x,) in run.loader:
            if bad(x):
                break
            optimizer.zero_grad()
            losses(model(x)).sum().backward()
            optimizer.step()
    return run.loader.batches_handed_out - run.accountant.steps


def _skipping(discard: bool) -> float:
    """Return how many steps released noise in place of a batch with records, and cost nothing.

    discard: whether the batch goes through the model, and is then given up by ``zero_grad()``.
    """
    run, model, optimizer = made()
    skipped = 0
    for (x,) in run.loader:
        optimizer.zero_grad()
        skip = bad(x)
        if discard or not skip:
            losses(model(x)).sum().backward()
        if discard and skip:
            optimizer.zero_grad()
        skipped += skip
        optimizer.step()
    return skipped - (run.accountant.steps - run.training.steps)


@attack(7, "skip a bad batch: zero_grad(), then step()", UNCOUNTED)
def discarded() -> float:
    """The usual way to skip a loss that is not finite."""
    return _skipping(discard=True)


@attack(7, "skip a bad batch: step() without backward()", UNCOUNTED)
def no_backward() -> float:
    """The same without a pass on that batch."""
    return _skipping(discard=False)


ATTACKS: list[Attack] = [broken_off, discarded, no_backward]
