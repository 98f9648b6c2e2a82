"""``profile``: where the time of our round goes beside the kernels.

Functions of a round are wrapped by stopwatches. A part's own time leaves out the parts inside it;
"the rest" is what no stopwatch saw: Python between the parts, tensors that are made and freed.
"""

from __future__ import annotations

import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.federated import ours
from benchmarks.federated.workload import Size, records_of
from benchmarks.report import markdown_table
from benchmarks.timing import Spread

_WARM_UP = 5
_REST = "the rest of Federation.round"
# Where a part is looked up, its name there, and what the table calls it.
_PARTS = (
    ("dpkernels.federated.softmax.glm", "clipped_gradient_sum", "kernel: clipped gradient sums"),
    ("dpkernels.federated.algorithms.newton.glm", "newton_step_cg", "kernel: conjugate gradients"),
    ("dpkernels.federated.algorithms.newton.glm", "newton_step", "kernel: exact Newton step"),
    ("dpkernels.federated.client_noise", "add_row_noise_", "kernel: noise of all clients"),
    ("dpkernels.federated.algorithms.fednew", "clip_rows", "FedNew: projection of s"),
    ("dpkernels.federated.client_noise.ClientNoise", "__call__", "noisy: zero what is not finite"),
    ("dpkernels.federated.loop", "collect_rows", "received: leave out what is not finite"),
    ("dpkernels.federated.received.Received", "total", "sum of uploads, float64"),
    ("dpkernels.federated.loop.RowKeys", "reserve", "noise keys and counters"),
    ("dpkernels.federated.softmax.SoftmaxProblem", "cohort", "cohort of the round"),
    ("dpkernels.federated.loop.Federation", "statement", "privacy statement"),
    ("dpkernels.privacy.accountants.accountant.Accountant", "compose", "accounting"),
)


class Stopwatches:
    """Own time of nested calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its own time added to ``name``."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            begun = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                taken = time.perf_counter() - begun
                self.seconds[name] += taken - self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken

        return timed


@dataclass(frozen=True)
class Breakdown:
    """One algorithm's round: milliseconds in all, and each part's own milliseconds (medians)."""

    algorithm: str
    threads: int
    milliseconds: Spread
    parts: dict[str, float]


@contextmanager
def _watched(watches: Stopwatches) -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, label in _PARTS:
            owner = _resolve(place)
            wrapped = watches.wrap(label, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def _resolve(place: str) -> Any:
    """Return a module, or an attribute of one, by its dotted name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        parent, _, name = place.rpartition(".")
        return getattr(_resolve(parent), name)


def breakdown(algorithm: str, size: Size, threads: int, rounds: int) -> Breakdown:
    """Return where the time of ``rounds`` rounds went."""
    x, labels = records_of(size)
    federation = ours.federation(algorithm, ours.problem_of(x, labels, size.classes), size)
    torch.set_num_threads(threads)
    for _ in range(_WARM_UP):
        federation.round()
    totals, parts = [], defaultdict(list)
    for _ in range(rounds):
        watches = Stopwatches()
        with _watched(watches):
            watches.wrap(_REST, federation.round)()
        totals.append(1e3 * sum(watches.seconds.values()))
        for name, seconds in watches.seconds.items():
            parts[name].append(1e3 * seconds)
    medians = {name: Spread.of(found).median for name, found in parts.items()}
    ordered = dict(sorted(medians.items(), key=lambda item: -item[1]))
    return Breakdown(algorithm, threads, Spread.of(totals), ordered)


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each part and a column for each algorithm, in milliseconds."""
    names = dict.fromkeys(name for one in found for name in one["parts"])
    rows = [[name, *(_part(one, name) for one in found)] for name in names]
    rows.append(["**all**", *(f"**{one['milliseconds']['median']:.3g}**" for one in found)])
    return markdown_table(["part, ms", *(_title(one) for one in found)], rows)


def _title(one: dict[str, Any]) -> str:
    return f"{one['algorithm']}, {one['threads']} thread{'s' if one['threads'] > 1 else ''}"


def _part(one: dict[str, Any], name: str) -> str:
    if name not in one["parts"]:
        return ""
    share = one["parts"][name] / one["milliseconds"]["median"]
    return f"{one['parts'][name]:.3g} ({share:.0%})"
