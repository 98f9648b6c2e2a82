"""Paper and ours side by side: what the files of a table hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpkernels.repro.tables import Block, Cell, Printed, Table, first_epsilon
from dpkernels.repro.trials import Trial


@dataclass(frozen=True)
class Ours:
    """The trials of one cell, at least one.

    mean, spread: accuracy in percent and its standard deviation over seeds, None for one seed.
    epsilon: the most that a trial spent, None if there is no guarantee.
    samples_per_second, wall_seconds: medians.
    """

    mean: float
    spread: float | None
    seeds: int
    epsilon: float | None
    samples_per_second: float
    wall_seconds: float

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> Ours:
        """Return the summary of ``trials``; raises ValueError if there are none."""
        if not trials:
            raise ValueError("Ours: trials must be one or more, got none")
        accuracies = [trial.accuracy for trial in trials]
        spent = [trial.epsilon for trial in trials]
        return cls(
            statistics.fmean(accuracies),
            statistics.stdev(accuracies) if len(trials) > 1 else None,
            len(trials),
            None if None in spent else max(value for value in spent if value is not None),
            statistics.median(trial.samples_per_second for trial in trials),
            statistics.median(trial.wall_seconds for trial in trials),
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

    trials: for each cell, by seed. missing: cells whose data is not there, with the reason.
    opacus: for each block's title, trials by Opacus' mode.
    changed: settings that are not the paper's.
    """

    table: Table
    cells: list[Cell]
    seeds: int
    changed: Mapping[str, Any]
    trials: dict[Cell, dict[int, Trial]] = field(default_factory=dict)
    missing: dict[Cell, str] = field(default_factory=dict)
    opacus: dict[str, dict[str, Trial]] = field(default_factory=dict)

    def results(self) -> list[Result]:
        """Return a result for each cell, in the table's order."""
        return [self._result(cell) for cell in self.cells]

    def compared_at(self, block: Block) -> float | None:
        """Return the epsilon of Opacus' trainings of ``block``: the one that is run first."""
        return first_epsilon(self.cells, block)

    def settings(self, block: Block) -> dict[str, Any]:
        """Return what the rows of ``block`` share, as trained."""
        return {**block.settings, **self.changed}

    def data(self, block: Block) -> list[str]:
        """Return what is to be known of the data that ``block`` was trained on."""
        trials = [found for cell, found in self.trials.items() if cell.block is block]
        return sorted({trial.data for found in trials for trial in found.values()})

    def commits(self) -> list[str]:
        """Return the commits that any training was made with."""
        ours = [trial for trials in self.trials.values() for trial in trials.values()]
        theirs = [trial for trials in self.opacus.values() for trial in trials.values()]
        return sorted({commit for trial in [*ours, *theirs] for commit in trial.commits})

    def _result(self, cell: Cell) -> Result:
        found = list(self.trials.get(cell, {}).values())
        reason = cell.not_run or self.missing.get(cell)
        return Result(cell, Ours.of(found) if found else None, reason)


def to_dict(progress: Progress, where: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything, in types that JSON knows; accuracies are in percent."""
    table = progress.table
    return {
        "paper": "DP-KFC",
        "table": table.number,
        "caption": table.caption,
        "notes": list(table.notes),
        "seeds": progress.seeds,
        "changed_settings": dict(progress.changed),
        "provenance": dict(where),
        "commits_of_trainings": progress.commits(),
        "settings": {
            block.title: progress.settings(block) for block in table.blocks if block.settings
        },
        "data": {block.title: progress.data(block) for block in table.blocks if block.settings},
        "cells": [_cell(result) for result in progress.results()],
        "opacus_dp_sgd": {
            title: {mode: _trial(trial) for mode, trial in trials.items()}
            for title, trials in progress.opacus.items()
        },
    }


def _cell(result: Result) -> dict[str, Any]:
    cell, ours = result.cell, result.ours
    return {
        "block": cell.block.title,
        "row": cell.row.label,
        "method": cell.row.method,
        "epsilon": cell.epsilon,
        "paper": _printed(cell.printed),
        "ours": None if ours is None else dict(vars(ours)),
        "difference": result.difference,
        "not_run": result.not_run,
    }


def _printed(printed: Printed | None) -> dict[str, Any] | None:
    return None if printed is None else dict(vars(printed))


def _trial(trial: Trial) -> dict[str, Any]:
    return {name: value for name, value in vars(trial).items() if name not in ("commits", "data")}
