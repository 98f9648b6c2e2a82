"""One training for one cell and seed, in its own folder: begun, gone on with, or read."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.repro import provenance
from dpkernels.repro.opacus_peer import train_with_opacus
from dpkernels.repro.tables import Block, Cell
from dpkernels.train.loop import train
from dpkernels.train.methods import METHODS
from dpkernels.train.options import Options, filled_in
from dpkernels.train.outputs import CHECKPOINT, REPORT

ATTEMPTS = "attempts.json"


@dataclass(frozen=True)
class Trial:
    """What one finished training gave.

    accuracy: in percent. epsilon: really spent; None if there is no guarantee.
    samples_per_second: of training, refreshes included, evaluation left out.
    wall_seconds: of everything: data, calibration, first estimate, training, evaluation.
    data: which part of the data set was there, and how it was normalised.
    commits: of the sources that ran, ``+`` where they differed from the commit.
    """

    accuracy: float
    epsilon: float | None
    samples_per_second: float
    wall_seconds: float
    data: str
    commits: tuple[str, ...]


def options_of(cell: Cell, seed: int, changed: Mapping[str, Any]) -> Options:
    """Return the options of a cell's training: the block's settings, but for those ``changed``."""
    given = {**cell.block.settings, **changed, "method": cell.row.method, "seed": seed}
    if METHODS[cell.row.method].optimizer is not None:  # the method is an optimizer itself
        del given["optimizer"]
    return filled_in(given | {"epsilon": cell.epsilon})


def folder_of(runs: Path, options: Options) -> Path:
    """Return the folder of a training; tables that share a training share the folder."""
    return _folder(runs, options, options.method)


def run(options: Options, folder: Path, *, progress: bool) -> Trial:
    """Return the training in ``folder``; finish it first if it is not there or not at its end.

    Raises ValueError if the folder holds a training with other options, KeyboardInterrupt, with a
    checkpoint written, after Ctrl-C.
    """

    def finish() -> None:
        resume = (folder / CHECKPOINT).exists()
        train(options, folder, resume=resume, progress=progress)

    return _finished(options, folder, finish)


def opacus_options(block: Block, epsilon: float, changed: Mapping[str, Any]) -> Options:
    """Return what Opacus' DP-SGD is run with: the block's settings, seed 0."""
    given = {**block.settings, **changed, "method": "dp-sgd", "epsilon": epsilon, "seed": 0}
    return filled_in(given)


def run_opacus(options: Options, mode: str, runs: Path) -> Trial:
    """Return Opacus' training in ``mode``, ``hooks`` or ``ghost``; it is run in one piece."""
    folder = _folder(runs, options, f"opacus-{mode}")

    def finish() -> None:
        options.write(folder)
        report = train_with_opacus(options, mode)
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")

    return _finished(options, folder, finish)


def _finished(options: Options, folder: Path, finish: Callable[[], None]) -> Trial:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CHECKPOINT).exists() or (folder / REPORT).exists():
        _check_same(options, folder)
    if not (folder / CHECKPOINT).exists() and not (folder / REPORT).exists():
        (folder / ATTEMPTS).unlink(missing_ok=True)  # nothing is left of earlier ones
    if not (folder / REPORT).exists():
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings():  # the table says that seeds are fixed
                warnings.filterwarnings("ignore", message=".*with the fixed seed")
                finish()
        finally:
            _note_attempt(folder, time.perf_counter() - begun)
    return _read(folder)


def _folder(runs: Path, options: Options, method: str) -> Path:
    private = METHODS[options.method].not_private is None
    budget = f"eps-{options.epsilon:g}" if private else "no-eps"
    return runs / f"{options.dataset}-{options.model}" / method / budget / f"seed-{options.seed}"


def _check_same(options: Options, folder: Path) -> None:
    had, wanted = (dataclasses.asdict(one) for one in (Options.read(folder), options))
    for name, value in wanted.items():
        # Where the data is may have changed since; what it is has not.
        if name != "data_dir" and had[name] != value:
            raise ValueError(
                f"{name}: the training in {folder} has {had[name]!r}, the table wants {value!r}; "
                "name another folder with --runs"
            )


def _note_attempt(folder: Path, seconds: float) -> None:
    attempts = _attempts(folder)
    attempts.append({"seconds": seconds, **provenance.commit()})
    (folder / ATTEMPTS).write_text(json.dumps(attempts, indent=2) + "\n")


def _attempts(folder: Path) -> list[dict[str, Any]]:
    file = folder / ATTEMPTS
    found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return found


def _read(folder: Path) -> Trial:
    report = json.loads((folder / REPORT).read_text())
    attempts = _attempts(folder)
    commits = {one["commit"] + ("+" if one["dirty"] else "") for one in attempts}
    return Trial(
        100 * report["accuracy"],
        report["privacy"]["epsilon"],
        report["samples_per_second"],
        sum(one["seconds"] for one in attempts),
        report["data"],
        tuple(sorted(commits)),
    )
