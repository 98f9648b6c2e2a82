"""What every framework trains: softmax regression by one step, or a CNN by a local epoch.

Needs torch alone, so that the peers' environments can import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from benchmarks.federated.workload import CLIP, LR, Size, records_of

Workload = Literal["softmax", "cifar"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
# pfl-research's CIFAR-10 benchmark: cohorts of 50 users with 50 records each.
CIFAR_SIZE = Size(clients=50, records=50, features=3 * 32 * 32, classes=10)
# Of its private runs: rate of local SGD, bound of a user's update.
_CIFAR_LR, _CIFAR_CLIP, _CIFAR_BATCH = 0.1, 0.4, 10


class Classifier(nn.Module):
    """Any network of logits, with ``loss`` as pfl wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, classes]``."""
        logits: Tensor = self.network(x)
        return logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self(x), y)


@dataclass(frozen=True)
class Task:
    """One workload at one size.

    network: makes the model, the same each time. records: makes all clients' inputs ``[clients,
        records, ...]`` float32 and labels int64.
    lr: of local SGD, one epoch of batches of ``batch`` records; None for all in one step.
    clip: of a client's update.
    """

    workload: Workload
    size: Size
    network: Callable[[], nn.Module]
    records: Callable[[], tuple[Tensor, Tensor]]
    lr: float
    clip: float
    batch: int | None

    def mean_loss(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of all clients' records, without dropout."""
        training = model.training
        model.eval()
        with torch.no_grad():
            losses = [
                nn.functional.cross_entropy(model(x), y)
                for x, y in zip(*self.records(), strict=True)
            ]
        model.train(training)
        return torch.stack(losses).mean().item()


def task_of(workload: Workload, size: Size) -> Task:
    """Return the task of that name at ``size``; ``cifar`` is for images of 3 x 32 x 32."""
    if workload == "softmax":
        # A client's update is the rate times a gradient, and so is its bound.
        return Task(
            workload, size, lambda: _softmax(size), lambda: records_of(size), LR, LR * CLIP, None
        )
    if size.features != CIFAR_SIZE.features:
        raise ValueError(
            f"task_of: cifar needs {CIFAR_SIZE.features} features, got {size.features}"
        )
    return Task(
        workload,
        size,
        lambda: simple_cnn(size.classes),
        lambda: images_of(size),
        _CIFAR_LR,
        _CIFAR_CLIP,
        _CIFAR_BATCH,
    )


def _softmax(size: Size) -> nn.Module:
    linear = nn.Linear(size.features, size.classes, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def simple_cnn(classes: int = 10, seed: int = 0) -> nn.Sequential:
    """Return the CNN of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters.

    Its layers, sizes and initial distribution (Glorot), from its published description.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p, generator=generator)
        else:
            nn.init.zeros_(p)
    return model


def images_of(size: Size, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images of CIFAR-10's shape: a pattern for each class, and noise. Time is the same."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(size.classes, 3, 32, 32, generator=generator)
    labels = torch.randint(size.classes, (size.clients, size.records), generator=generator)
    noise = torch.randn(*labels.shape, 3, 32, 32, generator=generator)
    return noise.add_(patterns[labels], alpha=0.3), labels
