"""Federated averaging of models that clients train by DP-SGD: every record is protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dpkernels.federated.algorithms.averaging import (
    add_iterate,
    averaged,
    check_average,
    start_average,
)
from dpkernels.federated.algorithms.local_training import (
    check_steps,
    private_steps,
    private_steps_stage,
    several_steps,
)
from dpkernels.federated.contract import Algorithm, Seen, Stage, Tensors, Terms, Visit
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class LocalDPSGD(Algorithm):
    """y <- y - local_lr (noisy clipped mean gradient), ``local_steps`` times; clients upload y - w.

    The server takes theta <- theta + lr mean. What FedCEO's Table 1 was made with (its UDP-FedAvg).

    Unit record. Each local step draws its records anew, with the federation's ``record_rate`` of
    each, and is accounted as one step; expected batches have |D| record_rate records.
    ``each_upload``: sound, an upload is made of releases with all their noise. ``aggregate``: void
    for more than one step, whose later ones depend on the client's own share of the noise.

    average: the share of the last rounds whose iterates are averaged.
    """

    name: ClassVar[str] = "local-dpsgd"
    lr: float = 1.0
    clip: float = 1.0
    local_steps: int = 10
    local_lr: float = 0.1
    average: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "local_lr"):
            check_finite("LocalDPSGD", name, getattr(self, name), above=0.0)
        check_steps("LocalDPSGD", self.local_steps)
        check_average("LocalDPSGD", self.average)

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of ``local_steps`` noisy gradients."""
        if terms.unit != "record":
            raise ValueError(
                f"LocalDPSGD: it protects records, got unit {terms.unit!r}; take unit 'record', or "
                "UDPFedAvg"
            )
        return (private_steps_stage(terms, self.clip, self.local_steps),)

    def void(self, terms: Terms) -> str | None:
        """Return why several steps have no guarantee under secure aggregation."""
        return several_steps(terms, self.local_steps)

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, and what averaging needs."""
        return {"theta": theta} | start_average(theta, self.average)

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return how far the noisy steps went."""
        return private_steps(visit, self.clip, self.local_steps, self.local_lr), {}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take the mean."""
        theta = server["theta"].add(seen.mean, alpha=self.lr)
        return {"theta": theta} | add_iterate(server, theta, self.average, terms.rounds)

    def model(self, server: Tensors) -> Tensor:
        """Return the average of the last iterates, or the last one."""
        return averaged(server)
