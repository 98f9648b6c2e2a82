"""Any algorithm on centred features: the mean is released first, for a small part of the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import MOST, summed
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Tensors, Terms, Visit
from dpkernels.federated.problem import Layer, Problem
from dpkernels.federated.softmax import SoftmaxProblem
from dpkernels.ops.checks import check_finite

_STAGE = "mean"


@dataclass(frozen=True)
class Centred(Algorithm):
    """``inner`` on the features (x - m, bias), with m the noisy mean of the clipped features.

    Features whose mean is far from 0 make the loss steep along it: on ReLU features the mean is
    most of every record's norm, so it sets both the clip and the largest stable step. One release
    takes it out.

    share: of the budget, for the mean.
    feature_clip: the norm that features are clipped to for the mean only (unit user: that a
        client's mean is clipped to).
    bias: the value of a constant feature that is appended; 0 for none.
    """

    name: ClassVar[str] = "centred"
    inner: Algorithm
    feature_clip: float = 10.0
    share: float = 0.05
    bias: float = 1.0

    def __post_init__(self) -> None:
        check_finite("Centred", "feature_clip", self.feature_clip, above=0.0)
        check_finite("Centred", "bias", self.bias, at_least=0.0)
        if not 0 < self.share < 1:
            raise ValueError(f"Centred: share must be in (0, 1), got {self.share}")

    def _inside(self, terms: Terms) -> Terms:
        """Return the terms of the inner algorithm: its features have the constant one."""
        *others, features = terms.shape
        shape = (*others, features + int(self.bias > 0))
        return replace(terms, shape=shape, layers=(Layer("weight", 0, shape),))

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return the round of the mean, then the inner algorithm's."""
        bound = self.feature_clip
        moved = summed(bound, terms) if terms.unit == "record" else bound
        mean = Stage(_STAGE, Query(terms.shape[-1:], moved), 1, share=self.share)
        inner = self.inner.stages(self._inside(terms))
        return (mean, *(replace(s, share=s.share * (1 - self.share)) for s in inner))

    def void(self, terms: Terms) -> str | None:
        """Return why the inner algorithm has no guarantee, if so."""
        return self.inner.void(self._inside(terms))

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return the inner state and a mean of 0."""
        inside = self._inside(terms)
        start = self.inner.server_start(inside, theta.new_zeros(inside.shape))
        return start | {"feature_mean": theta.new_zeros(terms.shape[-1])}

    def client_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return the inner state."""
        inside = self._inside(terms)
        return self.inner.client_start(inside, theta.new_zeros(inside.shape))

    def broadcast(self, stage: Stage, server: Tensors) -> Tensors:
        """Send the mean with the inner broadcast; nothing before it is known."""
        if stage.name == _STAGE:
            return {}
        return self.inner.broadcast(stage, server) | {"feature_mean": server["feature_mean"]}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy feature means, then what the inner algorithm uploads."""
        terms = visit.terms
        if visit.stage.name != _STAGE:
            return self.inner.client(replace(visit, terms=self._inside(terms)))
        bound = self.feature_clip if terms.unit == "record" else None
        most = MOST * terms.records
        sums = _softmax(visit.problem).feature_sums(visit.cohort, bound, most).div_(terms.records)
        means = sums if terms.unit == "record" else clip_rows(sums, self.feature_clip)
        return visit.noisy(means), visit.state

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Keep the mean, then step."""
        if stage.name == _STAGE:
            return {**server, "feature_mean": seen.mean}
        found = self.inner.server(stage, self._inside(terms), server, seen)
        return found | {"feature_mean": server["feature_mean"]}

    def prepared(self, problem: Problem, server: Tensors) -> Problem:
        """Return the problem on centred features, which each client computes for itself."""
        softmax, mean = _softmax(problem), server["feature_mean"]
        features = [self._centred(x, mean) for x in (softmax.records.x, softmax.x_test)]
        return self.inner.prepared(softmax.with_features(*features), server)

    def _centred(self, x: Tensor, mean: Tensor) -> Tensor:
        shifted = x - mean
        if not self.bias:
            return shifted
        return torch.cat((shifted, x.new_full((len(x), 1), self.bias)), 1)

    def model(self, server: Tensors) -> Tensor:
        """Return the inner model, which takes centred features."""
        return self.inner.model(server)


def _softmax(problem: Problem) -> SoftmaxProblem:
    if not isinstance(problem, SoftmaxProblem):
        raise TypeError(
            f"Centred: features are known for softmax regression only, got "
            f"{type(problem).__name__}; take the inner algorithm alone"
        )
    return problem
