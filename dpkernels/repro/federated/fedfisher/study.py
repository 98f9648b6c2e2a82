"""A table of merged models: its cells, and how all of them are performed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dpkernels.repro.federated.fedfisher import outcome
from dpkernels.repro.federated.fedfisher.methods import missing
from dpkernels.repro.federated.fedfisher.outcome import Outcome
from dpkernels.repro.federated.fedfisher.scene import Merging, Scene


@dataclass(frozen=True)
class Row:
    """A method, under the name that readers see."""

    label: str
    merging: Merging


@dataclass(frozen=True)
class Cell:
    """One number: a row at one setting.

    panel: the part of the table that it is in. column: what the setting is called there.
    scenes: the seeds, at the paper's partition. others: other partitions, for the spread.
    paper: its figure in percent, if it prints one.
    """

    panel: str
    column: str
    row: Row
    scenes: tuple[Scene, ...]
    others: tuple[Scene, ...] = ()
    paper: float | None = None


@dataclass(frozen=True)
class Sheet:
    """One table or figure. curves: whether columns are a number, and the plot has them on x."""

    name: str
    caption: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    curves: str | None = None

    def of_methods(self, methods: Sequence[str]) -> Sheet:
        """Return the part with rows of these methods; raise ValueError if there is none."""
        known = list(dict.fromkeys(cell.row.merging.method for cell in self.cells))
        if unknown := [name for name in methods if name not in known]:
            raise ValueError(f"methods: {self.name} has {', '.join(known)}, got {unknown[0]!r}")
        kept = tuple(cell for cell in self.cells if cell.row.merging.method in methods)
        return replace(self, cells=kept)


@dataclass(frozen=True)
class Result:
    """A cell with what came of it. reason: why there is nothing."""

    cell: Cell
    outcomes: tuple[Outcome, ...]
    others: tuple[Outcome, ...] = ()
    reason: str | None = None

    @property
    def mean(self) -> float:
        """Of the seeds, in percent."""
        return statistics.fmean(one.accuracy for one in self.outcomes)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one."""
        return _deviation(self.outcomes)

    def over_partitions(self) -> tuple[float, float] | None:
        """Return mean and standard deviation over other partitions, None without any."""
        if not self.others:
            return None
        return statistics.fmean(one.accuracy for one in self.others), _deviation(self.others)


def _deviation(outcomes: Sequence[Outcome]) -> float:
    found = [one.accuracy for one in outcomes]
    return statistics.stdev(found) if len(found) > 1 else 0.0


def conduct(
    cells: Sequence[Cell],
    folder: Path,
    *,
    jobs: int = 1,
    report: Callable[[str], None] = print,
) -> list[Result]:
    """Train, merge and read every cell; what ``folder`` has is not done again.

    jobs: processes of one thread each. A scene's clients are trained once, whatever merges them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reasons = {merging: missing(merging) for merging in {cell.row.merging for cell in cells}}
    for reason in sorted({f"left out: {why}" for why in reasons.values() if why}):
        report(reason)
    wanted: dict[Scene, list[Merging]] = {}
    for cell in cells:
        if reasons[cell.row.merging] is None:
            for scene in (*cell.scenes, *cell.others):
                wanted.setdefault(scene, []).append(cell.row.merging)
    kept: dict[Scene, list[Merging]] = {}
    for scene in wanted:
        if scene.by is not None:
            kept.setdefault(scene.before(), []).append(scene.by)
    # A round starts from the one before, which others may start from, too.
    for number in sorted({scene.round for scene in wanted}):
        tasks = [
            (scene, tuple(dict.fromkeys(mergings)), tuple(kept.get(scene, ())))
            for scene, mergings in wanted.items()
            if scene.round == number
        ]
        _perform_all(tasks, folder, jobs, f"round {number}", report)
    return [_result(cell, folder, reasons[cell.row.merging]) for cell in cells]


def _result(cell: Cell, folder: Path, reason: str | None) -> Result:
    if reason is not None:
        return Result(cell, (), (), reason)
    seeds, others = (
        tuple(
            found
            for scene in scenes
            if (found := outcome.read(scene, cell.row.merging, folder)) is not None
        )
        for scenes in (cell.scenes, cell.others)
    )
    return Result(cell, seeds, others)


# A scene, its mergings, and those whose models a next round starts from.
_Task = tuple[Scene, tuple[Merging, ...], tuple[Merging, ...]]


def _perform_all(
    tasks: Iterable[_Task],
    folder: Path,
    jobs: int,
    what: str,
    report: Callable[[str], None],
) -> None:
    every = list(tasks)
    undone = [
        task
        for task in every
        if any(outcome.read(task[0], merging, folder) is None for merging in task[1])
    ]
    # Scenes with the same records follow each other: these are loaded and parted once.
    undone.sort(key=lambda task: (task[0].dataset, task[0].alpha, task[0].partition_seed))
    report(f"{what}: {len(every)} scenes, {len(every) - len(undone)} kept already")
    if jobs == 1:
        for number, (scene, mergings, kept) in enumerate(undone, 1):
            outcome.perform(scene, mergings, folder, kept)
            report(f"{what}: {number} of {len(undone)}")
        return
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [
            pool.submit(outcome.perform, scene, mergings, folder, kept)
            for scene, mergings, kept in undone
        ]
        try:
            for number, one in enumerate(as_completed(running), 1):
                one.result()
                report(f"{what}: {number} of {len(undone)}")
        finally:
            # After Ctrl-C or an error, what has not begun must not begin.
            pool.shutdown(wait=False, cancel_futures=True)
