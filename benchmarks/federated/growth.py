"""``growth``: time of a round over the number of clients, of records a client, and of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.federated import forms, ours
from benchmarks.federated.compare import threaded
from benchmarks.federated.workload import Size, records_of
from benchmarks.timing import Budget, Spread, measure

_CPU = torch.device("cpu")
_COLOURS = {
    "FedGD": "#2a6f97",
    "FedSOFIM": "#61a5c2",
    "FedNew-cg": "#bc4749",
    "FedNew-exact": "#6a994e",
}
_LOOP = ", per-client loop"
# Beyond this a round of FedNew-exact takes seconds and tells nothing new.
_EXACT_CLIENTS, _EXACT_RECORDS, _EXACT_FEATURES = 1000, 1000, 128


@dataclass(frozen=True)
class Axis:
    """One thing that grows, its sizes, and the round at each."""

    name: str
    sizes: tuple[int, ...]
    at: Callable[[int], Size]


AXES = (
    Axis(
        "clients (100 records, 64 x 10)",
        (10, 30, 100, 300, 1000, 3000, 10_000),
        lambda n: Size(clients=n),
    ),
    Axis(
        "records of each of 100 clients (64 x 10)",
        (10, 30, 100, 300, 1000, 3000),
        lambda n: Size(clients=100, records=n),
    ),
    Axis(
        "features (100 clients x 100 records, 10 classes)",
        (8, 16, 32, 64, 128, 256, 512, 1024),
        lambda n: Size(clients=100, features=n),
    ),
)


@dataclass(frozen=True)
class Point:
    """One form of a round at one size: milliseconds a round."""

    axis: str
    at: int
    form: str
    clients: int
    milliseconds: Spread


def _skipped(algorithm: str, size: Size) -> bool:
    large = (
        size.clients > _EXACT_CLIENTS
        or size.records > _EXACT_RECORDS
        or size.features > _EXACT_FEATURES
    )
    return algorithm == "FedNew-exact" and large


def points(axis: Axis, at: int, threads: int, budget: Budget) -> list[Point]:
    """Measure all algorithms, and the loops of FedGD and FedNew-cg, in turn."""
    size = axis.at(at)
    x, labels = records_of(size)
    problem = ours.problem_of(x, labels, size.classes)
    calls: dict[str, Callable[[], object]] = {}
    for algorithm in ours.ALGORITHMS:
        if _skipped(algorithm, size):
            continue
        federation = ours.federation(algorithm, problem, size)
        calls[algorithm] = threaded(federation.round, threads)
        if algorithm in ("FedGD", "FedNew-cg"):
            loop = forms.loops(algorithm)[0].make(x, labels, size, ours.client_std(federation))
            # Of a client's small tables two threads make nothing faster.
            calls[algorithm + _LOOP] = threaded(loop, 1)
    times = measure(list(calls.values()), budget, _CPU)
    torch.set_num_threads(threads)
    return [
        Point(axis.name, at, name, size.clients, Spread.of(found))
        for name, found in zip(calls, times, strict=True)
    ]


def picture(found: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw a round's time, and below it a client's, over each axis. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(one["axis"] for one in found))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(4.6 * len(names), 6.6), layout="constrained", squeeze=False
    )
    for column, name in enumerate(names):
        own = [one for one in found if one["axis"] == name]
        sizes = sorted({one["at"] for one in own})
        for form in dict.fromkeys(one["form"] for one in own):
            line = [one for one in own if one["form"] == form]
            style = "--" if form.endswith(_LOOP) else "o-"
            colour = _COLOURS[form.removesuffix(_LOOP)]
            at = [one["at"] for one in line]
            rounds = [one["milliseconds"]["median"] for one in line]
            each = [1e3 * one["milliseconds"]["median"] / one["clients"] for one in line]
            for axis, values in zip(axes[:, column], (rounds, each), strict=True):
                axis.plot(at, values, style, color=colour, markersize=4, label=form)
        for axis, label in zip(axes[:, column], ("ms a round", "us a client"), strict=True):
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
            axis.minorticks_off()
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1, column].set_xlabel(name, fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
