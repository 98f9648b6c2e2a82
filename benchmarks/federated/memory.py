"""``memory``: what a FedNew round takes on 512 x 10 features, where one Hessian is 105 MB.

With 256 records, forming every record's Hessian would take 256 x 105 MB = 27 GB for one client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.federated import ours
from benchmarks.federated.workload import Size, records_of
from benchmarks.memory import PeakMemory, peak_extra_memory
from benchmarks.report import markdown_table

SIZES = tuple(Size(clients, 256, 512, 10) for clients in (1, 8))
LIMIT_MEGABYTES = 300.0


@dataclass(frozen=True)
class Measured:
    """Peak memory of a round on top of what it was given."""

    algorithm: str
    clients: int
    memory: PeakMemory
    limit_megabytes: float


def measure(algorithm: str, size: Size) -> Measured:
    """Return the peak of the second round."""
    x, labels = records_of(size)
    federation = ours.federation(algorithm, ours.problem_of(x, labels, size.classes), size)
    federation.round()
    peak = peak_extra_memory(federation.round, torch.device("cpu"))
    return Measured(algorithm, size.clients, peak, LIMIT_MEGABYTES)


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each algorithm and number of clients."""
    rows = []
    for one in found:
        memory = one["memory"]
        resident = memory["resident"]
        most = max(memory["allocated"], resident or 0) / 1e6
        verdict = "met" if most <= one["limit_megabytes"] else "MISSED"
        shown = "n/a" if resident is None else f"{resident / 1e6:.3g} MB"
        row = [one["algorithm"], str(one["clients"]), f"{memory['allocated'] / 1e6:.3g} MB", shown]
        rows.append([*row, f"at most {one['limit_megabytes']:g} MB: {verdict}"])
    return markdown_table(["round", "clients", "tensors", "resident", "target"], rows)
