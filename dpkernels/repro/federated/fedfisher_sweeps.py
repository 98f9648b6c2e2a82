"""What Theorem 1 of FedFisher is about, measured over widths and over local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkernels.repro.federated.fedfisher_two_layer import (
    Scene,
    Server,
    descend,
    draw,
    features,
    loss,
)

SERVER_RATE = 0.001  # eta_S of Appendix D
SERVER_STEPS = (10_000, 100_000, 1_000_000)
# Neurons that are trained at once: enough to outweigh a call's overhead, few enough for a cache.
_TOGETHER = 16384


@dataclass(frozen=True)
class Sweep:
    """What is varied: widths at one K, or local steps at one width.

    shared: the clients agree on their labels. rate: eta. joint: also one model trained on all
    clients' records, for as many steps at the same rate.
    """

    widths: tuple[int, ...]
    steps: tuple[int, ...]
    shared: bool = False
    rate: float = 0.1
    joint: bool = False
    seeds: int = 10

    @property
    def by_width(self) -> bool:
        """Whether the width is what is varied."""
        return len(self.widths) > 1


@dataclass(frozen=True)
class Cell:
    """One width and K. values: a figure for each seed, by its name."""

    width: int
    steps: int
    values: dict[str, list[float]]


@dataclass(frozen=True)
class Swept:
    """A sweep, its cells, and who ran it."""

    sweep: Sweep
    cells: list[Cell]
    where: dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is run. Sweeps over widths are at K = ``at_steps``, those over K at ``at_width``."""

    seeds: int = 10
    widths: tuple[int, ...] = tuple(2**k for k in range(5, 13))
    steps: tuple[int, ...] = tuple(2**k for k in range(14))
    at_width: int = 512
    at_steps: int = 2048


def sweeps(scale: Scale) -> list[Sweep]:
    """Return what is run: the two panels of Figure 1, a larger local rate, and the control."""
    by_width = Sweep(scale.widths, (scale.at_steps,), seeds=scale.seeds)
    by_steps = Sweep((scale.at_width,), scale.steps, joint=True, seeds=scale.seeds)
    return [
        by_width,
        by_steps,
        replace(by_steps, rate=1.0, joint=False),
        replace(by_width, shared=True),
        replace(by_steps, shared=True),
    ]


def measure(scene: Scene, models: Tensor) -> dict[str, float]:
    """Return losses and distances of what a server makes of clients' models ``[M, m, 2]``.

    ``local`` is each client's loss at home, ``fedavg`` that of the mean, ``limit`` L(W*),
    ``after_T`` that of T steps of gradient descent; ``linear`` is the loss at W* of the
    linearised models phi_ij . W, what L(W*) would be without the Laplace error. ``patience`` is
    after how many steps the slowest direction is a share 1/e away from W*.
    Distances are of a neuron, the largest: ``moved`` |w_i - w_0|, ``apart`` |w_i - w_j|,
    ``limit_away`` and ``after_T_away`` from the clients' neurons to the server's.
    """
    server = Server.of(models, scene.signs, scene.inputs)
    limit = server.limit()
    predicted = features(models, scene.signs, scene.inputs) @ limit.flatten()
    found = {
        "local": loss(models, scene),
        "fedavg": loss(models.mean(0), scene),
        "limit": loss(limit, scene),
        "linear": float((predicted - scene.labels).square().mean()) / 2,
        "rank": float(len(server.values)),
        "patience": 1 / (SERVER_RATE * float(server.values[-1]) ** 2),
        "moved": _furthest(models, scene.weights),
        "apart": max(_furthest(models, model) for model in models),
        "limit_away": _furthest(models, limit),
    }
    for steps in SERVER_STEPS:
        weights = server.after(steps, SERVER_RATE)
        found[f"after_{steps}"] = loss(weights, scene)
        found[f"after_{steps}_away"] = _furthest(models, weights)
    return found


def _furthest(models: Tensor, other: Tensor) -> float:
    return float((models - other).norm(dim=-1).max())


def run(sweep: Sweep) -> list[Cell]:
    """Train all clients of a sweep and measure; cells are ordered by width, then K."""
    cells = []
    for width in sweep.widths:
        values: dict[int, list[dict[str, float]]] = {steps: [] for steps in sweep.steps}
        together = max(1, _TOGETHER // (2 * width))
        for first in range(0, sweep.seeds, together):
            seeds = range(first, min(first + together, sweep.seeds))
            scenes = [draw(seed, width, shared=sweep.shared) for seed in seeds]
            trained = _train(scenes, sweep)
            joint = _train([_pooled(scene) for scene in scenes], sweep) if sweep.joint else None
            for steps in sweep.steps:
                for n, scene in enumerate(scenes):
                    figures = measure(scene, trained[steps][n])
                    if joint is not None:
                        figures["joint"] = loss(joint[steps][n, 0], scene)
                    values[steps].append(figures)
        for steps, rows in values.items():
            by_name = {name: [float(f"{row[name]:.6g}") for row in rows] for name in rows[0]}
            cells.append(Cell(width, steps, by_name))
    return cells


def _pooled(scene: Scene) -> Scene:
    """Return the scene with one client, who has all records."""
    inputs, labels = scene.inputs.flatten(0, 1)[None], scene.labels.flatten()[None]
    return Scene(inputs, labels, scene.weights, scene.signs)


def _train(scenes: Sequence[Scene], sweep: Sweep) -> dict[int, Tensor]:
    """Return all clients' models ``[scenes, M, m, 2]`` by number of steps."""
    clients = len(scenes[0].inputs)
    trained = descend(
        torch.stack([s.weights for s in scenes]).repeat_interleave(clients, 0),
        torch.stack([s.signs for s in scenes]).repeat_interleave(clients, 0),
        torch.cat([s.inputs for s in scenes]),
        torch.cat([s.labels for s in scenes]),
        rate=sweep.rate,
        marks=sweep.steps,
    )
    return {k: models.unflatten(0, (len(scenes), clients)) for k, models in trained.items()}
