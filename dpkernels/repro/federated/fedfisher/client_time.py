"""Table 1: what Fisher information costs a client, over what its training costs.

Timed alone, one client after the other in one process, each part as often as asked and the parts
in turn; the median counts. Nothing is kept: a figure of another hour is of another machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpkernels.fisher import fisher_information
from dpkernels.repro.federated.fedfisher import training
from dpkernels.repro.federated.fedfisher.figures import TABLE_1
from dpkernels.repro.federated.fedfisher.scene import Scene, parted
from dpkernels.repro.federated.fedfisher.uploads import BATCH

# What a client may compute, by the name of its row; the first two are ours, the others the paper's.
FISHERS: Mapping[str, tuple[str, str]] = {
    "K-FAC, one pass": ("kronecker", "rademacher"),
    "Diag, one pass": ("diagonal", "rademacher"),
    "K-FAC, exact over classes": ("kronecker", "exact"),
    "Diag, exact over classes": ("diagonal", "exact"),
}
TRAINING = "local training"


@dataclass(frozen=True)
class Times:
    """Seconds of a client, the mean over those with records, by row; ``TRAINING`` first."""

    scene: Scene
    seconds: Mapping[str, float]
    threads: int

    def overhead(self, row: str) -> float:
        """Return how many percent of local training a row adds."""
        return 100 * self.seconds[row] / self.seconds[TRAINING]


def measure(scene: Scene, repeats: int = 3) -> Times:
    """Time every client of ``scene`` that has records; repeats: of each part, the median counts.

    Raises ValueError for fewer repeats than 1.
    """
    if repeats < 1:
        raise ValueError(f"timing_repeats must be an integer >= 1, got {repeats}")
    found: dict[str, list[float]] = {}
    for client in range(scene.clients):
        if int(parted(scene).parts.sizes[client]):
            for row, seconds in _client(scene, client, repeats).items():
                found.setdefault(row, []).append(seconds)
    means = {row: statistics.fmean(seconds) for row, seconds in found.items()}
    return Times(scene, means, torch.get_num_threads())


def _client(scene: Scene, client: int, repeats: int) -> dict[str, float]:
    records, problem = parted(scene), training.problem_of(scene)
    x = records.images(records.data.x[records.parts.indices(client)])
    cohort = problem.cohort(torch.tensor([client]))
    local, seeds = training.local_of(scene), training.client_seeds(scene)[client : client + 1]
    moved = torch.empty(0)

    def train() -> None:
        nonlocal moved
        moved = problem.local_updates(cohort, problem.initial(), local, seeds)

    parts: dict[str, Callable[[], object]] = {TRAINING: train}
    for row, (kind, expectation) in FISHERS.items():

        def of(kind: Any = kind, expectation: Any = expectation) -> object:
            problem.set(problem.initial() + moved[0])
            return fisher_information(
                problem.model, x.split(BATCH), kind=kind, expectation=expectation
            )

        parts[row] = of
    seconds: dict[str, list[float]] = {row: [] for row in parts}
    for _ in range(repeats):
        for row, part in parts.items():
            began = time.perf_counter()
            part()
            seconds[row].append(time.perf_counter() - began)
    return {row: statistics.median(each) for row, each in seconds.items()}


def markdown(found: Sequence[Times], repeats: int, where: Mapping[str, Any]) -> str:
    """Return Table 1, the paper's seconds beside ours."""
    threads = found[0].threads
    lines = [
        "# FedFisher: Table 1, time of a client",
        "",
        f"- Seconds, the mean over the clients, one at a time, {threads} thread(s), the median of "
        f"{repeats}; the paper's are of a TitanX GPU. Alpha .1, five clients, the paper's "
        "partition.",
        "- The paper computes the expectation exactly over classes. 'One pass' is the default.",
    ]
    for times in found:
        scene = times.scene
        base, kfac, diagonal = TABLE_1.get(scene.dataset, (None, None, None))
        lines += ["", f"## {scene.dataset}, {scene.model}, {scene.local_epochs} epochs", ""]
        lines += ["| row | paper, s | ours, s | paper, over training | ours |", "|---" * 5 + "|"]
        for row, seconds in times.seconds.items():
            papers = base if row == TRAINING else None
            if row.endswith("classes"):
                papers = kfac if row.startswith("K-FAC") else diagonal
            told = "-" if papers is None else f"{papers:.1f}"
            over = ours = "-"
            if row != TRAINING:
                ours = f"**+{times.overhead(row):.1f}%**"
                if papers is not None and base is not None:
                    over = f"+{100 * (papers / base - 1):.1f}%"
            lines.append(f"| {row} | {told} | {seconds:.2f} | {over} | {ours} |")
    lines += ["", "The paper's seconds of a Fisher row are with training, ours without."]
    lines += ["", f"Run at {where['commit']}, {where['cpu']}, {where['time']}."]
    return "\n".join(lines) + "\n"


def to_dict(
    found: Sequence[Times], repeats: int, where: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Return everything, in types that JSON knows."""
    return {
        "title": "FedFisher: Table 1, time of a client",
        "command": command,
        "provenance": dict(where),
        "repeats": repeats,
        "tables": [
            {
                "dataset": times.scene.dataset,
                "model": times.scene.model,
                "local_epochs": times.scene.local_epochs,
                "threads": times.threads,
                "seconds": dict(times.seconds),
                "paper": TABLE_1.get(times.scene.dataset),
            }
            for times in found
        ],
    }
