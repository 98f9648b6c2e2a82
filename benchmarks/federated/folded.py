"""``fold``: FedCEO's server step, all layers of 10 models, beside a round of 30 local epochs.

The models are noisy as they are in training, and thresholds those of the paper's sigma = 1, the
lowest, at which the most singular values are left to compute with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.federated.local import Case, problem_of
from benchmarks.report import markdown_table
from benchmarks.timing import Budget, Spread, measure
from dpkernels.federated import LocalSGD, ModelProblem
from dpkernels.federated.folding import thresholded

_CPU = torch.device("cpu")
_CLIENTS, _BATCH, _RATE, _EPOCHS, _SIGMA = 10, 64, 0.1, 30, 1.0
_TARGET = 0.01
# A case with 1 / (2 lambda) of its data set, and the rounds between folds.
CASES: tuple[tuple[Case, float, int], ...] = (
    (Case(784, 26, 500, _EPOCHS), 1 / 140, 30),
    (Case(3072, 10, 200, _EPOCHS), 1 / 170, 15),
    (Case(None, 10, 200, _EPOCHS), 1 / 170, 15),
)


@dataclass(frozen=True)
class Found:
    """One case: milliseconds of local training and of both server steps, and their shares.

    slices: all layers of all models (restart 'own', 'slot'). mean: of their mean (restart 'mean').
    share: of slices in the round that folds, local training and that step. interval: I.
    """

    case: str
    interval: int
    local: Spread
    slices: Spread
    mean: Spread
    share: Spread


def noisy_models(problem: ModelProblem) -> Tensor:
    """Return the models of a round with Algorithm 2's noise on every upload."""
    theta = problem.initial()
    noise = torch.randn(_CLIENTS, len(theta), generator=torch.Generator().manual_seed(0))
    return noise.mul_(_RATE * _SIGMA / _CLIENTS**0.5).add_(theta)


def compare(case: Case, tau: float, interval: int, budget: Budget) -> Found:
    """Time local training and both server steps in turn."""
    problem = problem_of(case)
    cohort, theta = problem.cohort(torch.arange(_CLIENTS)), problem.initial()
    local, seeds = LocalSGD(case.epochs, _BATCH, _RATE), torch.arange(_CLIENTS) + 1
    models = noisy_models(problem)
    middle = models.mean(0, keepdim=True)
    forms = [
        lambda: problem.local_updates(cohort, theta, local, seeds),
        lambda: thresholded(problem.layers, models, tau),
        lambda: thresholded(problem.layers, middle, tau / _CLIENTS),
    ]
    trained, slices, mean = measure(forms, budget, _CPU)
    share = [b / (a + b) for a, b in zip(trained, slices, strict=True)]
    spreads = (Spread.of(times) for times in (trained, slices, mean, share))
    return Found(str(case), interval, *spreads)


def run(seconds: float) -> list[dict[str, Any]]:
    """Return all cases."""
    found = []
    for case, tau, interval in CASES:
        found.append(asdict(compare(case, tau, interval, Budget(seconds))))
        print(table(found[-1:]), flush=True)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each case."""
    header = [
        "round of 10 clients, batch 64",
        "local training, ms",
        "all layers of 10 models folded, ms",
        "of the round that folds",
        "of all rounds",
        "their mean folded, ms",
    ]
    rows = []
    for one in found:
        local, slices = one["local"]["median"], one["slices"]["median"]
        share, over = one["share"]["median"], slices / one["interval"]
        verdict = "met" if share < _TARGET else "MISSED"
        rows.append(
            [
                one["case"],
                f"{local:.4g}",
                f"{slices:.3g}",
                f"{share:.2%}, target {_TARGET:.0%}: {verdict}",
                f"{over / (local + over):.2%}, I = {one['interval']}",
                f"{one['mean']['median']:.3g}",
            ]
        )
    return markdown_table(header, rows)
