"""What a peer's module is asked on its command line, and what it prints."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
from dataclasses import dataclass
from typing import Literal, cast

import torch

from benchmarks.federated.peers.tasks import WORKLOADS, Task, task_of
from benchmarks.federated.workload import Size

Noise = Literal["local", "central"]


@dataclass(frozen=True)
class Asked:
    """One run: the first round of ``rounds`` + 1 warms up and is not timed."""

    task: Task
    rounds: int
    threads: int
    noise: Noise
    cpus_per_client: int


def parse() -> Asked:
    """Read the command line, and set the number of threads."""
    parser = argparse.ArgumentParser()
    for name in ("clients", "records", "features", "classes", "rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="softmax")
    parser.add_argument("--noise", choices=("local", "central"), default="local")
    parser.add_argument("--cpus-per-client", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    size = Size(given.clients, given.records, given.features, given.classes)
    noise = cast(Noise, given.noise)
    task = task_of(given.workload, size)
    return Asked(task, given.rounds, given.threads, noise, given.cpus_per_client)


def answer(times: list[float], losses: tuple[float, float], packages: tuple[str, ...]) -> None:
    """Print seconds of every round after the first, from the clock at the end of each round."""
    seconds = [after - before for before, after in itertools.pairwise(times)]
    versions = {name: importlib.metadata.version(name) for name in packages}
    found = {
        "seconds": seconds,
        "loss_before": losses[0],
        "loss_after": losses[1],
        "versions": versions,
    }
    print(json.dumps(found), flush=True)
