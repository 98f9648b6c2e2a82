"""Small networks and federations for the tests of FedFisher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.federated import Federation, FedFisher, ModelProblem, Terms
from python_tests.federated.cases import quietly

CLASSES = 3
COUNTS = (9, 14, 0, 6)


def convolutional() -> nn.Sequential:
    """Return a convolution without a bias and one with, then a linear layer; ``[N, 1, 6, 6]``."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False),
        nn.Tanh(),
        nn.Conv2d(2, 3, 2, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, CLASSES),
    )


def linear() -> nn.Sequential:
    """Return two linear layers with biases; ``[N, 4]``."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


NETWORKS = {"convolutional": (convolutional, (1, 6, 6)), "linear": (linear, (4,))}


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a network with the same parameters every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name][0]().to(dtype)


def inputs(name: str, count: int, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return records for the network ``name``."""
    generator = torch.Generator().manual_seed(seed)
    shape = NETWORKS[name][1]
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)


def problem(
    name: str = "linear",
    counts: Any = COUNTS,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> ModelProblem:
    """Return a network over clients, one of them without records."""
    total = sum(counts)
    x = inputs(name, total, dtype=dtype)
    y = torch.randint(CLASSES, (total,), generator=torch.Generator().manual_seed(2))
    parts = list(torch.arange(total).split(list(counts)))
    return ModelProblem(network(name, dtype), x, y, parts, x[:8], y[:8], **options)


def federation(algorithm: FedFisher, held: ModelProblem, **options: Any) -> Federation:
    """Return a federation at epsilon 5, unless noise or no budget is asked for."""
    changes = {"rounds": options.pop("rounds", 1), "unit": options.pop("unit", "record")}
    changes |= {"view": options.pop("view", "each_upload")}
    told = Terms(held.clients, 8.0, held.shape, adjacency="add-remove", **changes)
    chosen: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-3, "seed": 1, "accountant": "gaussian"}
    return quietly(Federation, algorithm, held, told, **chosen | options)


PLAIN = FedFisher(training="sgd", local_epochs=2, local_batch=4, local_lr=0.1)
PRIVATE = FedFisher(local_steps=3, local_lr=0.3, factor_steps=2)
SETTINGS = {
    "plain": (PLAIN, {"epsilon": None}),
    "plain diagonal": (FedFisher(training="sgd", fisher="diagonal"), {"epsilon": None}),
    "records": (PRIVATE, {}),
    "records drawn": (PRIVATE, {"record_rate": 0.5, "accountant": "rdp"}),
    "records diagonal": (FedFisher(local_steps=2, fisher="diagonal"), {}),
    "probes": (FedFisher(local_steps=2, factors="probes"), {}),
    "public": (FedFisher(local_steps=2, factors="public", weights="equal"), {}),
    "none": (FedFisher(local_steps=2, factors="none", weights="equal"), {}),
    "none weighted": (FedFisher(local_steps=2, factors="none"), {}),
    "dp-kfc": (FedFisher(local_steps=2, training="dp-kfc", factors="none", weights="equal"), {}),
}


def made(name: str, held: ModelProblem | None = None, **options: Any) -> Federation:
    """Return the federation of one of ``SETTINGS``."""
    algorithm, chosen = SETTINGS[name]
    public = inputs("linear", 10, seed=4, dtype=torch.float32)
    held = held or problem(public=public)
    return federation(algorithm, held, **chosen | options)
