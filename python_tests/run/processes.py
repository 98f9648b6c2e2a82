"""Scenarios of runs in several processes; each returns what its rank has seen."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels.privacy.samplers import PoissonSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from python_tests.engine.distributed.processes import error_of, full
from python_tests.run.training import RATE, RECORDS, train


def made(wrap, seed=3, physical=None):
    """Return a run over all processes, and its scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    data = TensorDataset(torch.randn(RECORDS, 6), torch.arange(RECORDS) % 3)
    model = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    sampler = PoissonSampler(
        RECORDS, RATE, seed=seed, rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    training = dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        expected_batch_size=sampler.expected_batch_size,
        loss_reduction="mean",
        noise_key=dpkernels.NoiseKey.from_seed(seed),
    )
    loader = PrivateLoader(data, sampler, max_physical_batch_size=physical)
    run = PrivateRun(training, loader, accountant="rdp")
    return run, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def shared_folder() -> Path:
    """Return a folder that all ranks know."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def parameters(run) -> list[torch.Tensor]:
    return [full(p) for p in run.training.model.parameters()]


def resumed(wrap) -> dict:
    """Train, with a checkpoint on the way; go on from it as another process would."""
    folder = shared_folder()
    run, scheduler = made(wrap)

    def at(step: int, place: str) -> None:
        if (step, place) == (2, "after save"):
            run.save(folder / "run.pt", scheduler=scheduler)

    train(run, scheduler, 6, at)
    again, scheduler = made(wrap)
    again.load(folder / "run.pt", scheduler=scheduler)
    train(again, scheduler, 6)
    return {
        "files": sorted(file.name for file in folder.iterdir()),
        "whole": parameters(run),
        "resumed": parameters(again),
        "epsilons": (run.epsilon(1e-5), again.epsilon(1e-5)),
        "batches": list(run.loader.private_sampler),
    }


def ddp_resumed() -> dict:
    return resumed(nn.parallel.DistributedDataParallel)


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def fsdp_resumed() -> dict:
    return resumed(sharded)


def microbatches_of_shards() -> str:
    return error_of(lambda: made(sharded, physical=2))


def two_checkpoints() -> tuple[PrivateRun, Path, Any]:
    """Return a run with checkpoints after steps 2 and 4; the first is kept beside as old."""
    folder, rank = shared_folder(), dist.get_rank()
    run, scheduler = made(nn.parallel.DistributedDataParallel)
    own = folder / f"run.pt.rank{rank}"
    train(run, scheduler, 2)
    run.save(folder / "run.pt", scheduler=scheduler)
    shutil.copy(own, folder / f"old{rank}")
    train(run, scheduler, 4)
    run.save(folder / "run.pt", scheduler=scheduler)
    return run, own, scheduler


def broken_off_between_files() -> int:
    """Return the step that is resumed where one rank's new file had not got its name yet."""
    run, own, scheduler = two_checkpoints()
    if dist.get_rank() == 1:
        own.replace(f"{own}.new")
        (own.parent / "old1").replace(own)
    run.load(own.with_suffix(""), scheduler=scheduler)
    return run.training.steps


def broken_off_before_all_have_written() -> int:
    """Return the step that is resumed where only one rank has a new file."""
    run, own, scheduler = two_checkpoints()
    if dist.get_rank() == 1:
        own.replace(f"{own}.new")
    (own.parent / f"old{dist.get_rank()}").replace(own)
    run.load(own.with_suffix(""), scheduler=scheduler)
    return run.training.steps


def of_two_attempts() -> int:
    """Return the step that is resumed where ranks have files of step 4 from different attempts."""
    run, own, scheduler = two_checkpoints()
    first = own.parent / f"first{dist.get_rank()}"
    own.replace(first)
    shutil.copy(own.parent / f"old{dist.get_rank()}", own)
    run.load(own.with_suffix(""), scheduler=scheduler)
    train(run, scheduler, 4)
    run.save(own.with_suffix(""), scheduler=scheduler)
    # Rank 0 died before it wrote in the second attempt, rank 1 in the first.
    (first if dist.get_rank() == 0 else own).replace(f"{own}.new")
    (own.parent / f"old{dist.get_rank()}").replace(own)
    run.load(own.with_suffix(""), scheduler=scheduler)
    return run.training.steps


def saved_in_the_middle_of_a_step() -> str:
    """Return what each rank says where only one has samples."""
    run, scheduler = made(nn.parallel.DistributedDataParallel)
    if dist.get_rank() == 0:
        run.training.model(torch.randn(2, 6)).sum().backward()
    return error_of(lambda: run.save(shared_folder() / "run.pt", scheduler=scheduler))


def sampler_of_another_rank() -> str:
    run, _ = made(nn.parallel.DistributedDataParallel)
    run.close()
    data = run.loader.dataset
    return error_of(
        lambda: PrivateRun(run.training, PrivateLoader(data, PoissonSampler(RECORDS, 1.0)))
    )


def batch_taken_back_on_one_rank() -> tuple[str, bool, int, float]:
    """Return what a step says to which rank 0 brings no samples, and what comes after it."""
    run, _ = made(nn.parallel.DistributedDataParallel)
    x, y = next(iter(run.loader))
    nn.functional.cross_entropy(run.training.model(x), y).backward()
    if dist.get_rank() == 0:
        run.training.optimizer.zero_grad()
    error = error_of(run.training.optimizer.step)
    again, y = next(iter(run.loader))
    nn.functional.cross_entropy(run.training.model(again), y).backward()
    run.training.optimizer.step()
    next(iter(run.loader))
    return error, torch.equal(x, again), run.training.steps, run.loader.batches_handed_out


ALL = [
    batch_taken_back_on_one_rank,
    ddp_resumed,
    fsdp_resumed,
    broken_off_between_files,
    broken_off_before_all_have_written,
    of_two_attempts,
    saved_in_the_middle_of_a_step,
    sampler_of_another_rank,
    microbatches_of_shards,
]
