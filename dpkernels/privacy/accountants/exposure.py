"""What a history of steps exposes of one unit: how often it is seen, and under which noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dpkernels.privacy.mechanism import Poisson, Shuffled, Statement, WithoutReplacement

Sampled = tuple[float, Poisson | WithoutReplacement]
History = list[tuple[Statement, int]]


@dataclass(frozen=True)
class Exposure:
    """All releases of a history, in no order: composition does not know one.

    mu: of all releases without amplification together, which are one Gaussian with sensitivity
        over noise mu = sqrt(sum of 1 / sigma^2); inf if there is no noise in one.
    sampled: how often each pair of noise multiplier and sampling with amplification was used.
    """

    mu: float
    sampled: tuple[tuple[Sampled, int], ...]

    @property
    def is_nothing(self) -> bool:
        """Whether nothing was released."""
        return self.mu == 0 and not self.sampled


def amplification(statement: Statement) -> Poisson | WithoutReplacement | None:
    """Return the sampling of ``statement`` if it hides whether a unit took part, else None.

    It does where the unit itself is drawn, and nobody sees who was:

        unit      drawn      aggregate    each_upload
        record    records    amplifies    amplifies
        record    clients    not          not
        user      clients    amplifies    not
        user      records    not          not

    Whoever sees uploads sees which clients were drawn. For a record, the sum shows it too: the
    other records of its client may move the sum by u, far more than the noise. Then
    (1 - q) N(0) + q N(u + v) against (1 - q) N(0) + q N(u) has q times the delta of N(v) against
    N(0), at the same epsilon: drawing clients makes delta smaller, not epsilon. A step that is not
    amplified counts in full, and so does each epoch of ``Shuffled``.
    """
    sampling = statement.sampling
    seen = statement.sampled == "clients" and statement.view == "each_upload"
    if seen or not statement.draws_units:
        return None
    if isinstance(sampling, Poisson) and sampling.rate < 1:
        return sampling
    if isinstance(sampling, WithoutReplacement) and sampling.batch < sampling.population:
        return sampling
    return None


class _Epochs:
    """Counts what shuffled batches expose: in each epoch the step with the least noise.

    One unit is in one step of an epoch, and nobody says in which, so that the worst one counts.
    Runs need not end with an epoch: the noise may change in the middle of one.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.done = 0  # steps of the epoch that is open
        self.worst = 0.0  # largest precision, 1 / sigma^2, in it
        self.precision = 0.0  # of all epochs before it

    def add(self, precision: float, steps: int) -> None:
        if self.done:
            now = min(steps, self.batches - self.done)
            self.done, steps = self.done + now, steps - now
            self.worst = max(self.worst, precision)
            if self.done < self.batches:
                return
            self.precision += self.worst
        self.precision += steps // self.batches * precision
        self.done = steps % self.batches
        self.worst = precision if self.done else 0.0

    def total(self) -> float:
        return self.precision + self.worst


def exposure(history: Iterable[tuple[Statement, int]]) -> Exposure:
    """Return what ``history``, runs of (statement, steps >= 1), exposes of one unit.

    Epochs of records and epochs of clients are counted apart: they are two orders. A user whose
    records are shuffled may be in every step of an epoch, and each step counts.
    """
    precision = 0.0
    sampled: Counter[Sampled] = Counter()
    epochs: dict[tuple[Shuffled, str | None], _Epochs] = {}
    for statement, steps in history:
        sigma = statement.noise_multiplier
        if sigma == 0:
            return Exposure(math.inf, ())
        if isinstance(shuffled := statement.sampling, Shuffled) and statement.is_once_an_epoch:
            kind = shuffled, statement.sampled
            epochs.setdefault(kind, _Epochs(shuffled.batches)).add(sigma**-2, steps)
        elif (sampling := amplification(statement)) is not None:
            sampled[sigma, sampling] += steps
        else:
            precision += steps * sigma**-2
    precision += sum(counted.total() for counted in epochs.values())
    return Exposure(math.sqrt(precision), tuple(sampled.items()))


def unreachable(history: Iterable[tuple[Statement, int]]) -> float:
    """Return the probability that exact noise of some step lies where its generator does not reach.

    Without that event what is released has the distribution that accountants know. So it is within
    this total variation of it for every data set, and (epsilon, delta) of exact noise is
    (epsilon, delta + (1 + e^epsilon) times this) of the noise that is drawn.
    """
    return min(1.0, sum(steps * statement.unreachable for statement, steps in history))
