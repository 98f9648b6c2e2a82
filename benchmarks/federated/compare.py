"""``round``: our round against the fastest per-client loop and against batched PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.federated import forms, ours
from benchmarks.federated.workload import Size, records_of
from benchmarks.report import markdown_table
from benchmarks.timing import Budget, Spread, interleave, measure

_CPU = torch.device("cpu")
_PROBES = 3
# Three calls do not tell the fastest form on a busy machine: whatever comes this near is measured
# in full, and the fastest median counts.
_CONTENDS = 1.5


@dataclass(frozen=True)
class Timed:
    """One form of a round: its name, its threads, milliseconds a round."""

    name: str
    threads: int
    milliseconds: Spread


@dataclass(frozen=True)
class Comparison:
    """One algorithm.

    ratio, batched_ratio: ours, and batched PyTorch's, over the loop's time in the same turn.
    target: what ``ratio`` may be at most.
    probes: least milliseconds of every form, by name and threads.
    """

    algorithm: str
    ours: Timed
    loop: Timed
    batched: Timed
    ratio: Spread
    batched_ratio: Spread
    target: float
    probes: dict[str, float]

    @property
    def met(self) -> bool:
        """Whether the median keeps to the target."""
        return self.ratio.median <= self.target


def threaded(call: Callable[[], object], threads: int) -> Callable[[], None]:
    """Return ``call`` with that many threads; setting them costs about a microsecond."""

    def run() -> None:
        torch.set_num_threads(threads)
        call()

    return run


def compare(algorithm: str, size: Size, threads: int, budget: Budget) -> Comparison:
    """Check all forms, leave out slow ones, time the others in turn; the fastest of each counts."""
    x, labels = records_of(size)
    problem = ours.problem_of(x, labels, size.classes)
    torch.set_num_threads(threads)
    forms.check(algorithm, x, labels, size, problem)
    federation = ours.federation(algorithm, problem, size)
    std = ours.client_std(federation)
    counts = sorted({1, threads})
    ways: dict[str, list[tuple[str, Callable[[], object]]]] = {
        "ours": [("Federation.round", federation.round)],
        "loop": [(f.name, f.make(x, labels, size, std)) for f in forms.loops(algorithm)],
        "batched": [("bmm", forms.batched_form(algorithm).make(x, labels, size, std))],
    }
    tried = [
        (kind, name, count, threaded(call, count))
        for kind, calls in ways.items()
        for name, call in calls
        for count in counts
    ]
    try:
        interleave([call for *_, call in tried], 1, _CPU)
        probed = interleave([call for *_, call in tried], _PROBES, _CPU)
        least = [min(times) for times in probed]
        best = {
            kind: min(ms for way, ms in zip(tried, least, strict=True) if way[0] == kind)
            for kind in ways
        }
        contenders = [
            way for way, ms in zip(tried, least, strict=True) if ms <= _CONTENDS * best[way[0]]
        ]
        milliseconds = measure([call for *_, call in contenders], budget, _CPU)
    finally:
        torch.set_num_threads(threads)
    timed: dict[str, Timed] = {}
    times_of: dict[str, list[float]] = {}
    for (kind, name, count, _), times in zip(contenders, milliseconds, strict=True):
        found = Timed(name, count, Spread.of(times))
        if kind not in timed or found.milliseconds.median < timed[kind].milliseconds.median:
            timed[kind], times_of[kind] = found, times
    probes = {
        f"{kind}: {name}, {count} threads": ms
        for (kind, name, count, _), ms in zip(tried, least, strict=True)
    }

    def over_loop(kind: str) -> Spread:
        pairs = zip(times_of[kind], times_of["loop"], strict=True)
        return Spread.of([own / loop for own, loop in pairs])

    return Comparison(
        algorithm,
        **timed,
        ratio=over_loop("ours"),
        batched_ratio=over_loop("batched"),
        target=ours.TARGETS[algorithm],
        probes=probes,
    )


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each algorithm, from the JSON of its ``Comparison``."""
    rows = []
    for one in found:
        cells = [_cell(one[kind]) for kind in ("ours", "loop", "batched")]
        met = one["ratio"]["median"] <= one["target"]
        verdict = f"at most {one['target']:.0%}: {'met' if met else 'MISSED'}"
        ratios = [_percent(one[kind]) for kind in ("ratio", "batched_ratio")]
        rows.append([one["algorithm"], *cells, *ratios, verdict])
    header = [
        "round",
        "dpkernels",
        "per-client loop",
        "batched PyTorch",
        "dpkernels / loop (quartiles)",
        "batched / loop (quartiles)",
        "target",
    ]
    return markdown_table(header, rows)


def _cell(timed: dict[str, Any]) -> str:
    threads = f"{timed['threads']} thread{'s' if timed['threads'] > 1 else ''}"
    return f"{timed['milliseconds']['median']:.3g} ms ({timed['name']}, {threads})"


def _percent(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1%} ({spread['p25']:.1%}-{spread['p75']:.1%})"
