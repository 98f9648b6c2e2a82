"""What FedCEO's tables are made of: the paper's figures and settings, places, and their epsilon."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dpkernels.federated.contract import Query, Stage, Terms
from dpkernels.federated.release import Release
from dpkernels.federated.sampling import sampler_of
from dpkernels.privacy.accountants import make_accountant
from dpkernels.repro.federated.runs import Place

SIGMAS: tuple[float, ...] = (1.0, 1.5, 2.0)
EPSILONS: tuple[float, ...] = (8.0, 2.0)
CLIENTS, BATCH, RATE, DELTA = 100, 64, 0.1, 1e-5

# Tables 1 and 5, accuracy in percent at sigma 1 / 1.5 / 2.
_Figures = dict[str, tuple[float, float, float]]
_EMNIST: _Figures = {
    "UDP-FedAvg": (76.59, 69.91, 60.32),
    "PPSGD": (77.01, 70.78, 61.51),
    "CENTAUR": (77.26, 71.86, 62.12),
    "FedCEO, theta = 1": (77.14, 71.56, 63.38),
    "FedCEO": (78.05, 72.44, 64.20),
}
_LENET: _Figures = {
    "UDP-FedAvg": (43.87, 34.34, 26.88),
    "PPSGD": (49.24, 47.56, 34.61),
    "CENTAUR": (50.14, 46.90, 36.70),
    "FedCEO, theta = 1": (50.09, 48.89, 37.39),
    "FedCEO": (54.16, 50.00, 45.35),
}
_MLP_IID: _Figures = {
    "UDP-FedAvg": (40.21, 35.79, 31.62),
    "PPSGD": (41.34, 37.28, 33.51),
    "CENTAUR": (42.17, 38.21, 33.86),
    "FedCEO": (42.76, 39.16, 35.93),
}
_MLP_SHARDS: _Figures = {
    "UDP-FedAvg": (33.09, 28.92, 26.54),
    "PPSGD": (34.91, 31.40, 28.01),
    "CENTAUR": (34.56, 30.87, 28.11),
    "FedCEO": (36.10, 32.39, 29.13),
}
# Table 3, CIFAR-10 with LeNet-5, by the interval I: 10, 15, 20, 25, 30.
INTERVALS = (10, 15, 20, 25, 30)
BY_INTERVAL: dict[float, tuple[float, ...]] = {
    1.0: (53.62, 54.16, 53.01, 52.81, 52.80),
    1.5: (50.00, 49.71, 48.90, 47.41, 47.98),
    2.0: (45.35, 44.37, 44.81, 43.75, 43.20),
}
# (lambda, theta, I) of Table 2, by sigma.
_FOLDING: dict[str, dict[float, tuple[float, float, int]]] = {
    "emnist": {1.0: (70.0, 1.08, 30), 1.5: (0.5, 1.04, 20), 2.0: (0.03, 1.06, 20)},
    "cifar": {1.0: (85.0, 1.03, 15), 1.5: (10.0, 1.07, 10), 2.0: (0.6, 1.04, 10)},
}
# Of (0, 0.5, 1), on 4,000 held-out records of EMNIST letters, one seed, at epsilon 8 / 2: 60.0,
# 63.1, 62.6 / 43.9, 49.2, 49.1. CIFAR-10 had no say.
SMOOTH = "smooth:0.5"


@dataclass(frozen=True)
class Scale:
    """How much is trained: T and E. The paper's are 300 and 30."""

    rounds: int
    local_epochs: int

    @property
    def record_rounds(self) -> int:
        """T at record level: noise in every local step makes a round ten times as long there."""
        return self.rounds if self.rounds >= 300 else max(1, self.rounds // 3)

    @property
    def note(self) -> str:
        """What a reader should know of it."""
        if (self.rounds, self.local_epochs) == (300, 30):
            return "T = 300, E = 30, as in the paper."
        return (
            f"Scaled: T = {self.rounds} ({self.record_rounds} at record level), E = "
            f"{self.local_epochs}; the paper has 300 and 30 "
            "(--rounds 300 --local-epochs 30)."
        )


@dataclass(frozen=True)
class Data:
    """One data set with its network. folding: whose (lambda, theta, I). figures: the paper's."""

    dataset: str
    model: str
    partition: str
    records: float
    folding: str
    figures: _Figures


EMNIST = Data("emnist-letters", "mlp", "iid", 505.61, "emnist", _EMNIST)
LENET = Data("cifar10", "lenet5", "iid", 200.0, "cifar", _LENET)
CIFAR_IID = Data("cifar10", "mlp", "iid", 200.0, "cifar", _MLP_IID)
FASHION = Data("fashion", "mlp", "iid", 600.0, "emnist", {})
CIFAR_SHARDS = Data("cifar10", "mlp", "shards:2", 200.0, "cifar", _MLP_SHARDS)


def user_level(data: Data) -> Place:
    """Return Algorithm 2: K = 10 of 100 uploads with their own noise, each of them seen."""
    return Place(
        data.dataset,
        CLIENTS,
        data.partition,
        unit="user",
        view="each_upload",
        adjacency="replace-one",
        delta=DELTA,
        model=data.model,
        sampling="fixed:10",
    )


def in_turn(data: Data) -> Place:
    """Return the same with every client once in ten rounds: the least noise where uploads are seen.

    Whoever sees uploads sees who took part; drawn by chance, a client may be in any of the rounds.
    """
    return replace(user_level(data), sampling="shuffled:10")


def summed_only(data: Data) -> Place:
    """Return the sound form of the same: only the sum is seen, and clients are drawn by chance."""
    return replace(
        user_level(data),
        view="aggregate",
        adjacency="add-remove",
        sampling=f"poisson:{10 / CLIENTS}",
    )


def record_level(data: Data) -> Place:
    """Return what Table 1 was made with: DP-SGD inside the clients."""
    rate = min(1.0, BATCH / data.records)
    return replace(user_level(data), unit="record", adjacency="add-remove", record_rate=rate)


def smooth(place: Place) -> Place:
    """Return the same on images that a public filter has smoothed."""
    return replace(place, public=(*place.public, SMOOTH))


def thresholds(data: Data, sigma: float, **changed: float) -> dict[str, Any]:
    """Return the paper's lambda, theta and interval for ``sigma``, with what is ``changed``."""
    lam, theta, interval = _FOLDING[data.folding][sigma]
    return {"lam": lam, "theta": theta, "interval": interval, "restart": "own", **changed}


def local_steps(data: Data, scale: Scale) -> int:
    """Return how many batches E epochs have."""
    return max(1, round(scale.local_epochs * data.records / BATCH))


def epsilon_of(place: Place, sigma: float, rounds: int, releases: int = 1) -> float:
    """Return epsilon of exact Gaussian noise of the paper's ``sigma``, as clients were drawn."""
    sampler = sampler_of(place.sampling, place.clients)
    assert sampler is not None
    terms = Terms(place.clients, 1.0, (1,), rounds, place.unit, place.view, place.adjacency)
    cohort = sampler.expected_batch_size
    release = Release(terms, sampler.sampling, cohort, record_rate=place.record_rate)
    stage = Stage("step", Query((1,), 1.0), rounds, releases, redrawn=place.record_rate < 1)
    told = release.statement(stage, place.multiplier(sigma))
    spent = make_accountant("rdp")
    exact = replace(told, queries=tuple(replace(q, unreachable=0.0) for q in told.queries))
    spent.compose(exact, rounds * release.steps(stage))
    return spent.epsilon(DELTA)


def guarantees(data: Data, scale: Scale) -> str:
    """Return what the paper's noise is worth, by mechanism and view, as Markdown."""
    user, record = user_level(data), record_level(data)
    steps = local_steps(data, scale)
    rows: list[tuple[str, Place, int]] = [
        ("user, only the sum seen, Poisson sampling", summed_only(data), 1),
        ("user, only the sum seen, 10 of 100, replace-one", replace(user, view="aggregate"), 1),
        ("user, each upload seen (folding needs it), 10 of 100", user, 1),
        ("user, each upload seen, every client in every tenth round", in_turn(data), 1),
        (f"record, each upload seen, {steps} DP-SGD steps in a round", record, steps),
    ]
    columns = " | ".join(f"sigma {sigma:g}" for sigma in SIGMAS)
    lines = ["", f"## Epsilon of the noise at delta = 1e-5: {data.dataset}, {data.model}", ""]
    lines += [f"| unit and view | {columns} |", "|---" * (len(SIGMAS) + 1) + "|"]
    for label, place, releases in rows:
        rounds = scale.record_rounds if place.unit == "record" else scale.rounds
        found = (epsilon_of(place, sigma, rounds, releases) for sigma in SIGMAS)
        lines.append(f"| {label} | {' | '.join(f'{epsilon:.1f}' for epsilon in found)} |")
    several = f"| record, only the sum seen, {steps} steps | none | none | none |"
    lines += [several if steps > 1 else ""]
    lines += [
        "",
        "By Renyi divergences, for exact Gaussian noise. Drawn noise ends at 11.6 deviations: "
        "above epsilon 24 or so nothing can be certified with it at this delta.",
        "Record level under secure aggregation: a later local step depends on the client's own "
        "share of the noise, which is too little by itself.",
    ]
    return "\n".join(lines) + "\n"
