"""CENTAUR: clients share a representation, and each keeps a head of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpkernels.federated.algorithms.fedceo import last_modules
from dpkernels.federated.algorithms.local_training import check_steps
from dpkernels.federated.algorithms.ppsgd import only_finite
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Tensors, Terms, Visit
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class Centaur(Algorithm):
    """A client fits its head, the representation fixed, then moves the representation, head fixed.

    The head is the last module, the representation all others. ``head_steps`` of gradient descent
    at ``personal_lr`` for the head, from where the client left it, then ``local_steps`` at
    ``local_lr`` for the representation; how far that came is clipped to ``clip``, noised and
    uploaded; the server adds lr times the mean. After Shen et al. (2023). Simplified: steps are
    over all records that the round has of a client (``record_rate`` of them), not over batches,
    and the representation is not orthonormalised, which theirs is for linear ones.

    Unit user. The head depends on the records of its client, without noise: it stays there. It
    moves an upload, which has norm ``clip`` at most whatever the head is; so uploads are sound in
    every view that ``Federation`` takes clients with state in. Personal models are not released;
    ``model`` has the head that everybody began with.
    """

    name: ClassVar[str] = "centaur"
    personal: ClassVar[bool] = True
    lr: float = 1.0
    clip: float = 1.0
    local_lr: float = 0.1
    local_steps: int = 1
    personal_lr: float = 0.1
    head_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "local_lr", "personal_lr"):
            check_finite("Centaur", name, getattr(self, name), above=0.0)
        check_steps("Centaur", self.local_steps)
        if self.head_steps < 1:
            raise ValueError(f"Centaur: head_steps must be >= 1, got {self.head_steps}")

    def _begin(self, terms: Terms) -> int:
        """Return where the head begins among the parameters."""
        begin = last_modules(terms.layers, 1)[0].begin if terms.layers else 0
        if begin == 0 or len(terms.shape) != 1:
            raise ValueError(
                "Centaur: the model must have a module before its last one, got parameters "
                f"{list(terms.shape)} of {len(terms.layers)} layers; take a network, or PPSGD"
            )
        return begin

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of clipped updates of the representation."""
        if terms.unit != "user":
            raise ValueError(
                f"Centaur: heads without noise protect users only, got unit {terms.unit!r}; take "
                "unit 'user'"
            )
        query = Query((self._begin(terms),), self.clip)
        return (Stage("representation", query, terms.rounds),)

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, whose head stays as it is."""
        return {"theta": theta}

    def client_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return the head."""
        return {"head": theta[self._begin(terms) :]}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return the representation's noisy clipped update; keep the head."""
        problem, cohort, records = visit.problem, visit.cohort, visit.terms.records
        begin = visit.stage.query.shape[0]
        shared, head = visit.sent["theta"][:begin], visit.state["head"]
        y = torch.cat((shared.expand(len(cohort), begin), head), 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(visit.seeds().sum()))  # of dropout alone
            for _ in range(self.head_steps):
                gradients = problem.gradient_sums(cohort, y) / records
                y[:, begin:].sub_(gradients[:, begin:], alpha=self.personal_lr)
            for _ in range(self.local_steps):
                gradients = problem.gradient_sums(cohort, y) / records
                y[:, :begin].sub_(gradients[:, :begin], alpha=self.local_lr)
        upload = clip_rows(y[:, :begin] - shared, self.clip)
        return visit.noisy(upload), {"head": only_finite(y[:, begin:], head)}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take the mean, for the representation."""
        theta = server["theta"].clone()
        theta[: len(seen.mean)].add_(seen.mean, alpha=self.lr)
        return {"theta": theta}

    def personal_models(self, server: Tensors, state: Tensors) -> Tensor:
        """Return the representation with each client's head."""
        head, theta = state["head"], server["theta"]
        begin = len(theta) - head.shape[1]
        return torch.cat((theta[:begin].expand(len(head), begin), head), 1)
