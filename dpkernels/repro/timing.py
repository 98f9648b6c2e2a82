"""Which trainings are timed: whole, alone, ours and Opacus', in folders of their own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkernels.repro.opacus_peer import MODES
from dpkernels.repro.tables import Block, Cell, Epsilon, Table, first_epsilon
from dpkernels.repro.trials import Task, Trial, epsilons_in, folder_of, options_of, read
from dpkernels.train.options import Options

FOLDER = "timing"
# What is timed whatever methods are asked for.
_ALWAYS = ("dp-sgd", "dp-kfc")


@dataclass(frozen=True)
class Timing:
    """The trials of one method, at least one.

    label: the row's, or Opacus' and its mode. opacus: the mode, None for ours.
    """

    label: str
    opacus: str | None
    trials: tuple[Trial, ...]

    @property
    def samples_per_second(self) -> float:
        """Median over repeats: of training with all estimates of curvature, without evaluation."""
        return statistics.median(trial.samples_per_second for trial in self.trials)

    @property
    def wall_seconds(self) -> float:
        """Median over repeats: of everything, from the data to the last evaluation."""
        return statistics.median(trial.wall_seconds for trial in self.trials)

    @property
    def others(self) -> float | None:
        """The most processors that other processes kept busy beside a repeat."""
        counted = [attempt.others for trial in self.trials for attempt in trial.attempts]
        return max((one for one in counted if one is not None), default=None)

    def against(self, peer: Timing) -> tuple[float, float]:
        """Return how many times as fast as ``peer`` this is: in training, in the whole run."""
        training = self.samples_per_second / peer.samples_per_second
        return training, peer.wall_seconds / self.wall_seconds


def timed_tasks(
    table: Table,
    wanted: Sequence[Cell],
    methods: Sequence[str],
    repeats: int,
    runs: Path,
    changed: Mapping[str, Any],
) -> list[Task]:
    """Return what ``--timing`` runs: for each block of ``wanted``, at its first epsilon, seed 0.

    The sequence of methods is repeated as a whole, so that a change of the machine's pace meets
    all of them.
    """
    tasks = []
    for block in table.blocks:
        epsilon = first_epsilon(wanted, block)
        for repeat in range(repeats if epsilon is not None else 0):
            tasks += [
                replace(task, folder=task.folder.with_name(f"repeat-{repeat}"))
                for _, task in _sequence(block, epsilon, runs, changed)
                if task.opacus is not None or task.options.method in {*_ALWAYS, *methods}
            ]
    return tasks


def read_timings(
    table: Table, runs: Path, changed: Mapping[str, Any]
) -> dict[tuple[str, float], list[Timing]]:
    """Return the timings in ``runs``, by the block's title and the epsilon."""
    found: dict[tuple[str, float], list[Timing]] = {}
    for block in table.blocks:
        for epsilon in _timed_at(block, runs, changed):
            for label, task in _sequence(block, epsilon, runs, changed):
                folders = sorted(task.folder.parent.glob("repeat-*"))
                trials = [read(replace(task, folder=folder)) for folder in folders]
                finished = tuple(trial for trial in trials if trial is not None)
                if finished:
                    timing = Timing(label, task.opacus, finished)
                    found.setdefault((block.title, epsilon), []).append(timing)
    return found


def _timed_at(block: Block, runs: Path, changed: Mapping[str, Any]) -> list[float]:
    any_budget = _sequence(block, 1.0, runs, changed)
    return sorted({epsilon for _, task in any_budget for epsilon in epsilons_in(task.folder)})


def _sequence(
    block: Block, epsilon: Epsilon, runs: Path, changed: Mapping[str, Any]
) -> list[tuple[str, Task]]:
    """Return what can be timed of ``block``, with its label.

    Those are the rows with a budget, and after them Opacus with the options of DP-SGD's row.
    """
    ours, theirs = [], []
    for row in block.rows:
        if block.not_run or row.not_run or None in row.printed:
            continue
        options = options_of(Cell(block, row, epsilon, None), 0, changed)
        ours.append((row.label, _timed(block, row.label, options, runs)))
        for mode in MODES if row.method == "dp-sgd" else ():
            label = f"Opacus' DP-SGD, {mode}"
            theirs.append((label, _timed(block, label, options, runs, mode)))
    return ours + theirs


def _timed(
    block: Block, label: str, options: Options, runs: Path, opacus: str | None = None
) -> Task:
    folder = folder_of(runs / FOLDER, options, opacus and f"opacus-{opacus}")
    name = f"{block.title}, {label}, epsilon {options.epsilon:g}, timed"
    return Task(name, options, folder, opacus, timed=True)
