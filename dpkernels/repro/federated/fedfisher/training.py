"""Client models: trained once, kept on disk, and read by whoever merges them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkernels.federated.build import network_problem
from dpkernels.federated.model import ModelProblem
from dpkernels.federated.problem import Layer, LocalSGD
from dpkernels.repro import provenance
from dpkernels.repro.federated.fedfisher.scene import Parted, Scene, parted
from dpkernels.whole_file import whole_file

State = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Trained:
    """The clients of a scene after training.

    start: ``[D]`` float32, what they started from. models: ``[M, D]``, start for an empty client.
    sizes: records of each. seconds: of training, all of them. origin: who trained them.
    """

    scene: Scene
    start: Tensor
    models: Tensor
    sizes: list[int]
    seconds: float
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def present(self) -> list[int]:
        """Numbers of the clients that have records: the others upload nothing."""
        return [client for client, size in enumerate(self.sizes) if size]


def problem_of(scene: Scene, records: Parted | None = None) -> ModelProblem:
    """Return the network over the clients; its first parameters are decided by the seed."""
    records = records or parted(scene)
    return network_problem(scene.model, records.data, records.parts, scene.seed)


def local_of(scene: Scene) -> LocalSGD:
    """Return what a client does."""
    return LocalSGD(scene.local_epochs, scene.batch_size, scene.lr, momentum=scene.momentum)


def state_of(layers: tuple[Layer, ...], theta: Tensor) -> dict[str, Tensor]:
    """Return parameters by name; theta: ``[D]``."""
    found = {}
    for layer in layers:
        size = torch.Size(layer.shape)
        found[layer.name] = theta[layer.begin : layer.begin + size.numel()].view(size).clone()
    return found


def vector_of(layers: tuple[Layer, ...], state: State) -> Tensor:
    """Return the inverse of ``state_of``."""
    return torch.cat([state[layer.name].detach().float().flatten() for layer in layers])


def client_seeds(scene: Scene) -> Tensor:
    """Return what decides the clients' orders of records, int64 ``[M]``: a client's is its own."""
    names = [f"{scene.seed} {scene.round} {client}" for client in range(scene.clients)]
    digests = [hashlib.sha256(name.encode()).digest()[:7] for name in names]
    return torch.tensor([int.from_bytes(digest) for digest in digests])


def train(scene: Scene, start: Tensor | None = None) -> Trained:
    """Train every client from ``start``, ``[D]``, or the first parameters of the seed."""
    origin = origin_of_run()
    problem = problem_of(scene)
    theta = problem.initial() if start is None else start
    cohort = problem.cohort(torch.arange(scene.clients))
    began = time.perf_counter()
    moved = problem.local_updates(cohort, theta, local_of(scene), client_seeds(scene))
    seconds = time.perf_counter() - began
    sizes = parted(scene).parts.sizes.tolist()
    return Trained(scene, theta, theta + moved, sizes, seconds, origin)


@cache
def origin_of_run() -> dict[str, Any]:
    """Return the commit and the processor when a process began: later edits do not run."""
    return {**provenance.commit(), "cpu": provenance.cpu_model()}


def read(scene: Scene, folder: Path) -> Trained | None:
    """Return what ``folder`` has of ``scene``, if it does."""
    path = _file(scene, folder)
    if not path.exists():
        return None
    kept = torch.load(path, weights_only=True)
    names = ("start", "models", "sizes", "seconds", "origin")
    return Trained(scene, *(kept[name] for name in names))


def keep(trained: Trained, folder: Path) -> Trained:
    """Write client models, whole or not at all, with who trained them; return them."""
    content = {
        "scene": dataclasses.asdict(trained.scene),
        "start": trained.start,
        "models": trained.models,
        "sizes": trained.sizes,
        "seconds": trained.seconds,
        "origin": dict(trained.origin),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(_file(trained.scene, folder)) as partial:
        torch.save(content, partial)
    return trained


def _file(scene: Scene, folder: Path) -> Path:
    return folder / f"{scene.digest}.pt"
