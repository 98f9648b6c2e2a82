"""Softmax regression over the records of many clients, through the ``glm`` kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.problem import FLOAT32_RECORDS, Cohort, Layer, Problem
from dpkernels.ops import glm
from dpkernels.privacy.draws import Bits, each_with_probability

# Clips nothing that is finite in float32: min(1, bound / norm) is 1.
UNCLIPPED = 1e38


class SoftmaxProblem(Problem):
    """Parameters W ``[classes, features]``, cross-entropy, features as they are given.

    records: of all clients (``glm.Records``): client i has rows ``spans[i]``.
    x_test, y_test: a test part that is public, ``[M, features]`` and int64 ``[M]``.
    classes: how many there are; a public number.
    """

    def __init__(
        self, records: glm.Records, x_test: Tensor, y_test: Tensor, *, classes: int
    ) -> None:
        if records.label_count > classes:
            raise ValueError(
                f"SoftmaxProblem: classes must be more than the largest label, "
                f"{records.label_count - 1}, got {classes}"
            )
        if x_test.dim() != 2 or x_test.shape[1] != records.features:
            raise ValueError(
                f"SoftmaxProblem: x_test must be [M, {records.features}], got {list(x_test.shape)}"
            )
        self.records, self.x_test, self.y_test = records, x_test.to(records.x.dtype), y_test
        self.classes = classes
        self.shape = (classes, records.features)
        self.clients = records.clients
        self.layers = (Layer("weight", 0, self.shape),)
        self._wide: Tensor | None = None
        self._factored: tuple[object, glm.FeatureCovariance] | None = None
        self._spectrum: tuple[object, tuple[Tensor, Tensor]] | None = None

    def initial(self) -> Tensor:
        """Return zeros: the loss is convex."""
        return self.records.x.new_zeros(self.shape)

    def cohort(self, ids: Tensor, rate: float = 1.0, bits: Bits | None = None) -> Cohort:
        """Return the clients ``ids``; their rows are views unless records are drawn."""
        spans = self.records.spans[ids]
        if rate >= 1.0:
            held = self.records
            if len(ids) != self.clients or not torch.equal(ids, torch.arange(self.clients)):
                held = dataclasses.replace(self.records, spans=spans, most=_most(spans))
            return Cohort(ids, held)
        return Cohort(ids, _drawn(self.records, spans, rate, bits or Bits()))

    def only(self, cohort: Cohort, row: int) -> Cohort:
        """Return client ``row`` of ``cohort`` alone."""
        spans = cohort.held.spans[row : row + 1]
        held = dataclasses.replace(cohort.held, spans=spans, most=_most(spans))
        return Cohort(cohort.ids[row : row + 1], held)

    def clipped_gradient_sums(
        self, cohort: Cohort, theta: Tensor, bound: float, most: float = math.inf
    ) -> Tensor:
        """Return clipped sums, ``[k, classes, features]``; 4 N C d flops."""

        def sums(held: glm.Records, rows: Tensor) -> Tensor:
            own = theta if theta.dim() == 2 else theta[rows]
            return glm.clipped_gradient_sum(held, own.to(held.x.dtype), bound)

        return self._in_parts(cohort, sums, self.shape, most * bound)

    def covariance_sums(self, cohort: Cohort, bound: float, most: float = math.inf) -> Tensor:
        """Return each client's sum of x x^T clipped to ``bound``, ``[k, features, features]``.

        most: as for ``clipped_gradient_sums``.
        """

        def sums(held: glm.Records, rows: Tensor) -> Tensor:
            return glm.clipped_covariance_sum(held, bound)

        return self._in_parts(cohort, sums, (self.shape[-1],) * 2, most * bound)

    def _in_parts(
        self,
        cohort: Cohort,
        sums: Callable[[glm.Records, Tensor], Tensor],
        shape: tuple[int, ...],
        radius: float,
    ) -> Tensor:
        """Return ``sums`` of all clients: of the large ones in float64, projected, rounded once."""
        large = self.large(cohort)
        if not len(large):
            return sums(cohort.held, torch.arange(len(cohort)))
        found: Tensor = cohort.held.x.new_empty(len(cohort), *shape)
        wide: Tensor = sums(self.subset(cohort, large, wide=True).held, large)
        found[large] = clip_rows(wide, min(radius, UNCLIPPED)).to(found.dtype)
        if len(rest := others(large, len(cohort))):
            found[rest] = sums(self.subset(cohort, rest, wide=False).held, rest)
        return found

    def large(self, cohort: Cohort) -> Tensor:
        """Return the rows of clients whose float32 records are too many to add up in float32."""
        held: glm.Records = cohort.held
        if held.x.dtype != torch.float32 or held.most <= FLOAT32_RECORDS:
            return torch.empty(0, dtype=torch.int64)
        return (held.spans[:, 1] - held.spans[:, 0] > FLOAT32_RECORDS).nonzero().flatten()

    def subset(self, cohort: Cohort, rows: Tensor, *, wide: bool) -> Cohort:
        """Return the clients ``rows`` of ``cohort``; their records in float64 if ``wide``."""
        spans = cohort.held.spans[rows]
        held = dataclasses.replace(cohort.held, spans=spans, most=_most(spans))
        if wide:
            held = dataclasses.replace(held, x=self._widened(held.x))
        return Cohort(cohort.ids[rows], held)

    def _widened(self, x: Tensor) -> Tensor:
        """Return ``x`` in float64; of all records it is kept."""
        if x is not self.records.x:
            return x.double()
        if self._wide is None:
            self._wide = x.double()
        return self._wide

    def gradient_sums(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return sums without a clip, ``[k, classes, features]``."""
        return glm.clipped_gradient_sum(cohort.held, theta, UNCLIPPED)

    def feature_sums(self, cohort: Cohort, bound: float | None, most: float = math.inf) -> Tensor:
        """Return each client's sum of features, ``[k, features]``, added up in float64.

        bound: the norm that each record's features are clipped to first; None for no clip. A record
        that is not finite adds exactly zero.
        most: as for ``clipped_gradient_sums``.
        """
        held: glm.Records = cohort.held
        sums = held.x.new_zeros(len(cohort), held.features, dtype=torch.float64)
        for row, (begin, end) in enumerate(held.spans.tolist()):
            x = clip_rows(held.x[begin:end], UNCLIPPED if bound is None else bound)
            sums[row] = x.sum(0, dtype=torch.float64)
        radius = UNCLIPPED if bound is None else min(most * bound, UNCLIPPED)
        return clip_rows(sums, radius).to(held.x.dtype)

    def covariance(
        self, cohort: Cohort, bound: float, gamma: float | Tensor, scale: float
    ) -> glm.FeatureCovariance:
        """Return the factorised ``scale sum of clipped x x^T + gamma I`` of every client.

        It does not depend on theta: while all clients take part it is factorised once.
        """
        whole = cohort.held is self.records and isinstance(gamma, float)
        key = (bound, gamma, scale)
        if whole and self._factored is not None and self._factored[0] == key:
            return self._factored[1]
        found = glm.FeatureCovariance.factor(cohort.held, bound=bound, gamma=gamma, scale=scale)
        if whole:
            self._factored = key, found
        return found

    def covariance_spectrum(
        self, cohort: Cohort, bound: float, scale: float, most: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Return eigenvalues ``[k, d]`` and vectors ``[k, d, d]`` of the same, without gamma.

        float64. While all clients take part it is decomposed once. most: as for
        ``clipped_gradient_sums``.
        """
        whole = cohort.held is self.records
        if whole and self._spectrum is not None and self._spectrum[0] == (bound, scale):
            return self._spectrum[1]
        sums = self.covariance_sums(cohort, bound, most).double() * scale
        values, vectors = torch.linalg.eigh(sums)
        found = values.clamp(min=0.0), vectors
        if whole:
            self._spectrum = (bound, scale), found
        return found

    def with_features(self, x: Tensor, x_test: Tensor) -> SoftmaxProblem:
        """Return the problem with other features of the same records, ``[N, d']``."""
        records = dataclasses.replace(self.records, x=x)
        return SoftmaxProblem(records, x_test, self.y_test, classes=self.classes)

    def accuracy(self, theta: Tensor, rows: slice = slice(None)) -> float:
        """Return the share of the test part, or of its ``rows``, whose likeliest class is right."""
        likeliest = (self.x_test[rows] @ theta.to(self.x_test.dtype).mT).argmax(1)
        right = likeliest == self.y_test[rows]
        return right.double().mean().item()


def _most(spans: Tensor) -> int:
    return int((spans[:, 1] - spans[:, 0]).max()) if len(spans) else 0


def others(rows: Tensor, count: int) -> Tensor:
    """Return those of ``range(count)`` that are not in ``rows``."""
    left = torch.ones(count, dtype=torch.bool)
    left[rows] = False
    return left.nonzero().flatten()


def _drawn(records: glm.Records, spans: Tensor, rate: float, bits: Bits) -> glm.Records:
    """Return the records of ``spans``, each kept with probability ``rate``, in new rows."""
    rows, counts = [], []
    for begin, end in spans.tolist():
        chosen = begin + each_with_probability(rate, end - begin, bits)
        rows.append(chosen)
        counts.append(len(chosen))
    at = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    spans = torch.stack((ends - torch.tensor(counts, dtype=torch.int64), ends), 1)
    return dataclasses.replace(
        records, x=records.x[at], labels=records.labels[at], spans=spans, most=_most(spans)
    )
