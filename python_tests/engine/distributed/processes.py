"""Scenarios in real processes, gloo between them: each returns what its rank has seen."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpkernels
from python_tests.engine.models import made
from python_tests.engine.oracle import private, square

Scenario = Callable[[], Any]

# How many of 7 samples each rank has; one of four has none.
PARTS = {1: [7], 2: [5, 2], 4: [4, 0, 2, 1]}


def run(scenarios: Sequence[Scenario], world: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each scenario returns on each of ``world`` ranks, by its name."""
    names = [(scenario.__module__, scenario.__name__) for scenario in scenarios]
    torch.multiprocessing.spawn(_work, (names, world, str(folder)), nprocs=world)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def _work(rank: int, names: Sequence[tuple[str, str]], world: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Ranks that miss each other fail in the end.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=3),
    )
    found = {name: getattr(importlib.import_module(module), name)() for module, name in names}
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def own_part(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return this rank's samples of 7."""
    parts = PARTS[dist.get_world_size()]
    first = sum(parts[: dist.get_rank()])
    return tuple(x[first : first + parts[dist.get_rank()]] for x in inputs)


def ddp(model: nn.Module) -> nn.Module:
    """Return the model as DDP wraps it."""
    return nn.parallel.DistributedDataParallel(model)


def backward(model: nn.Module, inputs: Sequence[Tensor], *, mean: bool = False) -> None:
    """Backward passes over this rank's part, two samples at a time; none without samples."""
    samples = own_part(inputs)
    for first in range(0, samples[0].shape[0], 2):
        losses = square(model(*(x[first : first + 2] for x in samples)))
        (losses.mean() if mean else losses.sum()).backward()


def full(tensor: Tensor) -> Tensor:
    """Return a copy, of all shards if it is sharded."""
    whole = getattr(tensor, "full_tensor", None)
    return (tensor if whole is None else whole()).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return ``grad`` of all trained parameters, whole, by their name inside of DDP."""
    inner = getattr(model, "module", model)
    return {n: full(p.grad) for n, p in inner.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, whole, by their name inside of DDP."""
    inner = getattr(model, "module", model)
    return {n: full(p) for n, p in inner.named_parameters()}


def one_step(
    name: str, wrap: Callable[[nn.Module], nn.Module], bound: float, **options: Any
) -> dict[str, Tensor]:
    """Return gradients without noise, of 7 samples over the ranks, divided by 3."""
    model, inputs = made(name)
    model = wrap(model)
    _, optimizer = private(model, bound, expected_batch_size=3.0, **options)
    backward(model, inputs, mean=options.get("loss_reduction") == "mean")
    optimizer.step()
    return gradients(model)


def three_steps(
    model: nn.Module, inputs: Sequence[Tensor], each: Callable[[nn.Module, Any], None]
) -> dict[str, Tensor]:
    """Return the parameters after three steps of Adam without noise, on other samples each time."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with_options(model, optimizer)
    for shift in range(3):
        optimizer.zero_grad()
        each(model, [x.roll(shift, 1) for x in inputs])
        optimizer.step()
    return parameters(model)


def with_options(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Return private training, by default of clipped sums without noise."""
    arguments: Mapping[str, Any] = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.2,
        "expected_batch_size": 3.0,
        "loss_reduction": "sum",
    }
    return dpkernels.make_private(model, optimizer, **{**arguments, **options})


def error_of(function: Callable[[], Any]) -> str:
    """Return what it says when it raises; an empty string if it does not."""
    try:
        function()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
