"""Paper and ours side by side: what the files of a table hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpkernels.repro.attempts import Attempt
from dpkernels.repro.tables import Block, Cell, Epsilon, Table
from dpkernels.repro.timing import Timing, read_timings
from dpkernels.repro.trials import Trial, epsilons_in, read, seeds_in, task_of

Key = tuple[str, str, Epsilon]


@dataclass(frozen=True)
class Ours:
    """The trials of one cell, at least one.

    mean, spread: accuracy in percent and its standard deviation over seeds, None for one seed.
    epsilon: the most that a trial spent, None if there is no guarantee.
    accuracies: by seed.
    """

    mean: float
    spread: float | None
    epsilon: float | None
    accuracies: Mapping[int, float]

    @property
    def seeds(self) -> int:
        """How many trials there are."""
        return len(self.accuracies)

    @classmethod
    def of(cls, trials: Mapping[int, Trial]) -> Ours:
        """Return the summary of ``trials``, by seed; raises ValueError if there are none."""
        if not trials:
            raise ValueError("Ours: trials must be one or more, got none")
        accuracies = {seed: trial.accuracy for seed, trial in trials.items()}
        spent = [trial.epsilon for trial in trials.values()]
        return cls(
            statistics.fmean(accuracies.values()),
            statistics.stdev(accuracies.values()) if len(trials) > 1 else None,
            None if None in spent else max(value for value in spent if value is not None),
            accuracies,
        )


@dataclass(frozen=True)
class Result:
    """One cell. ours: None where nothing has been run. not_run: why it cannot be, if so."""

    cell: Cell
    ours: Ours | None
    not_run: str | None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, in points."""
        if self.ours is None or self.cell.printed is None:
            return None
        return self.ours.mean - self.cell.printed.mean


@dataclass
class Progress:
    """What has been trained so far for a table.

    trials: for each cell that is wanted or finished, in the table's order, by seed.
    missing: keys of cells whose data is not there, with the reason.
    timings: by the block's title and the epsilon.
    changed: settings that are not the table's. command: what was asked for.
    """

    table: Table
    changed: Mapping[str, Any]
    command: str
    trials: Mapping[Cell, Mapping[int, Trial]]
    timings: Mapping[tuple[str, float], Sequence[Timing]] = field(default_factory=dict)
    missing: Mapping[Key, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        table: Table,
        wanted: Sequence[Cell],
        runs: Path,
        changed: Mapping[str, Any],
        *,
        command: str,
        missing: Mapping[Key, str],
    ) -> Progress:
        """Return all of ``table`` that is finished in ``runs``, whoever asked for it.

        Cells that are ``wanted`` are there even if nothing of them is finished.
        """
        keys = {cell.key for cell in wanted}
        trials = {}
        for cell in _cells(table, wanted, runs, changed):
            finished = _finished(cell, runs, changed)
            if finished or cell.key in keys:
                trials[cell] = finished
        timings = read_timings(table, runs, changed)
        return cls(table, changed, command, trials, timings, missing)

    def results(self) -> list[Result]:
        """Return a result for each cell, in the table's order."""
        return [
            Result(
                cell,
                Ours.of(found) if found else None,
                cell.not_run or (None if found else self.missing.get(cell.key)),
            )
            for cell, found in self.trials.items()
        ]

    def settings(self, block: Block) -> dict[str, Any]:
        """Return what the rows of ``block`` share, as trained."""
        return {**block.settings, **self.changed}

    def own_settings(self, block: Block) -> dict[str, dict[str, Any]]:
        """Return, by the row's label, what rows of ``block`` have of their own, as trained."""
        own = {row.label: {**row.settings, **self.changed} for row in block.rows}
        shared = self.settings(block)
        different = {
            label: {name: value for name, value in its.items() if shared.get(name) != value}
            for label, its in own.items()
        }
        return {label: its for label, its in different.items() if its}

    def data(self, block: Block) -> list[str]:
        """Return what is to be known of the data that ``block`` was trained on."""
        ours = [found for cell, found in self.trials.items() if cell.block is block]
        return sorted({trial.data for found in ours for trial in found.values()})

    def attempts(self) -> list[Attempt]:
        """Return every piece of every training."""
        trials = [trial for found in self.trials.values() for trial in found.values()]
        trials += [t for timings in self.timings.values() for one in timings for t in one.trials]
        return [attempt for trial in trials for attempt in trial.attempts]


def _cells(
    table: Table, wanted: Sequence[Cell], runs: Path, changed: Mapping[str, Any]
) -> list[Cell]:
    """Return the cells of ``table``, with the epsilons that are wanted or found besides its own."""
    found = []
    for block in table.blocks:
        for row in block.rows:
            epsilons = set(row.printed)
            epsilons |= {c.epsilon for c in wanted if c.block is block and c.row is row}
            cell = Cell(block, row, None, None)
            if cell.not_run is None and None not in row.printed:
                any_budget = replace(cell, epsilon=1.0)
                epsilons |= set(epsilons_in(task_of(any_budget, 0, runs, changed).folder))
            found += [
                replace(cell, epsilon=epsilon, printed=row.figure(epsilon))
                for epsilon in sorted(epsilons, key=lambda epsilon: epsilon or 0.0)
            ]
    return found


def _finished(cell: Cell, runs: Path, changed: Mapping[str, Any]) -> dict[int, Trial]:
    if cell.not_run is not None:
        return {}
    trials = {}
    for seed in sorted(seeds_in(task_of(cell, 0, runs, changed).folder)):
        trial = read(task_of(cell, seed, runs, changed))
        if trial is not None:
            trials[seed] = trial
    return trials
