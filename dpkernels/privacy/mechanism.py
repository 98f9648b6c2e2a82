"""What is released about whom: the statement that every epsilon is computed from.

A statement says five things: unit and adjacency, who sees what, the L2 sensitivity of what is seen,
the noise on it, and how the records, or the clients, of a step were sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Adjacency = Literal["add-remove", "replace-one"]
View = Literal["aggregate", "each_upload"]
Drawn = Literal["records", "clients"]


class NotPrivate(RuntimeError):
    """There is no epsilon to be had, and why."""


@dataclass(frozen=True)
class Poisson:
    """Every record is in a step's batch with probability ``rate``, independently of all else.

    Here and below, "record" is what the statement says is sampled: a client where clients are.
    """

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
_BOTH: tuple[Adjacency, ...] = ("add-remove", "replace-one")
# Under which adjacency each sampling is accounted. Amplification is known for these. A batch of
# fixed size always holds somebody else where a record was removed, so that only replacing one makes
# sense.
_ADJACENCIES: dict[type[Any], tuple[Adjacency, ...]] = {
    Poisson: ("add-remove",),
    WithoutReplacement: ("replace-one",),
    Shuffled: ("replace-one",),
    EveryRecord: _BOTH,
}


def _drawn(unit: str) -> Drawn:
    """Return what sampling draws, if nothing else is said: the unit itself."""
    return "clients" if unit == "user" else "records"


def _adjacencies(
    sampling: Sampling, unit: str, view: View, sampled: Drawn | None
) -> tuple[Adjacency, ...]:
    """Return the adjacencies that a statement with these facts may have, the usual one first."""
    if unit == "user" and view == "each_upload":
        return ("replace-one",)  # who uploads is seen
    if unit != "user" and sampled == "clients":
        return _BOTH  # the clients are the same with the record and without it
    return _ADJACENCIES[type(sampling)]


def adjacency_of(
    sampling: Sampling,
    *,
    unit: str = "record",
    view: View = "aggregate",
    sampled: Drawn | None = None,
) -> Adjacency:
    """Return the adjacency that ``sampling`` is accounted under, if nothing else is said.

    unit, view, sampled: as in ``Statement``.
    """
    return _adjacencies(sampling, unit, view, sampled)[0]


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
    unit: whom the guarantee is for: "record", "user" (a client with all its records), or what else
        one record stands for.
    view: what is seen: only the aggregate, or each client's upload and who sent it (then queries
        are an upload's, and a unit is in the uploads of one client).
    void: why there is no guarantee in spite of the noise, if so; no epsilon is given then.
    sampled: what the sampling draws: whole clients, or records, inside each client if there are
        clients (then the rate is that of the client where it is largest). None is the unit itself:
        clients for the unit "user", else records.

    Under "each_upload" a user who joins or leaves is seen, so that the unit "user" is accounted
    under replace-one only. Where clients are drawn and the unit is a record, both adjacencies are
    allowed: the clients are the same with the record and without it. Everywhere else the sampling
    has its own: add-remove for ``Poisson``, replace-one for ``WithoutReplacement`` and
    ``Shuffled``, both for ``EveryRecord``. Which sampling amplifies: see
    ``accountants.exposure.amplification``.

    Raises ValueError for an adjacency that is not allowed, an unknown ``view`` or ``sampled``, and,
    under "each_upload", a unit that is neither "record" nor "user": whether clients are the unit
    has to be known there.
    """

    queries: tuple[GaussianQuery, ...]
    sampling: Sampling
    adjacency: Adjacency = "add-remove"
    unit: str = "record"
    view: View = "aggregate"
    void: str | None = None
    sampled: Drawn | None = None

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError("Statement: queries must name what is released, got none")
        if self.sampled is None:
            object.__setattr__(self, "sampled", _drawn(self.unit))
        for what, known in (("view", get_args(View)), ("sampled", get_args(Drawn))):
            if getattr(self, what) not in known:
                raise ValueError(
                    f"Statement: {what} must be one of {', '.join(known)}, "
                    f"got {getattr(self, what)!r}"
                )
        if self.view == "each_upload" and self.unit not in ("record", "user"):
            raise ValueError(
                "Statement: unit must be 'record' or 'user' where each upload is seen, got "
                f"{self.unit!r}; take 'user' if the unit is a client with all its records"
            )
        self._check_adjacency()

    def _check_adjacency(self) -> None:
        allowed = _adjacencies(self.sampling, self.unit, self.view, self.sampled)
        if self.adjacency in allowed:
            return
        if self.unit == "user" and self.view == "each_upload":
            raise ValueError(
                "Statement: where each upload is seen, so is every user who joins or leaves: the "
                "unit 'user' is accounted under replace-one adjacency, with the sensitivity of "
                f"replacing one (2 C for uploads clipped to C), got {self.adjacency!r}"
            )
        raise ValueError(
            f"Statement: {type(self.sampling).__name__} sampling is accounted under "
            f"{' or '.join(allowed)} adjacency, got {self.adjacency!r}"
        )

    @property
    def draws_units(self) -> bool:
        """Whether what the sampling draws is the unit itself, not its client or its records."""
        return self.sampled == _drawn(self.unit)

    @property
    def is_once_an_epoch(self) -> bool:
        """Whether a unit is in one batch of a shuffled epoch: not a user whose records are spread.

        A record is in one client, which is in one cohort of an epoch.
        """
        return self.draws_units or self.sampled == "clients"

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

    def with_noise(self, scale: float) -> Statement:
        """Return it with ``scale`` times the noise on every query, and all else the same.

        Raises ValueError unless ``scale`` is finite and >= 0.
        """
        if not 0 <= scale < math.inf:
            raise ValueError(f"with_noise: scale must be finite and >= 0, got {scale}")
        queries = tuple(
            dataclasses.replace(query, noise_std=scale * query.noise_std) for query in self.queries
        )
        return dataclasses.replace(self, queries=queries)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; ``from_dict`` reads it."""
        kind = {"kind": type(self.sampling).__name__}
        return dataclasses.asdict(self) | {"sampling": kind | dataclasses.asdict(self.sampling)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Statement:
        """Return the statement that ``to_dict`` wrote, or wrote before it said what is sampled."""
        sampling = dict(state["sampling"])
        kind = _SAMPLINGS[sampling.pop("kind")]
        queries = tuple(GaussianQuery(**query) for query in state["queries"])
        return cls(**{**state, "queries": queries, "sampling": kind(**sampling)})


def gaussian_step(
    noise_multiplier: float,
    sampling: Sampling,
    *,
    adjacency: Adjacency | None = None,
    unit: str = "record",
    view: View = "aggregate",
    sampled: Drawn | None = None,
    unreachable: float = 0.0,
) -> Statement:
    """Return the statement of a step of private training, clipped to norm 1.

    noise_multiplier: sigma, the noise over the norm C that contributions are clipped to. Replacing
        one record moves a clipped sum by up to 2 C, so its sensitivity is 2 under replace-one.
    adjacency: None takes the one that the sampling is accounted under (``adjacency_of``).
    unit, view, sampled: as in ``Statement``. Under "each_upload" the noise is that of an upload.
    unreachable: of the noise, as in ``GaussianQuery``; 0 for exact noise.
    """
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be finite and >= 0, got {noise_multiplier}; it is the noise's "
            "standard deviation over the clipping norm"
        )
    if adjacency is None:
        adjacency = adjacency_of(sampling, unit=unit, view=view, sampled=sampled)
    sensitivity = 2.0 if adjacency == "replace-one" else 1.0
    query = GaussianQuery(sensitivity, noise_multiplier, unreachable)
    return Statement((query,), sampling, adjacency, unit, view, sampled=sampled)
