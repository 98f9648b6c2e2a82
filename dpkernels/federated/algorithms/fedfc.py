"""DP-FedFC: gradients preconditioned by a feature covariance that was released with noise, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import (
    MOST,
    client_gradients,
    gradient_query,
    summed,
)
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Tensors, Terms, Visit
from dpkernels.federated.softmax import UNCLIPPED, SoftmaxProblem
from dpkernels.federated.triangles import packed, packed_size, unpacked
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class FedFC(Algorithm):
    """K = mean of clipped x x^T + noise, made positive;  theta <- theta - lr G (K + gamma I)^-1.

    Unit record (Algorithm 5): features are clipped to ``feature_clip`` for K, gradients to
    ``clip``, and the server preconditions their noisy mean. Unit user (Algorithm 6): a client's
    whole matrix is clipped to ``feature_clip``^2, and G (K + gamma I)^-1 of each client to
    ``clip`` before its noise.

    The noise on K is symmetric: what is released is the upper triangle, off-diagonal elements
    times sqrt(2), a vector of the same norm as the matrix. Negative eigenvalues of the noisy K are
    set to 0 before gamma is added; that is post-processing.

    covariance_share: of the budget, for K.
    """

    name: ClassVar[str] = "fedfc"
    lr: float = 0.5
    clip: float = 1.0
    feature_clip: float = 1.0
    gamma: float = 0.1
    covariance_share: float = 0.1

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "feature_clip", "gamma"):
            check_finite("FedFC", name, getattr(self, name), above=0.0)
        if not 0 < self.covariance_share < 1:
            raise ValueError(
                f"FedFC: covariance_share must be in (0, 1), got {self.covariance_share}"
            )

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return one round of covariances, then T rounds of gradients."""
        features, bound = terms.shape[-1], self.feature_clip**2
        moved = summed(bound, terms) if terms.unit == "record" else bound
        covariance = Query((packed_size(features),), moved)
        gradient = gradient_query(terms, self.clip)
        return (
            Stage("covariance", covariance, 1, share=self.covariance_share),
            Stage("gradient", gradient, terms.rounds, share=1 - self.covariance_share),
        )

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta."""
        return {"theta": theta}

    def broadcast(self, stage: Stage, server: Tensors) -> Tensors:
        """Send nothing before the covariance; then theta, and to user-level clients its inverse."""
        return {} if stage.name == "covariance" else dict(server)

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy covariances, or noisy gradients."""
        if visit.stage.name == "covariance":
            return visit.noisy(self._covariances(visit)), {}
        terms, theta = visit.terms, visit.sent["theta"]
        if terms.unit == "record":
            return visit.noisy(client_gradients(visit, theta, self.clip)), {}
        gradients = visit.problem.gradient_sums(visit.cohort, theta).div_(terms.records)
        return visit.noisy(clip_rows(gradients @ visit.sent["inverse"], self.clip)), {}

    def _covariances(self, visit: Visit) -> Tensor:
        """Return each client's clipped covariance as a vector of the same norm."""
        terms, problem, cohort = visit.terms, visit.problem, visit.cohort
        if not isinstance(problem, SoftmaxProblem):
            raise TypeError(
                f"FedFC: features are known for softmax regression only, got "
                f"{type(problem).__name__}; take FedGD"
            )
        bound = self.feature_clip**2
        per_record = bound if terms.unit == "record" else UNCLIPPED
        sums = problem.covariance_sums(cohort, per_record, MOST * terms.records)
        sums.div_(terms.records)
        triangles = packed(sums)
        return triangles if terms.unit == "record" else clip_rows(triangles, bound)

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Invert the covariance, once; then take preconditioned steps."""
        if stage.name == "covariance":
            values, vectors = torch.linalg.eigh(unpacked(seen.mean, terms.shape[-1]).double())
            inverse = (vectors / (values.clamp(min=0.0) + self.gamma)) @ vectors.mT
            return {**server, "inverse": inverse.to(seen.mean.dtype)}
        step = seen.mean @ server["inverse"] if terms.unit == "record" else seen.mean
        return {**server, "theta": server["theta"].sub(step, alpha=self.lr)}
