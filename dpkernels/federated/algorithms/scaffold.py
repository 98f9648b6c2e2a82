"""DP-Scaffold: local steps with control variates against clients that drift apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import client_gradients, gradient_query
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Tensors, Terms, Visit
from dpkernels.ops.checks import check_finite

Control = Literal["none", "uploaded", "clean"]


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """M local steps y <- y - local_lr (g_i(y) - c_i + c) from theta; clients upload theta - y.

    The server takes theta <- theta - lr mean and c = mean / (M local_lr); a client takes
    c_i <- c_i - c + (theta - y) / (M local_lr). The server has c from the mean alone, so that a
    client uploads d numbers, not 2 d. The paper's warm start of c_i is left out: the first round
    brings c_i to the same place.

    Unit record: g_i is a noisy clipped mean, released once in each local step. Unit user: local
    steps have no noise, and theta - y is clipped to ``clip`` and noised.

    control: what c_i is made of.
        ``none``: c_i = c = 0, federated averaging. Unit record under ``aggregate``: sound for one
            local step; with more, later steps depend on the client's own share of the noise: void.
        ``uploaded``: the noisy upload, as in the paper. Sound under ``each_upload``; void under
            ``aggregate``, as FedNew's dual is.
        ``clean``: the upload before its noise. Unit user only, where it is sound: an upload has
            norm ``clip`` at most whatever c_i is.
    """

    name: ClassVar[str] = "scaffold"
    lr: float = 1.0
    local_lr: float = 0.5
    local_steps: int = 5
    clip: float = 1.0
    control: Control = "uploaded"

    def __post_init__(self) -> None:
        for name in ("lr", "local_lr", "clip"):
            check_finite("Scaffold", name, getattr(self, name), above=0.0)
        if self.local_steps < 1:
            raise ValueError(f"Scaffold: local_steps must be >= 1, got {self.local_steps}")
        if self.control not in get_args(Control):
            raise ValueError(
                f"Scaffold: control must be one of {', '.join(get_args(Control))}, got "
                f"{self.control!r}"
            )

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds: of M noisy gradients each, or of one clipped difference."""
        if terms.sampled and self.control != "none":
            raise ValueError(
                f"Scaffold: control={self.control!r} needs every client in every round; let all "
                "take part, or take control='none'"
            )
        if terms.unit == "record":
            if self.control == "clean":
                raise ValueError(
                    "Scaffold: control='clean' has no bound at record level; take 'none' or "
                    "'uploaded', or unit 'user'"
                )
            query = gradient_query(terms, self.clip)
            steps = self.local_steps
            return (Stage("local step", query, terms.rounds, releases=steps, uploaded=False),)
        return (Stage("difference", Query(terms.shape, self.clip), terms.rounds),)

    def void(self, terms: Terms) -> str | None:
        """Return why the paper's own steps have no guarantee under secure aggregation."""
        if terms.view == "each_upload":
            return None
        if self.control == "uploaded":
            return (
                "control='uploaded' under 'aggregate' is the paper's: control variates are made of "
                "the client's own share of the noise, which is too little by itself"
            )
        if terms.unit == "record" and self.local_steps > 1:
            return (
                "several local steps at record level under 'aggregate' are the paper's: a later "
                "step depends on the client's own share of the noise, which is too little by itself"
            )
        return None

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta and c."""
        return {"theta": theta, "control": torch.zeros_like(theta)}

    def client_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return c_i = 0."""
        return {} if self.control == "none" else {"control": torch.zeros_like(theta)}

    def broadcast(self, stage: Stage, server: Tensors) -> Tensors:
        """Send theta, and c where it is used."""
        return {"theta": server["theta"]} if self.control == "none" else dict(server)

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return theta - y after M local steps, and the control variates."""
        terms, state, theta = visit.terms, visit.state, visit.sent["theta"]
        correction = visit.sent["control"] - state["control"] if state else 0.0
        # theta - y, added up by itself: rounded to the digits of theta, a share of the noise would
        # be lost.
        upload = theta.new_zeros(len(visit.cohort), *theta.shape)
        for _ in range(self.local_steps):
            y = theta - upload
            if terms.unit == "record":
                gradient = visit.noisy(client_gradients(visit, y, self.clip))
            else:
                gradient = visit.problem.gradient_sums(visit.cohort, y).div_(terms.records)
            upload = upload + self.local_lr * (gradient + correction)
        clean = upload
        if terms.unit == "user":
            clean = clip_rows(upload, self.clip)
            upload = visit.noisy(clean.clone())
        if not state:
            return upload, {}
        made_of = clean if self.control == "clean" else upload
        return upload, {"control": made_of / (self.local_steps * self.local_lr) - correction}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take the mean difference; c is the mean of the clients' new c_i."""
        control = server["control"]
        if self.control != "none":
            control = seen.mean / (self.local_steps * self.local_lr)
        return {"theta": server["theta"].sub(seen.mean, alpha=self.lr), "control": control}
