"""What is released about whom: the statement that every epsilon is computed from.

A statement says five things: unit and adjacency, who sees what, the L2 sensitivity of what is seen,
the noise on it, and how the records of a step were sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Adjacency = Literal["add-remove", "replace-one"]
View = Literal["aggregate", "each_upload"]


class NotPrivate(RuntimeError):
    """There is no epsilon to be had, and why."""


@dataclass(frozen=True)
class Poisson:
    """Every record is in a step's batch with probability ``rate``, independently of all else."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"Poisson: rate must be in (0, 1], got {self.rate}; it is the expected batch size "
                "over the number of records"
            )


@dataclass(frozen=True)
class WithoutReplacement:
    """A step's batch is one of all sets of ``batch`` of ``population`` records, drawn anew."""

    batch: int
    population: int

    def __post_init__(self) -> None:
        whole = isinstance(self.batch, int) and isinstance(self.population, int)
        if not whole or not 0 < self.batch <= self.population:
            raise ValueError(
                "WithoutReplacement: batch must be a whole number from 1 to the population, "
                f"{self.population}, got {self.batch}"
            )


@dataclass(frozen=True)
class Shuffled:
    """Every record is in exactly one of the ``batches`` batches of an epoch.

    run: which pass through the data it is; epochs of different runs are counted apart.

    No amplification is claimed: an epoch is as private as one step on all records, because one
    record moves one of its steps only. A part of an epoch counts as a whole one.
    """

    batches: int
    run: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.batches, int) or self.batches < 1:
            raise ValueError(
                f"Shuffled: batches must be a whole number >= 1, got {self.batches}; it is the "
                "number of steps of an epoch"
            )


@dataclass(frozen=True)
class EveryRecord:
    """Every step sees all records."""


Sampling = Poisson | WithoutReplacement | Shuffled | EveryRecord
_SAMPLINGS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Poisson, WithoutReplacement, Shuffled, EveryRecord)
}
# Under which adjacency each sampling is accounted. A batch of fixed size always holds somebody
# else where a record was removed, so that only replacing one makes sense.
_ADJACENCIES: dict[type[Any], tuple[Adjacency, ...]] = {
    Poisson: ("add-remove",),
    WithoutReplacement: ("replace-one",),
    Shuffled: ("replace-one",),
    EveryRecord: ("add-remove", "replace-one"),
}


def adjacency_of(sampling: Sampling) -> Adjacency:
    """Return the adjacency that ``sampling`` is accounted under, if nothing else is said."""
    return _ADJACENCIES[type(sampling)][0]


@dataclass(frozen=True)
class GaussianQuery:
    """A sum over the records of a step, released with Gaussian noise.

    sensitivity: how far it can move, in L2, between neighbouring data sets.
    noise_std: of the noise on each of its elements, 0 for none.
    unreachable: probability that exact Gaussian noise, on all elements together, lies where the
        generator that draws it does not reach. Accountants add it to delta, (1 + e^epsilon) times:
        once for what this data set releases, and e^epsilon times for what a neighbour does. 0 is
        for noise that is exact, as in a calibration on paper.
    """

    sensitivity: float
    noise_std: float
    unreachable: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.sensitivity < math.inf:
            raise ValueError(
                f"GaussianQuery: sensitivity must be finite and > 0, got {self.sensitivity}"
            )
        if not 0 <= self.noise_std < math.inf:
            raise ValueError(
                f"GaussianQuery: noise_std must be finite and >= 0, got {self.noise_std}"
            )
        if not 0 <= self.unreachable <= 1:
            raise ValueError(
                f"GaussianQuery: unreachable must be a probability, got {self.unreachable}"
            )


@dataclass(frozen=True)
class Statement:
    """What one step releases.

    queries: all that is released about the batch of a step, under the adjacency named.
    sampling: how the batch came about.
    adjacency: what neighbouring data sets are: one unit more or less, or another one in its place.
    unit: whom the guarantee is for: a record, a user.
    view: what is seen: only the aggregate, or each client's upload (then queries are an upload's).
    void: why there is no guarantee in spite of the noise, if so; no epsilon is given then.
    """

    queries: tuple[GaussianQuery, ...]
    sampling: Sampling
    adjacency: Adjacency = "add-remove"
    unit: str = "record"
    view: View = "aggregate"
    void: str | None = None

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError("Statement: queries must name what is released, got none")
        allowed = _ADJACENCIES[type(self.sampling)]
        if self.adjacency not in allowed:
            raise ValueError(
                f"Statement: {type(self.sampling).__name__} sampling is accounted under "
                f"{' or '.join(allowed)} adjacency, got {self.adjacency!r}"
            )

    @property
    def noise_multiplier(self) -> float:
        """Noise over sensitivity of all queries together: (sum of (sensitivity/std)^2)^(-1/2).

        Gaussian queries on the same batch, each divided by its own noise, are one query with noise
        of variance 1, whose sensitivity is at most the root of the sum of squares.
        """
        if any(query.noise_std == 0 for query in self.queries):
            return 0.0
        return 1 / math.hypot(*(query.sensitivity / query.noise_std for query in self.queries))

    @property
    def unreachable(self) -> float:
        """Probability that exact noise of a step lies where what draws it does not reach."""
        return sum(query.unreachable for query in self.queries)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; ``from_dict`` reads it."""
        kind = {"kind": type(self.sampling).__name__}
        return dataclasses.asdict(self) | {"sampling": kind | dataclasses.asdict(self.sampling)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Statement:
        """Return the statement that ``to_dict`` wrote."""
        sampling = dict(state["sampling"])
        kind = _SAMPLINGS[sampling.pop("kind")]
        queries = tuple(GaussianQuery(**query) for query in state["queries"])
        return cls(**{**state, "queries": queries, "sampling": kind(**sampling)})


def gaussian_step(
    noise_multiplier: float,
    sampling: Sampling,
    *,
    adjacency: Adjacency | None = None,
    unreachable: float = 0.0,
) -> Statement:
    """Return the statement of a step of private training, clipped to norm 1.

    noise_multiplier: sigma, the noise over the norm C that contributions are clipped to. Replacing
        one record moves a clipped sum by up to 2 C, so its sensitivity is 2 under replace-one.
    adjacency: None takes the one that the sampling is accounted under.
    unreachable: of the noise, as in ``GaussianQuery``; 0 for exact noise.
    """
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be finite and >= 0, got {noise_multiplier}; it is the noise's "
            "standard deviation over the clipping norm"
        )
    adjacency = adjacency or adjacency_of(sampling)
    sensitivity = 2.0 if adjacency == "replace-one" else 1.0
    query = GaussianQuery(sensitivity, noise_multiplier, unreachable)
    return Statement((query,), sampling, adjacency)
