"""What processes do that train one model together with factors from probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dpkernels.postprocess import DiSK, DPAdamBC
from dpkernels.precondition import AdaDPS, ColouredNoise, Kfac
from python_tests.engine.distributed.processes import ddp, parameters, with_options
from python_tests.precondition.factors import White, cross_entropy


def network() -> nn.Module:
    """Return a model in float64, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(model: nn.Module, rank: int, world: int, adadps: bool = False) -> dict[str, Tensor]:
    """Return sides and parameters after three steps without noise, with a refresh after two.

    adadps: by AdaDPS, DiSK and DP-AdamBC instead of K-FAC and SGD.
    """
    # Each rank at another place of the global generator, and with other samples.
    torch.manual_seed(7)
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    torch.manual_seed(rank)
    options: dict[str, Any] = {"batches": 2, "batch_size": 16, "refresh_every": 2}
    kfac: Kfac | AdaDPS
    if adadps:
        kfac = AdaDPS(model, White(4), cross_entropy, **options)
    else:
        kfac = Kfac(model, White(4), cross_entropy, sides="AG", **options)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if adadps:  # and what filters, with what it filters for
        optimizer = DiSK(DPAdamBC(model.parameters(), lr=0.1, noise_std=0.0))
    with_options(model, optimizer, preconditioner=kfac)
    for batch in x:
        own = batch.chunk(world)[rank]
        model(own).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kfac.refreshes == 2
    sides: dict[str, Any] = {name: kfac.sides(name) for name in sorted(kfac.layers)}
    if adadps:
        factors = {f"{n} {p}": x for n, s in sides.items() for p, x in s.scale.values.items()}
    else:
        factors = {
            f"{n} {side}": getattr(s, side).dense() for n, s in sides.items() for side in SIDES
        }
    return factors | parameters(model)


SIDES = ("left", "right")


def _trained(wrap: Callable[[nn.Module], nn.Module], adadps: bool = False) -> dict[str, Tensor]:
    return train(wrap(network()), dist.get_rank(), dist.get_world_size(), adadps)


def other_probes() -> dict[str, str]:
    """Return why ranks with factors, or scales, of seeds of their own cannot train together."""
    refused = {}
    for kind in (Kfac, AdaDPS):
        model = network()
        own = kind(model, White(4), cross_entropy, batches=2, batch_size=16, seed=dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with_options(ddp(model), optimizer, preconditioner=own)
        except ValueError as error:
            refused[kind.__name__] = str(error)
    return refused


def other_convolutions() -> str:
    """Return why ranks with K-FAC by default cannot have seeds of their own.

    Factors of a convolution are of so many positions that they are the same to a percent.
    """
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 4, 3, padding=1)
    model = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    probe = ColouredNoise((1, 12, 12), classes=4)
    own = Kfac(model, probe, cross_entropy, batches=32, seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with_options(ddp(model), optimizer, preconditioner=own)
    except ValueError as error:
        return str(error)
    return "accepted"


def scaled_copies() -> dict[str, Tensor]:
    """Train copies by AdaDPS."""
    return _trained(ddp, adadps=True)


def scaled_shards() -> dict[str, Tensor]:
    """Train a sharded model by AdaDPS."""
    return _trained(fully_shard, adadps=True)


def copies() -> dict[str, Tensor]:
    """Train copies, by DistributedDataParallel."""
    return _trained(ddp)


def shards() -> dict[str, Tensor]:
    """Train one model that is sharded."""
    return _trained(fully_shard)
