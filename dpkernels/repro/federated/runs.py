"""One federated run: its settings, what came of it, and where that is kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from dpkernels.federated import (
    PPSGD,
    Algorithm,
    Centaur,
    Centred,
    FedCEO,
    Federation,
    FedFC,
    FedFisher,
    FedGD,
    FedNew,
    FedSOFIM,
    LocalDPSGD,
    Problem,
    Scaffold,
    SoftmaxProblem,
    Terms,
    UDPFedAvg,
)
from dpkernels.federated.build import network_problem
from dpkernels.federated.contract import Unit
from dpkernels.federated.data import (
    FederatedData,
    Statistic,
    declared_public,
    holdout,
    load,
    of_synthetic,
)
from dpkernels.federated.sampling import sampler_of
from dpkernels.federated.smoothing import smoothed
from dpkernels.privacy.mechanism import Adjacency, View
from dpkernels.repro import provenance
from dpkernels.whole_file import write_text

ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.name: kind
    for kind in (
        FedGD,
        FedSOFIM,
        FedNew,
        FedFC,
        FedFisher,
        Scaffold,
        UDPFedAvg,
        FedCEO,
        PPSGD,
        Centaur,
        LocalDPSGD,
    )
}
Settings = tuple[tuple[str, Any], ...]
# 100 LeNets on 5,000 images take 180 s of one core, five times as long as training. On a tenth
# each, every image is seen by 10 models: the mean's standard error from that is 0.2 points.
_PERSONAL_PARTS = 10


def settings(**values: Any) -> Settings:
    """Return ``values`` in an order of their own, so that equal ones are equal."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True)
class Place:
    """Whose records, parted how, and what is seen of them.

    dataset: as ``federated.data`` names it; ``synthetic:A,B`` for Noble's generator.
    public: what is done to records beforehand: statistics of them that are declared public, such as
        ``pca:100``, or ``smooth:0.5``, a filter that is public as it is.
    delta: None for 1 / the number of training records.
    model: ``logistic``, or a network as ``federated.networks`` names it.
    sampling: who takes part in a round. record_rate: the chance of a client's record to do so.
    partition_seed: of the partition; runs do not differ in it.
    """

    dataset: str
    clients: int
    partition: str = "iid"
    public: tuple[str, ...] = ()
    unit: Unit = "record"
    view: View = "aggregate"
    adjacency: Adjacency = "add-remove"
    delta: float | None = None
    model: str = "logistic"
    sampling: str = "all"
    record_rate: float = 1.0
    partition_seed: int = 0

    def multiplier(self, sigma: float) -> float:
        """Return the noise multiplier of FedCEO's ``sigma`` here.

        User level: the sum of a round's K uploads has noise of sigma times the clip, each of them
        its share, sigma / sqrt(K), whatever is seen. Record level: the sum of gradients of every
        local step has sigma times the clip.
        """
        if self.unit == "record":
            return sigma
        moved = 2.0 if self.adjacency == "replace-one" else 1.0
        sampler = sampler_of(self.sampling, self.clients)
        cohort = self.clients if sampler is None else sampler.expected_batch_size
        return sigma / (moved * math.sqrt(cohort if self.view == "each_upload" else 1.0))


@dataclass(frozen=True)
class Run:
    """One run. Equal runs give equal results: seeds are fixed, for comparison, not for release.

    centre: settings of ``Centred`` around the algorithm; None for none.
    epsilon: None for no noise, or where sigma says how much: see ``Place.multiplier``.
    validation: how many training records are held out and take the place of the test part.
    """

    place: Place
    algorithm: str
    settings: Settings
    rounds: int
    epsilon: float | None
    seed: int
    validation: int = 0
    centre: Settings | None = None
    every: int = 10
    sigma: float | None = None

    @property
    def digest(self) -> str:
        """What its file is called."""
        told = dataclasses.asdict(self)
        if not self.place.partition_seed:
            # Runs from before there was another one keep their names.
            del told["place"]["partition_seed"]
        text = json.dumps(told, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    accuracy: in percent, by round. epsilon: spent, None without a guarantee, and then ``void`` says
    why and ``claimed`` what the paper would say.
    """

    accuracy: Mapping[int, float]
    epsilon: float | None
    claimed: float | None
    void: str | None
    bytes_up: int
    bytes_down: int
    seconds: float
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def final(self) -> float:
        """Accuracy after the last round, in percent."""
        return self.accuracy[max(self.accuracy)]


def algorithm_of(run: Run) -> Algorithm:
    """Return the algorithm with its settings."""
    found = ALGORITHMS[run.algorithm](**dict(run.settings))
    return found if run.centre is None else Centred(found, **dict(run.centre))


@lru_cache(maxsize=2)
def _data(dataset: str, public: tuple[str, ...], validation: int, clients: int) -> FederatedData:
    """Return the data; ``clients`` matters to what is generated for each client."""
    if dataset.startswith("synthetic:"):
        alpha, beta = map(float, dataset.removeprefix("synthetic:").split(","))
        data = of_synthetic(alpha, beta, clients=clients)
    else:
        data = load(dataset)
    if validation:
        data = holdout(data, validation)
    for statistic in public:
        what, _, number = statistic.partition(":")
        if what == "smooth":
            data = smoothed(data, float(number))
            continue
        size = int(number) if number else None
        data = declared_public(data, cast(Statistic, what), size)
    return data


@lru_cache(maxsize=2)
def _softmax(place: Place, validation: int) -> SoftmaxProblem:
    data = _data_of(place, validation)
    parts = data.partition(place.partition, place.clients, place.partition_seed)
    return SoftmaxProblem(parts.of(data.x, data.y), data.x_test, data.y_test, classes=data.classes)


def _data_of(place: Place, validation: int) -> FederatedData:
    generated = place.clients if place.dataset.startswith("synthetic:") else 0
    return _data(place.dataset, place.public, validation, generated)


def _problem(run: Run) -> Problem:
    place = run.place
    if place.model == "logistic":
        return _softmax(place, run.validation)
    data = _data_of(place, run.validation)
    parts = data.partition(place.partition, place.clients, place.partition_seed)
    return network_problem(place.model, data, parts, run.seed)


def federation_of(run: Run, algorithm: Algorithm | None = None) -> Federation:
    """Return the federation before its first round; algorithm: in place of the run's own."""
    place, problem = run.place, _problem(run)
    count = len(_data_of(place, run.validation).y)
    terms = Terms(
        place.clients,
        count / place.clients,
        problem.shape,
        run.rounds,
        place.unit,
        place.view,
        place.adjacency,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*with the fixed seed")
        return Federation(
            algorithm or algorithm_of(run),
            problem,
            terms,
            epsilon=run.epsilon,
            delta=place.delta or 1 / count,
            noise_multiplier=None if run.sigma is None else place.multiplier(run.sigma),
            sampler=sampler_of(place.sampling, place.clients, run.seed),
            record_rate=place.record_rate,
            seed=run.seed,
        )


def perform(run: Run) -> Outcome:
    """Run it from its first round to its last."""
    federation = federation_of(run)
    before = federation.rounds_planned - run.rounds  # releases before training
    accuracy: dict[int, float] = {}
    while not federation.finished:
        federation.round()
        trained = federation.rounds_released - before
        if trained == run.rounds or (trained > 0 and trained % run.every == 0):
            accuracy[trained] = 100 * federation.accuracy(_PERSONAL_PARTS)
    return Outcome(
        accuracy,
        federation.epsilon(),
        federation.claimed_epsilon() if federation.void else None,
        federation.void,
        federation.bytes_up,
        federation.bytes_down,
        federation.seconds,
    )


def read(run: Run, folder: Path) -> Outcome | None:
    """Return what ``folder`` has of ``run``, if it does."""
    try:
        kept = json.loads((folder / f"{run.digest}.json").read_text())["outcome"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None
    accuracy = {int(number): value for number, value in kept.pop("accuracy").items()}
    return Outcome(accuracy, **kept)


def perform_and_keep(run: Run, folder: Path) -> Outcome:
    """Return ``run`` from ``folder``, or run it and keep it there."""
    done = read(run, folder)
    if done is not None:
        return done
    origin = {**provenance.commit(), "cpu": provenance.cpu_model()}
    outcome = dataclasses.replace(perform(run), origin=origin)
    content = {"run": dataclasses.asdict(run), "outcome": dataclasses.asdict(outcome)}
    write_text(folder / f"{run.digest}.json", json.dumps(content) + "\n")
    return outcome
