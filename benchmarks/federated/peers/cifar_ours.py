"""Our round on the CIFAR-10 shape: local epochs, clipped updates, user-level noise."""

from __future__ import annotations

import torch

from benchmarks.federated.peers.asked import Noise
from benchmarks.federated.peers.tasks import Task
from dpkernels.federated import Federation, ModelProblem, Terms
from dpkernels.federated.algorithms import UDPFedAvg
from dpkernels.privacy.samplers import PoissonSampler

# pfl-research's benchmark: 1,500 rounds for epsilon 2.
_PLANNED, _EPSILON, _DELTA = 1500, 2.0, 1e-6


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
    algorithm = UDPFedAvg(
        lr=1.0,
        clip=task.clip,
        local_epochs=1,
        local_batch=task.batch or size.records,
        local_lr=task.lr,
    )
    return Federation(
        algorithm,
        problem,
        terms,
        epsilon=epsilon,
        delta=_DELTA,
        sampler=PoissonSampler(size.clients, 1.0) if noise == "central" else None,
    )
