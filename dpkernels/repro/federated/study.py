"""A table: its rows, how each row's settings are chosen, and what came of them.

Settings are chosen on training records that were held out, by the mean accuracy of a few seeds, and
then fixed: the seeds that are reported are others, and the test part is looked at once. The budget
does not cover the choice, as in the papers; a note says so.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dpkernels.repro.federated.runs import (
    ALGORITHMS,
    Outcome,
    Place,
    Run,
    Settings,
    perform_and_keep,
    read,
    settings,
)

# Seeds that choose are none of those that are reported.
_CHOOSING_SEEDS = (1000, 1001)


@dataclass(frozen=True)
class Row:
    """One algorithm of a table.

    fixed: settings that are not searched. grid: values of those that are.
    rounds: of training, each of which is tried.
    centre: settings of ``Centred``; values that are tuples are searched, too.
    like: another row's label, whose chosen settings are taken over by ``transfer`` instead of
        searching.
    """

    label: str
    algorithm: str
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rounds: tuple[int, ...] = (70,)
    centre: Mapping[str, Any] | None = None
    like: str | None = None
    transfer: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    @property
    def searched(self) -> bool:
        """Whether there is more than one combination of settings."""
        around = any(isinstance(value, tuple) for value in (self.centre or {}).values())
        return bool(self.grid) or len(self.rounds) > 1 or around


@dataclass(frozen=True)
class Cell:
    """One number: a row at one place and budget. paper: its figure, in percent, if it has one.

    sigma: instead of epsilon, how much noise there is: see ``Place.multiplier``.
    beside: the place whose rows it is shown with, if they are not those of its own.
    """

    place: Place
    row: Row
    epsilon: float | None
    paper: float | None = None
    sigma: float | None = None
    beside: Place | None = None

    @property
    def budget(self) -> str:
        """What its column is called."""
        if self.sigma is not None:
            return f"sigma {self.sigma:g}"
        return "epsilon none" if self.epsilon is None else f"epsilon {self.epsilon:g}"


@dataclass(frozen=True)
class Table:
    """One table: what is run, and what a reader should know.

    validation: training records that are held out to choose settings by.
    by_round: the paper's figures at every tenth round, by row and budget, if it prints them.
    appendix: Markdown behind the table.
    """

    paper: str
    name: str
    caption: str
    cells: tuple[Cell, ...]
    validation: int
    notes: tuple[str, ...]
    by_round: Mapping[str, Mapping[float | None, tuple[float, ...]]] | None = None
    appendix: str = ""

    def at(self, epsilons: Sequence[float]) -> Table:
        """Return the part of it at ``epsilons``; raise ValueError if it has none of them."""
        kept = tuple(cell for cell in self.cells if (cell.sigma or cell.epsilon) in epsilons)
        if not kept:
            raise ValueError(f"epsilon: table {self.name} has none of {list(epsilons)}")
        return replace(self, cells=kept)


@dataclass(frozen=True)
class Chosen:
    """What the held-out records preferred.

    accuracy: on them, None for settings taken over. searched: how many candidates there were.
    """

    algorithm: Settings
    centre: Settings | None
    rounds: int
    accuracy: float | None
    searched: int


Key = tuple[Place, str, float | None, float | None]


@dataclass(frozen=True)
class Result:
    """A cell that was run. outcomes: one for each seed, on the test part."""

    cell: Cell
    chosen: Chosen
    outcomes: tuple[Outcome, ...]

    @property
    def mean(self) -> float:
        """Of the seeds' final accuracies, in percent."""
        return statistics.fmean(outcome.final for outcome in self.outcomes)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one."""
        finals = [outcome.final for outcome in self.outcomes]
        return statistics.stdev(finals) if len(finals) > 1 else 0.0

    def curve(self) -> dict[int, float]:
        """Return the mean accuracy at every evaluated round."""
        rounds = self.outcomes[0].accuracy
        return {r: statistics.fmean(o.accuracy[r] for o in self.outcomes) for r in rounds}


def candidates(cell: Cell, validation: int) -> list[Run]:
    """Return the runs among which the cell's settings are chosen, first seed only."""
    row = cell.row
    names, values = list(row.grid), list(row.grid.values())
    centre_names = list(row.centre or {})
    centre_values = [
        value if isinstance(value, tuple) else (value,) for value in (row.centre or {}).values()
    ]
    found = []
    for rounds in row.rounds:
        for combination in itertools.product(*values):
            for around in itertools.product(*centre_values):
                chosen = settings(**dict(row.fixed), **dict(zip(names, combination, strict=True)))
                centre = None
                if row.centre is not None:
                    centre = settings(**dict(zip(centre_names, around, strict=True)))
                found.append(
                    Run(
                        cell.place,
                        row.algorithm,
                        chosen,
                        rounds,
                        cell.epsilon,
                        _CHOOSING_SEEDS[0],
                        validation,
                        centre,
                        every=rounds,
                        sigma=cell.sigma,
                    )
                )
    return found


def choose(cell: Cell, validation: int, folder: Path) -> Chosen:
    """Return the best candidate, from runs that ``folder`` has."""
    scored = []
    for run in candidates(cell, validation):
        outcomes = [read(replace(run, seed=seed), folder) for seed in _CHOOSING_SEEDS]
        known = [outcome.final for outcome in outcomes if outcome is not None]
        if known:
            scored.append((statistics.fmean(known), run))
    accuracy, best = max(scored, key=lambda pair: pair[0])
    return Chosen(best.settings, best.centre, best.rounds, accuracy, len(scored))


def final_runs(cell: Cell, chosen: Chosen, seeds: int) -> list[Run]:
    """Return the runs that are reported."""
    return [
        Run(
            cell.place,
            cell.row.algorithm,
            chosen.algorithm,
            chosen.rounds,
            cell.epsilon,
            seed,
            0,
            chosen.centre,
            every=_every(cell.row.algorithm, chosen.rounds),
            sigma=cell.sigma,
        )
        for seed in range(seeds)
    ]


def _every(algorithm: str, rounds: int) -> int:
    """Return rounds between evaluations: of a network's they cost as much as a few rounds.

    Models of every client cost as much as all rounds do: they are evaluated at the end.
    """
    return rounds if ALGORITHMS[algorithm].personal else max(10, rounds // 10)


def conduct(
    cells: Sequence[Cell],
    *,
    folder: Path,
    validation: int,
    seeds: int,
    jobs: int = 1,
    chosen: Mapping[Key, Chosen] | None = None,
    report: Callable[[str], None] = print,
) -> list[Result]:
    """Choose settings for every cell, run it, and return what came of it; keeps every run.

    chosen: settings that were chosen before, by ``key``; they are not chosen anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if chosen is None:
        chosen = _choose_all(cells, validation, folder, jobs, report)
    runs = {key(cell): final_runs(cell, chosen[key(cell)], seeds) for cell in cells}
    _perform_all([run for some in runs.values() for run in some], folder, jobs, "final", report)
    results = []
    for cell in cells:
        outcomes = [read(run, folder) for run in runs[key(cell)]]
        kept = tuple(outcome for outcome in outcomes if outcome is not None)
        results.append(Result(cell, chosen[key(cell)], kept))
    return results


def _choose_all(
    cells: Sequence[Cell], validation: int, folder: Path, jobs: int, report: Callable[[str], None]
) -> dict[Key, Chosen]:
    """Return the settings of every cell, after the runs that they are chosen by."""
    own = [cell for cell in cells if cell.row.like is None]
    chosen = {key(cell): _given(cell) for cell in own if not cell.row.searched}
    own = [cell for cell in own if cell.row.searched]
    tried = [
        replace(run, seed=seed)
        for cell in own
        for run in candidates(cell, validation)
        for seed in _CHOOSING_SEEDS
    ]
    _perform_all(tried, folder, jobs, "choosing", report)
    chosen |= {key(cell): choose(cell, validation, folder) for cell in own}
    for cell in cells:
        if cell.row.like is not None:
            chosen[key(cell)] = _transferred(cell, chosen)
    return chosen


def _given(cell: Cell) -> Chosen:
    """Return the settings of a row that leaves nothing to choose."""
    row = cell.row
    centre = None if row.centre is None else settings(**row.centre)
    return Chosen(settings(**row.fixed), centre, row.rounds[0], None, 0)


def key(cell: Cell) -> Key:
    """Return what tells cells apart."""
    return cell.place, cell.row.label, cell.epsilon, cell.sigma


def _transferred(cell: Cell, chosen: Mapping[Any, Chosen]) -> Chosen:
    row = cell.row
    assert row.like is not None and row.transfer is not None
    found = chosen[cell.place, row.like, cell.epsilon, cell.sigma]
    taken = settings(**dict(row.fixed), **row.transfer(dict(found.algorithm)))
    return replace(found, algorithm=taken, accuracy=None, searched=0)


def _perform_all(
    runs: Iterable[Run], folder: Path, jobs: int, what: str, report: Callable[[str], None]
) -> None:
    """Perform what ``folder`` has not got, ``jobs`` at once, runs on the same data together."""
    unique = {run.digest: run for run in runs}
    missing = [run for run in unique.values() if read(run, folder) is None]
    missing.sort(key=lambda run: (str(run.place), run.validation))
    report(f"{what}: {len(unique)} runs, {len(unique) - len(missing)} kept already")
    if jobs == 1:
        for number, run in enumerate(missing, 1):
            perform_and_keep(run, folder)
            if number % 50 == 0:
                report(f"{what}: {number} of {len(missing)}")
        return
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        size = max(1, min(25, len(missing) // (4 * jobs)))
        done = pool.map(perform_and_keep, missing, itertools.repeat(folder), chunksize=size)
        for number, _ in enumerate(done, 1):
            if number % 50 == 0:
                report(f"{what}: {number} of {len(missing)}")
