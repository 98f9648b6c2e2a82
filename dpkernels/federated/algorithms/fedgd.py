"""DP-FedGD: federated gradient descent, plain or with heavy-ball momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpkernels.federated.algorithms.averaging import (
    add_iterate,
    averaged,
    check_average,
    start_average,
)
from dpkernels.federated.algorithms.gradients import client_gradients, gradient_query
from dpkernels.federated.contract import Algorithm, Seen, Stage, Tensors, Terms, Visit
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class FedGD(Algorithm):
    """v <- momentum v + G;  theta <- theta - lr v;  G the mean of the clients' noisy gradients.

    lr: > 0. clip: the norm of a record's gradient (unit user: of a client's), > 0.
    momentum: in [0, 1). average: the share of the last rounds whose iterates are averaged; 0 hands
        out the last one.
    """

    name: ClassVar[str] = "fedgd"
    lr: float = 0.5
    clip: float = 1.0
    momentum: float = 0.0
    average: float = 0.0

    def __post_init__(self) -> None:
        check_finite("FedGD", "lr", self.lr, above=0.0)
        check_finite("FedGD", "clip", self.clip, above=0.0)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"FedGD: momentum must be in [0, 1), got {self.momentum}")
        check_average("FedGD", self.average)

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of gradients."""
        return (Stage("gradient", gradient_query(terms, self.clip), terms.rounds),)

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, the velocity, and what averaging needs."""
        start = {"theta": theta, "velocity": torch.zeros_like(theta)}
        return start | start_average(theta, self.average)

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy gradients at theta."""
        return visit.noisy(client_gradients(visit, visit.sent["theta"], self.clip)), {}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take one step."""
        velocity = seen.mean.add(server["velocity"], alpha=self.momentum)
        theta = server["theta"].sub(velocity, alpha=self.lr)
        state = {"theta": theta, "velocity": velocity}
        return state | add_iterate(server, theta, self.average, terms.rounds)

    def model(self, server: Tensors) -> Tensor:
        """Return the average of the last iterates, or the last one."""
        return averaged(server)
