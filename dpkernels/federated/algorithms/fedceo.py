"""FedCEO: every few rounds, a low-rank proximal step over the uploads of a round's clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated.algorithms.local_training import (
    LocalTraining,
    check_steps,
    private_steps,
    private_steps_stage,
    several_steps,
)
from dpkernels.federated.contract import Seen, Stage, Tensors, Terms, Visit
from dpkernels.federated.folding import thresholded
from dpkernels.federated.problem import Layer
from dpkernels.ops.checks import check_finite

Restart = Literal["own", "slot", "mean"]


@dataclass(frozen=True)
class FedCEO(LocalTraining):
    """w_k = w0_k + lr (upload of client k); every I-th round {w_k} is folded and thresholded.

    Fold (Algorithm 2): each layer of the K models w_k is a tensor ``[d, h, K]``, and the singular
    values of its Fourier slices are soft-thresholded at tau = theta^(t/I) / (2 lam). The clients of
    the next round start from its slices w_k^; theta is their mean. In other rounds theta is the
    mean of w_k, and all start from there.

    Unit user: ``LocalTraining``'s upload (Algorithm 2). Unit record: DP-SGD inside the clients, as
    in ``LocalDPSGD``, ``local_steps`` of them (what the paper's Table 1 was made with, lr = 1).

    restart: who starts from what after a folded round, of which the paper says nothing.
        ``own``: whoever was in it from the own slice, others from the mean.
        ``slot``: the k-th client of the round from slice k, others from the mean.
        ``mean``: all from the mean. The slice of frequency 0 is K times the mean, so the mean of
            thresholded slices is the mean of w_k with singular values thresholded at tau / K: it
            is made of the mean of the uploads, which is all that is looked at.
    fold_last: how many modules are folded, the last ones; others are averaged. None for all.
    lam = inf is tau = 0: nothing is cut.

    ``mean`` is post-processing of the aggregate: sound where the uploads are. ``own`` and ``slot``
    take single uploads: sound under ``each_upload``; void under ``aggregate``, where noise is
    enough for the sum alone (Theorem 4.5 of the paper claims it for them too).
    """

    name: ClassVar[str] = "fedceo"
    restart: Restart = "mean"
    lam: float = 10.0
    theta: float = 1.0
    interval: int = 10
    fold_last: int | None = None
    local_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam != math.inf:
            check_finite("FedCEO", "lam", self.lam, above=0.0)
        check_finite("FedCEO", "theta", self.theta, above=0.0)
        if self.restart not in get_args(Restart):
            raise ValueError(
                f"FedCEO: restart must be one of {', '.join(get_args(Restart))}, got "
                f"{self.restart!r}"
            )
        for name in ("interval", "fold_last"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"FedCEO: {name} must be >= 1, got {getattr(self, name)}")
        check_steps("FedCEO", self.local_steps)

    def threshold(self, t: int) -> float:
        """Return tau of round t, counted from 1."""
        return float(self.theta ** (t / self.interval) / (2 * self.lam))

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds: of clipped updates, or of ``local_steps`` noisy gradients each."""
        if terms.unit == "record":
            return (private_steps_stage(terms, self.clip, self.local_steps),)
        return super().stages(terms)

    def void(self, terms: Terms) -> str | None:
        """Return why the paper's own steps have no guarantee under secure aggregation."""
        if terms.view == "aggregate" and self.reads_uploads():
            return (
                f"restart={self.restart!r} under 'aggregate' is the paper's: the tensor SVD takes "
                "single uploads, whose own share of the noise is too little by itself"
            )
        return several_steps(terms, self.local_steps)

    def reads_uploads(self) -> bool:
        """Return whether slices are handed out, and so have to be computed."""
        return self.restart != "mean"

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, the round, and the slices of the last one, of which there are none."""
        start = {"theta": theta, "round": torch.tensor(0)}
        if not self.reads_uploads():
            return start
        nobody = torch.empty(0, dtype=torch.int64)
        return start | {"slices": theta.new_empty(0, *theta.shape), "folded": nobody}

    def sent_to(self, stage: Stage, server: Tensors, ids: Tensor) -> Tensors:
        """Return where each client starts, ``[k, *shape]``, after a round that was folded."""
        if not self.reads_uploads() or not len(server["slices"]):
            return {}
        slices, folded = server["slices"], server["folded"]
        starts = server["theta"].expand(len(ids), *server["theta"].shape).clone()
        if self.restart == "slot":
            count = min(len(ids), len(slices))
            starts[:count] = slices[:count]
        else:
            was_in = torch.isin(ids, folded)
            starts[was_in] = slices[torch.searchsorted(folded, ids[was_in])]
        return {"theta": starts}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return how far each client came: clipped and noised, or by noisy steps."""
        if visit.terms.unit == "user":
            return super().client(visit)
        return private_steps(visit, self.clip, self.local_steps, self.local_lr), {}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Average, or fold, threshold, and keep the slices for the next round."""
        t = int(server["round"]) + 1
        state = {**server, "round": server["round"] + 1}
        folds = t % self.interval == 0
        if not self.reads_uploads():
            theta = server["theta"].add(seen.mean, alpha=self.lr)
            if folds:
                tau = self.threshold(t) / terms.cohort
                theta = self._thresholded(terms, theta[None], tau)[0]
            return state | {"theta": theta}
        if seen.clients is None or seen.uploads is None:
            raise RuntimeError(f"FedCEO: restart={self.restart!r} needs single uploads, got none")
        starts = seen.own.get("theta", server["theta"].expand_as(seen.uploads))
        # Starts of whoever answered; the sum of uploads is over a public number all the same.
        middle = starts.mean(0) if len(starts) else server["theta"]
        theta, slices = middle.add(seen.mean, alpha=self.lr), server["slices"][:0]
        if folds and len(starts):
            models = starts.add(seen.uploads, alpha=self.lr)
            slices = self._thresholded(terms, models, self.threshold(t))
            theta = slices.mean(0)
        return state | {"theta": theta, "slices": slices, "folded": seen.clients[: len(slices)]}

    def _thresholded(self, terms: Terms, models: Tensor, tau: float) -> Tensor:
        """Return ``models``, ``[K, *shape]``, after fold, soft threshold and unfold."""
        chosen = last_modules(terms.layers, self.fold_last)
        return thresholded(chosen, models.flatten(1), tau).view_as(models)


def last_modules(layers: Sequence[Layer], count: int | None) -> tuple[Layer, ...]:
    """Return the parameters of the last ``count`` modules; all for None, or if there are fewer."""
    modules = list(dict.fromkeys(layer.name.rpartition(".")[0] for layer in layers))
    chosen = set(modules if count is None else modules[-count:])
    return tuple(layer for layer in layers if layer.name.rpartition(".")[0] in chosen)
