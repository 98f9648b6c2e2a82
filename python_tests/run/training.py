"""A small private run, as a user would write it, and one that can be killed anywhere."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels.engine.clipping import Adaptive
from dpkernels.privacy.samplers import PoissonSampler, ShuffledSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun

RECORDS, RATE, STEPS = 40, 0.2, 10
PLACES = ("after backward", "after step", "in save", "after save")


def made(
    seed: int | None = 1, *, clip=1.0, accountant="rdp", sigma=1.5, physical=None, shuffled=False
):
    """Return a run and its scheduler; noise and samples from ``seed``, if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 3))
    data = TensorDataset(torch.randn(RECORDS, 6), torch.arange(RECORDS) % 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = (
            ShuffledSampler(RECORDS, 8, seed=seed)
            if shuffled
            else PoissonSampler(RECORDS, RATE, seed=seed)
        )
        training = dpkernels.make_private(
            model,
            optimizer,
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=sampler.expected_batch_size,
            loss_reduction="mean",
            noise_key=None if seed is None else dpkernels.NoiseKey.from_seed(seed),
        )
    loader = PrivateLoader(data, sampler, max_physical_batch_size=physical)
    return PrivateRun(training, loader, accountant=accountant), scheduler


def train(run: PrivateRun, scheduler, steps: int, at=lambda step, place: None) -> None:
    """Train until ``steps`` steps are done; ``at`` is told where it is."""
    while run.training.steps < steps:
        for x, y in run.loader:
            step = run.training.steps
            loss = nn.functional.cross_entropy(run.training.model(x), y)
            loss.backward()
            if not run.loader.is_last_microbatch:
                continue
            at(step, "after backward")
            run.training.optimizer.step()
            at(step, "after step")
            run.training.optimizer.zero_grad()
            scheduler.step()
            at(step, "in save")
            at(step, "after save")
            if run.training.steps == steps:
                return


def made_to_die(seed: int | None, shuffled: bool):
    """Return a run with all that a checkpoint has to keep: bound, microbatches, place."""
    return made(seed, clip=Adaptive(1.0), physical=3, shuffled=shuffled)


def main(checkpoint: str, log: str, seed: int | None, shuffled: bool, *death: Any) -> None:
    """Train on from ``checkpoint``, if it is there, until the end or until death.

    death: the step and the place at which the process kills itself.
    """
    run, scheduler = made_to_die(seed, shuffled)
    if Path(checkpoint).exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.load(checkpoint, scheduler=scheduler)
    file = open(log, "a", buffering=1)  # noqa: SIM115
    key = run.training.noise_key

    def note() -> None:
        print(json.dumps([run.training.steps, key.key, key.counter]), file=file)

    run.training.before_release(note)

    def at(step: int, place: str) -> None:
        dies = death == (step, place)
        if place == "in save":
            if dies:
                die_while_writing()
            run.save(checkpoint, scheduler=scheduler, extra={"step": step})
        elif dies:
            os.kill(os.getpid(), signal.SIGKILL)

    train(run, scheduler, STEPS, at)


def die_while_writing() -> None:
    """Make the next checkpoint end in the middle of its bytes."""
    whole = torch.save

    def half(state, target) -> None:
        whole(state, target)
        target.truncate(target.tell() // 2)
        target.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
