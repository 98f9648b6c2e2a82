"""The contract of federated learning: what an algorithm says, and nothing else.

    server state --broadcast--> clients (records, own state, own noise)
         ^                         |
         |                      upload
         +---- server step <---- what is seen of the uploads that arrived

An algorithm says three things: what a client computes (``client``), how far one unit can move it
(``stages``), and what the server does with what it sees (``server``). All functions are pure: state
goes in and comes out. ``client`` takes the clients of a round stacked along the first axis, one or
hundreds, and gives each client the same numbers in both cases. Sampling, noise, faults, accounting,
bytes, evaluation and checkpoints belong to ``loop.Federation``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NoReturn, get_args

from torch import Tensor

from dpkernels.federated.problem import Cohort, Layer, Problem
from dpkernels.privacy.mechanism import Adjacency, View

Unit = Literal["record", "user"]
Tensors = dict[str, Tensor]
# Adds each client's noise to what it is about to release, ``[k, *query.shape]``, in place, and
# returns it. An upload may depend on records only through what went through here, and must be that
# itself where a stage says so: then the noise may as well be added to the sum of the uploads.
Noisy = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Terms:
    """What everybody knows before the first round. All of it is public.

    clients: how many there are, n.
    records: |D|, the number that every client's sums over records are divided by. One number for
        all: a client's own count would be a release, and the smallest client's would set the noise.
    shape: of the parameters.
    rounds: of training, T.
    unit: whom the guarantee protects: a record, or a user with all records.
    view: what is seen: each client's upload, or only the sum (secure aggregation).
    adjacency: a unit more or less, or another one in its place. Where the number of clients is
        public, a user less is a client that uploads noise alone.
    sampled: whether the clients of a round are drawn at random; else all take part.
    records_sampled: whether the records of a round are, inside each client.
    cohort: how many clients a round has, on average if that is left to chance.
    layers: the model's parameters, as ``Problem.layers`` has them.

    ``Federation`` fills in the last four from its sampler and its problem.
    """

    clients: int
    records: float
    shape: tuple[int, ...]
    rounds: int
    unit: Unit
    view: View
    adjacency: Adjacency
    sampled: bool = False
    records_sampled: bool = False
    cohort: float = 0.0
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("unit", Unit), ("view", View), ("adjacency", Adjacency)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"Terms: {name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.clients < 1 or self.rounds < 1:
            raise ValueError(
                f"Terms: clients and rounds must be >= 1, got {self.clients} and {self.rounds}"
            )
        if not 0 < self.records < math.inf:
            raise ValueError(
                f"Terms: records must be a public number > 0, got {self.records}; it is what sums "
                "over a client's records are divided by"
            )


@dataclass(frozen=True)
class Query:
    """What each client releases.

    shape: of one client's release.
    sensitivity: how far one unit more or less moves it, in L2. Replacing a unit is taking one away
        and adding one: at most twice that.
    """

    shape: tuple[int, ...]
    sensitivity: float

    def __post_init__(self) -> None:
        if not 0 < self.sensitivity < math.inf:
            raise ValueError(f"Query: sensitivity must be > 0 and finite, got {self.sensitivity}")

    def moved(self, adjacency: Adjacency) -> float:
        """Return the sensitivity under ``adjacency``."""
        return 2 * self.sensitivity if adjacency == "replace-one" else self.sensitivity


@dataclass(frozen=True)
class Stage:
    """Rounds that release the same query.

    rounds: how many.
    releases: how often a client releases the query in one round: 1, or once for each local step.
    uploaded: whether what a client uploads is the release itself, and not made of it.
    redrawn: whether records are drawn anew for every release of a round, and not once for all.
    share: of the budget. Budgets of Gaussian releases add up in squares: a stage with share s, of
        all shares' total 1, has s of the sum of (sensitivity / noise)^2.
    """

    name: str
    query: Query
    rounds: int
    releases: int = 1
    share: float = 1.0
    uploaded: bool = True
    redrawn: bool = False


def _nothing_to_draw() -> NoReturn:
    raise RuntimeError("Visit: it was made without chance; pass draw and seeds")


@dataclass(frozen=True)
class Visit:
    """What the clients of one round have to compute from.

    problem, cohort: whose records, and how gradients of them are taken. Where the stage draws
        records anew, cohort has the first draw.
    state: rows ``[k, ...]`` of what these clients keep. sent: what ``broadcast`` returned.
    noisy: to be called ``stage.releases`` times, on ``[k, *stage.query.shape]``.
    draw: returns the next cohort of a stage that draws records anew; else the same one.
    seeds: returns int64 ``[k]``: of each client's own chance in this round (order of batches,
        dropout), and of nothing that protects anybody.
    std: of the noise that ``noisy`` adds to every element, which is public.
    """

    stage: Stage
    terms: Terms
    problem: Problem
    cohort: Cohort
    state: Tensors
    sent: Tensors
    noisy: Noisy
    draw: Callable[[], Cohort] = _nothing_to_draw
    seeds: Callable[[], Tensor] = _nothing_to_draw
    std: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What the server sees of a round.

    mean: ``[*shape]``, the sum of what arrived, divided by the public number of clients.
    std: the standard deviation of the noise in every element of ``mean``, which is public; None
        where uploads are made of noisy releases and are none themselves (``Stage.uploaded``).
    clients, uploads: who sent what, int64 ``[k]`` and ``[k, *shape]``. None under ``aggregate``:
        only the sum is opened (but for an algorithm that is ``void`` there, and says so).
    own: what ``sent_to`` had for each of ``clients``, rows ``[k, ...]``.
    """

    mean: Tensor
    std: float | None = None
    clients: Tensor | None = None
    uploads: Tensor | None = None
    own: Tensors = field(default_factory=dict)


class Algorithm(ABC):
    """One federated algorithm. A subclass is a frozen dataclass of its settings.

    personal: whether every client ends with a model of its own, ``personal_models``.
    """

    name: ClassVar[str]
    personal: ClassVar[bool] = False

    @abstractmethod
    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return what is released, in order; shares add up to 1.

        Raises ValueError for terms that the algorithm cannot serve.
        """

    def void(self, terms: Terms) -> str | None:
        """Return why there is no guarantee under ``terms`` in spite of the noise, if so."""
        return None

    @property
    def private(self) -> bool:
        """Whether its queries bound what a unit moves. If not, no budget is taken, nor noise."""
        return True

    def check(self, problem: Problem) -> None:
        """Raise ValueError for a problem that the algorithm cannot serve; before any round."""
        return

    def reads_uploads(self) -> bool:
        """Return whether ``server`` takes single uploads, and not their mean alone."""
        return False

    @abstractmethod
    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return the server's state before the first round."""

    def client_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return one client's state before its first round; empty by default."""
        return {}

    def broadcast(self, stage: Stage, server: Tensors) -> Tensors:
        """Return what is sent to every client of a round."""
        return {"theta": server["theta"]}

    def sent_to(self, stage: Stage, server: Tensors, ids: Tensor) -> Tensors:
        """Return what each of the clients ``ids`` gets of its own, rows ``[k, ...]``; else nothing.

        It comes with ``broadcast`` in ``visit.sent``, in place of what has the same name there.
        """
        return {}

    @abstractmethod
    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return what the clients of a round upload, ``[k, *shape]``, and their new state."""

    @abstractmethod
    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Return the server's state after a round."""

    def prepared(self, problem: Problem, server: Tensors) -> Problem:
        """Return the problem that later stages train on, from what the server has released."""
        return problem

    def model(self, server: Tensors) -> Tensor:
        """Return the parameters that are handed out, and evaluated unless models are personal."""
        return server["theta"]

    def personal_models(self, server: Tensors, state: Tensors) -> Tensor:
        """Return the model of each client whose state is given, ``[k, *shape]``.

        It is for the client alone: made of its records without noise, it is never released.
        """
        raise TypeError(f"{self.name}: all clients have one model; take model()")
