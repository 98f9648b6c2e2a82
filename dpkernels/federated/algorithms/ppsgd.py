"""PPSGD: every client has a model of its own, the common one plus a part that never leaves it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpkernels.federated.algorithms.local_training import LocalTraining
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Seen, Stage, Tensors, Terms, Visit
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class PPSGD(LocalTraining):
    """Client i trains w + v_i: w <- w - local_lr g, v_i <- v_i - personal_lr g, g at w + v_i.

    It uploads how far w came, clipped to ``clip``, with noise; the server takes theta <- theta + lr
    mean. After Bietti et al. (2022), additive personalisation. Simplified: both parts take
    ``local_epochs`` of SGD in a round, where theirs takes one gradient, without its correction of
    drift; v_i has no penalty.

    Both parts have one gradient, and with ``local_momentum`` one velocity, so the sum w + v_i moves
    by SGD at the rate local_lr + personal_lr, and each part has its share of the way.

    Unit user. v_i depends on the records of client i, without noise: it stays there. It moves an
    upload, which has norm ``clip`` at most whatever v_i is; so uploads are sound in every view that
    ``Federation`` takes clients with state in. Personal models are not released.
    """

    name: ClassVar[str] = "ppsgd"
    personal: ClassVar[bool] = True
    personal_lr: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("PPSGD", "personal_lr", self.personal_lr, at_least=0.0)

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta."""
        return {"theta": theta}

    def client_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return v_i = 0."""
        return {"personal": torch.zeros_like(theta)}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return the common part's noisy clipped update; keep the personal part."""
        personal, rate = visit.state["personal"], self.local_lr + self.personal_lr
        moved = visit.problem.local_updates(
            visit.cohort,
            visit.sent["theta"] + personal,
            replace(self.local, lr=rate),
            visit.seeds(),
        )
        after = only_finite(personal.add(moved, alpha=self.personal_lr / rate), personal)
        upload = clip_rows(moved * (self.local_lr / rate), self.clip)
        return visit.noisy(upload), {"personal": after}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take the mean."""
        return {"theta": server["theta"].add(seen.mean, alpha=self.lr)}

    def personal_models(self, server: Tensors, state: Tensors) -> Tensor:
        """Return theta + v_i."""
        return server["theta"] + state["personal"]


def only_finite(rows: Tensor, before: Tensor) -> Tensor:
    """Return ``rows``, ``[k, ...]``, but those of ``before`` that are not finite now.

    A client whose training failed in one round goes on from where it was.
    """
    finite = rows.flatten(1).isfinite().all(1)
    return torch.where(finite.reshape(-1, *(1 for _ in rows.shape[1:])), rows, before)
