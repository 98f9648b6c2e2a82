"""Local steps ask for sums whose last rounding the stated sensitivity covers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from dpkernels.federated.algorithms.gradients import MOST
from dpkernels.federated.algorithms.local_training import private_steps


class Asked:
    """A problem that notes the norm its sums are to be projected to."""

    def __init__(self):
        self.most = []

    def clipped_gradient_sums(self, cohort, theta, bound, most=math.inf):
        self.most.append(most)
        return torch.zeros_like(theta)


def test_every_step_projects_a_clients_sum_before_it_is_rounded():
    problem = Asked()
    visit = SimpleNamespace(
        sent={"theta": torch.zeros(3)},
        cohort=[0, 1],
        terms=SimpleNamespace(shape=(3,), records=10.0),
        seeds=lambda: torch.zeros(2, dtype=torch.int64),
        draw=lambda: [0, 1],
        problem=problem,
        noisy=lambda values: values,
    )
    private_steps(visit, clip=1.0, steps=2, lr=0.1)
    assert problem.most == [MOST * 10.0] * 2
