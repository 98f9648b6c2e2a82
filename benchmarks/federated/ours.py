"""Our rounds: ``Federation`` with each algorithm, unit record, view aggregate."""

from __future__ import annotations

from torch import Tensor

from benchmarks.federated.workload import CLIP, LR, Size
from dpkernels.federated import (
    Algorithm,
    Federation,
    FedGD,
    FedNew,
    FedSOFIM,
    SoftmaxProblem,
    Terms,
)
from dpkernels.ops import glm

# More than are measured: the budget is for a fixed number of rounds.
_PLANNED = 100_000
EPSILON, DELTA = 8.0, 1e-5

ALGORITHMS: dict[str, Algorithm] = {
    "FedGD": FedGD(lr=LR, clip=CLIP),
    "FedSOFIM": FedSOFIM(lr=0.1, clip=CLIP),
    "FedNew-cg": FedNew(clip=CLIP, hessian="cg"),
    "FedNew-exact": FedNew(clip=CLIP, hessian="exact"),
}
# Share of the per-client loop's time that our round may take.
TARGETS = {"FedGD": 0.10, "FedSOFIM": 0.10, "FedNew-cg": 0.10, "FedNew-exact": 0.20}


def problem_of(x: Tensor, labels: Tensor, classes: int) -> SoftmaxProblem:
    """Return the clients' records as our problem; the test part is the first client's."""
    return SoftmaxProblem(glm.Records.padded(x, labels), x[0], labels[0], classes=classes)


def federation(
    name: str, problem: SoftmaxProblem, size: Size, *, private: bool = True
) -> Federation:
    """Return the federation of that algorithm; without noise unless ``private``."""
    shape = (size.classes, size.features)
    terms = Terms(size.clients, size.records, shape, _PLANNED, "record", "aggregate", "replace-one")
    epsilon = EPSILON if private else None
    return Federation(ALGORITHMS[name], problem, terms, epsilon=epsilon, delta=DELTA)


def client_std(made: Federation) -> float:
    """Return the noise that each client adds to every element of its upload."""
    stage = made.stages[0]
    return made.release.client_std(stage, made.multipliers[stage.name])
