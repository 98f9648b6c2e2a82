"""Our round on the CIFAR-10 shape: local epochs, clipped updates, user-level noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.federated.peers.asked import Noise
from benchmarks.federated.peers.tasks import Task
from dpkernels.federated import Algorithm, Federation, ModelProblem, Terms
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Query, Seen, Stage, Tensors, Visit
from dpkernels.federated.problem import LocalSGD
from dpkernels.privacy.samplers import PoissonSampler

# pfl-research's benchmark: 1,500 rounds for epsilon 2.
_PLANNED, _EPSILON, _DELTA = 1500, 2.0, 1e-6


@dataclass(frozen=True)
class ClippedUpdates(Algorithm):
    """Federated averaging: theta <- theta + the mean of clipped local updates with noise."""

    name: ClassVar[str] = "clipped-updates"
    local: LocalSGD
    clip: float

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of clipped updates: a user moves the sum by ``clip`` at most."""
        return (Stage("update", Query(terms.shape, self.clip), terms.rounds),)

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta."""
        return {"theta": theta}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy clipped updates."""
        moved = visit.problem.local_updates(
            visit.cohort, visit.sent["theta"], self.local, visit.seeds()
        )
        return visit.noisy(clip_rows(moved, self.clip)), {}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take one step."""
        return {"theta": server["theta"] + seen.mean}


def federation(task: Task, noise: Noise, epsilon: float | None = _EPSILON) -> Federation:
    """Return the federation of ``task``'s clients, who all take part in every round.

    noise: ``local``, each client's share, or ``central``, once on the sum: Poisson sampling, at a
        rate of 1.
    """
    x, labels = task.records()
    size = task.size
    parts = list(torch.arange(size.clients * size.records).split(size.records))
    problem = ModelProblem(
        task.network(), x.flatten(0, 1), labels.flatten(), parts, x[0], labels[0]
    )
    terms = Terms(
        size.clients, size.records, problem.shape, _PLANNED, "user", "aggregate", "add-remove"
    )
    return Federation(
        ClippedUpdates(LocalSGD(1, task.batch or size.records, task.lr), task.clip),
        problem,
        terms,
        epsilon=epsilon,
        delta=_DELTA,
        sampler=PoissonSampler(size.clients, 1.0) if noise == "central" else None,
    )
