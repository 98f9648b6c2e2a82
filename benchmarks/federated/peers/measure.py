"""``peers`` and ``peers_cifar``: our round beside the same in pfl-research and Flower."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.federated import ours
from benchmarks.federated.peers import cifar_ours
from benchmarks.federated.peers.asked import Noise
from benchmarks.federated.peers.environments import CIFAR_SETTINGS, SETTINGS, Setting, run
from benchmarks.federated.peers.tasks import CIFAR_SIZE, Workload, task_of
from benchmarks.federated.workload import Size, records_of
from benchmarks.report import markdown_table
from benchmarks.timing import Budget, Spread, measure

OURS = "dpkernels"
_OURS_DOES = "FedGD: every record's gradient clipped, each client's noise; privacy accounted"
_CIFAR_DOES: dict[Noise, str] = {
    "central": "a local epoch of SGD, each client's update clipped, noise once on the sum; privacy "
    "accounted",
    "local": "the same with noise by every client: its share of the sum's",
}
_OUR_VERSIONS = {"torch": str(torch.__version__)}


@dataclass(frozen=True)
class Round:
    """One framework's round: how it was run, what it does, milliseconds after the first round.

    loss_before, loss_after: mean loss of all records, to see that it trains; None for ours.
    """

    name: str
    does: str
    threads: int
    milliseconds: Spread
    versions: dict[str, str]
    loss_before: float | None = None
    loss_after: float | None = None


def _own(size: Size, threads: int, budget: Budget) -> Round:
    torch.set_num_threads(threads)
    x, labels = records_of(size)
    federation = ours.federation("FedGD", ours.problem_of(x, labels, size.classes), size)
    times = measure([federation.round], budget, torch.device("cpu"))[0]
    return Round(OURS, _OURS_DOES, threads, Spread.of(times), _OUR_VERSIONS)


def _own_cifar(noise: Noise, size: Size, threads: int, budget: Budget) -> Round:
    federation = cifar_ours.federation(task_of("cifar", size), noise)

    def timed(count: int) -> Round:
        torch.set_num_threads(count)
        times = measure([federation.round], budget, torch.device("cpu"))[0]
        name = f"{OURS} --noise {noise}"
        return Round(name, _CIFAR_DOES[noise], count, Spread.of(times), _OUR_VERSIONS)

    try:
        return min(map(timed, sorted({1, threads})), key=lambda one: one.milliseconds.median)
    finally:
        torch.set_num_threads(threads)


def _theirs(setting: Setting, size: Size, rounds: int, threads: int, workload: Workload) -> Round:
    found = run(setting, size, rounds, threads, workload)
    return Round(
        " ".join((setting.peer, *setting.arguments)),
        setting.does,
        threads,
        Spread.of([1e3 * seconds for seconds in found["seconds"]]),
        found["versions"],
        found["loss_before"],
        found["loss_after"],
    )


def rounds_of_all(size: Size, threads: int, rounds: int, budget: Budget) -> list[Round]:
    """Measure ours, then each setting of each peer, one after the other.

    A peer has a process of its own, so that nothing can be interleaved. pfl runs with one thread
    and with ``threads``, and the faster counts; Flower's clients have one thread a core.
    """
    own = [_own(size, threads, budget)]
    return own + _peers(SETTINGS, size, threads, rounds, "softmax")


def rounds_on_cifar(
    threads: int, rounds: int, budget: Budget, size: Size = CIFAR_SIZE
) -> list[Round]:
    """Measure rounds of pfl-research's CIFAR-10 shape in the same way; ours counts likewise."""
    noises: tuple[Noise, ...] = ("central", "local")
    own = [_own_cifar(noise, size, threads, budget) for noise in noises]
    return own + _peers(CIFAR_SETTINGS, size, threads, rounds, "cifar")


def _peers(
    settings: Sequence[Setting], size: Size, threads: int, rounds: int, workload: Workload
) -> list[Round]:
    found = []
    for setting in settings:
        print(" ".join((setting.peer, *setting.arguments)), file=sys.stderr, flush=True)
        counts = sorted({1, threads}) if setting.peer == "pfl" else [1]
        tried = [_theirs(setting, size, rounds, count, workload) for count in counts]
        found.append(min(tried, key=lambda one: one.milliseconds.median))
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each framework and setting, with multiples of our time."""
    own = next(one for one in found if one["name"].startswith(OURS))["milliseconds"]["median"]
    rows = []
    for one in found:
        spread = one["milliseconds"]
        quartiles = f"{spread['p25']:.3g}-{spread['p75']:.3g}"
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        times = f"{spread['median']:.3g} ms ({quartiles})"
        rows.append([one["name"], times, _times(spread["median"] / own), one["does"], versions])
    header = ["framework", "a round (quartiles)", "of dpkernels", "in a round", "versions"]
    return markdown_table(header, rows)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.3g}x"
