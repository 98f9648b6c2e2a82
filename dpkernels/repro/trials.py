"""One training, in its own folder: begun, gone on with, or read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.repro.attempts import Attempt, read_attempts
from dpkernels.repro.dp_kfc import PLAIN
from dpkernels.repro.opacus_peer import require_opacus, train_with_opacus
from dpkernels.repro.tables import Cell, Epsilon
from dpkernels.train.alone import alone_in
from dpkernels.train.loop import train
from dpkernels.train.methods import METHODS
from dpkernels.train.options import Options, filled_in
from dpkernels.train.outputs import CHECKPOINT, REPORT
from dpkernels.whole_file import write_text

# Options that a folder's path shows, or that do not change what is trained.
_IN_THE_PATH = ("dataset", "model", "method", "epsilon", "seed", "data_dir")


@dataclass(frozen=True)
class Task:
    """A training that is wanted.

    name: for people. opacus: the mode of Opacus' DP-SGD that is run instead of ours, if any.
    timed: for the clock: if it was stopped, it is begun again instead of gone on with.
    """

    name: str
    options: Options
    folder: Path
    opacus: str | None = None
    timed: bool = False


@dataclass(frozen=True)
class Trial:
    """What one finished training gave.

    accuracy: in percent. epsilon: really spent; None if there is no guarantee.
    samples_per_second: of training, all estimates of curvature included, evaluation left out.
    data: which part of the data set was there, and how it was normalised.
    attempts: where, when and beside what it ran; more than one if it was stopped.
    """

    accuracy: float
    epsilon: float | None
    samples_per_second: float
    data: str
    attempts: tuple[Attempt, ...]

    @property
    def wall_seconds(self) -> float:
        """Of everything: data, calibration, first estimate, training, evaluation."""
        return sum(attempt.seconds or 0.0 for attempt in self.attempts)


def options_of(cell: Cell, seed: int, changed: Mapping[str, Any]) -> Options:
    """Return the options of a cell's training: block's, row's, then ``changed`` settings."""
    settings = {**cell.block.settings, **cell.row.settings, **changed}
    return _filled_in(settings, cell.row.method, cell.epsilon, seed)


def _filled_in(
    settings: Mapping[str, Any], method: str, epsilon: Epsilon, seed: int | None
) -> Options:
    given = {**settings, "method": method, "epsilon": epsilon, "seed": seed}
    if METHODS[method].optimizer is not None:  # the method is an optimizer itself
        given.pop("optimizer", None)
    return filled_in(given)


def folder_of(runs: Path, options: Options, name: str | None = None) -> Path:
    """Return the folder of a training; tables that share a training share the folder.

    Where options are not the paper's plain ones, the method's folder has a digest of those that
    differ. name: instead of the method's.
    """
    private = METHODS[options.method].not_private is None
    budget = f"eps-{options.epsilon:g}" if private else "no-eps"
    method = (name or options.method) + _digest(options)
    return runs / f"{options.dataset}-{options.model}" / method / budget / f"seed-{options.seed}"


def _digest(options: Options) -> str:
    settings = PLAIN.get(options.dataset, {"dataset": options.dataset})
    plain = _filled_in(settings, options.method, options.epsilon, options.seed)
    had, wanted = dataclasses.asdict(plain), dataclasses.asdict(options)
    own = {n: v for n, v in wanted.items() if n not in _IN_THE_PATH and v != had[n]}
    if not own:
        return ""
    return "-" + hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]


def task_of(cell: Cell, seed: int, runs: Path, changed: Mapping[str, Any]) -> Task:
    """Return the training of one cell and seed, in its folder in ``runs``."""
    budget = "no epsilon" if cell.epsilon is None else f"epsilon {cell.epsilon:g}"
    options = options_of(cell, seed, changed)
    name = f"{cell.block.title}, {cell.row.label}, {budget}, seed {seed}"
    return Task(name, options, folder_of(runs, options))


def perform(task: Task, *, jobs: int = 1, progress: bool = False) -> Trial:
    """Return the training of ``task``; finish it first if it is not at its end.

    jobs: how many trainings run at once, for the record. progress: show a bar.

    Raises ValueError if the folder holds a training with other options, RuntimeError if another
    process trains there, KeyboardInterrupt, with a checkpoint written, after Ctrl-C.
    """
    done = _read_or_refuse(task)
    if done is not None:
        return done
    task.folder.mkdir(parents=True, exist_ok=True)
    with alone_in(task.folder):
        # Another command may have finished it since.
        return _read_or_refuse(task) or _finish(task, jobs, progress)


def _read_or_refuse(task: Task) -> Trial | None:
    folder = task.folder
    if (folder / CHECKPOINT).exists() or (folder / REPORT).exists():
        different = _difference(task.options, folder)
        if different is not None:
            raise ValueError(different)
    return read(task)


def _finish(task: Task, jobs: int, progress: bool) -> Trial:
    folder = task.folder
    (folder / REPORT).unlink(missing_ok=True)  # half written, if it is there
    resume = (folder / CHECKPOINT).exists() and not task.timed
    if task.opacus is not None:
        require_opacus()  # its import is on no clock
    with Attempt.recorded(folder, jobs=jobs, goes_on=resume), warnings.catch_warnings():
        # The table says that seeds are fixed.
        warnings.filterwarnings("ignore", message=".*with the fixed seed")
        if task.opacus is None:
            train(task.options, folder, resume=resume, progress=progress)
        else:
            task.options.write(folder)
            report = train_with_opacus(task.options, task.opacus)
            write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    trial = read(task)
    assert trial is not None  # the report has just been written
    return trial


def read(task: Task) -> Trial | None:
    """Return the training of ``task`` if it is at its end, and has its options; else None."""
    folder = task.folder
    report = _report(folder)
    if report is None or not _has_options_of(task):
        return None
    return Trial(
        100 * report["accuracy"],
        report["privacy"]["epsilon"],
        report["samples_per_second"],
        report["data"],
        read_attempts(folder),
    )


def _has_options_of(task: Task) -> bool:
    try:
        return _difference(task.options, task.folder) is None
    except (FileNotFoundError, ValueError):  # none, or those of another version
        return False


def _report(folder: Path) -> dict[str, Any] | None:
    """Return the report; None if there is none, or half of one, as a kill can leave it."""
    try:
        found: dict[str, Any] = json.loads((folder / REPORT).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found


def seeds_in(folder: Path) -> Iterator[int]:
    """Yield the seeds of the trainings that lie beside that in ``folder``, itself included."""
    for found in sorted(folder.parent.glob("seed-*")):
        yield int(found.name.removeprefix("seed-"))


def epsilons_in(folder: Path) -> Iterator[float]:
    """Yield the budgets that the method of the training in ``folder`` was trained with."""
    for found in sorted(folder.parent.parent.glob("eps-*")):
        yield float(found.name.removeprefix("eps-"))


def _difference(options: Options, folder: Path) -> str | None:
    """Return in what the training in ``folder`` is another than that of ``options``, if it is."""
    had, wanted = (dataclasses.asdict(one) for one in (Options.read(folder), options))
    for name, value in wanted.items():
        # Where the data is may have changed since; what it is has not.
        if name != "data_dir" and had[name] != value:
            return (
                f"{name}: the training in {folder} has {had[name]!r}, the table wants {value!r}; "
                "name another folder with --runs"
            )
    return None
