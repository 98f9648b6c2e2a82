"""``dpkernels repro``: a table of a paper, trained again and compared."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpkernels.repro.jobs import Outcome
    from dpkernels.repro.results import Key, Progress
    from dpkernels.repro.tables import Cell, Table
    from dpkernels.repro.trials import Task

DESCRIPTION = """\
Train the cells of a paper's table with the paper's settings, and write paper, ours and difference
as Markdown, JSON and a plot. Every training has a folder of its own in --runs: those at their end
are read, others are gone on with. The table has all that is finished there, whatever this command
asked for. After Ctrl-C the same command goes on."""
FEDERATED = ("dp-fedsofim", "dp-fednew", "fedceo", "fedfisher")
_CHANGEABLE = ("epochs", "batch_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to ``parser``."""
    add = parser.add_argument
    add("paper", choices=["dp-kfc", *FEDERATED], help="whose tables")
    add(
        "--table",
        help="dp-kfc: 1, 2, 5, 6 or 7; tuned: our own settings; search: their choice; dp-fednew: "
        "8, 5, views, features, synthetic or users; dp-fedsofim: 1; fedceo: 1, 3, 5, "
        "epsilon, where or why (these by default: all but why); fedfisher: 1, 2, 4, 5, few-shot, "
        "clients, theorem or private",
    )
    add("--epsilon", type=float, nargs="+", help="budgets (default: the table's)")
    add(
        "--methods",
        nargs="+",
        help="as dpkernels train names them; fedfisher: of merging (default: the table's)",
    )
    add(
        "--clients",
        type=int,
        nargs="+",
        help="dp-fednew, fedfisher clients: numbers of clients (the table's)",
    )
    add("--partitions", type=int, help="fedfisher 2: other partitions, for the spread (default 10)")
    add("--cifar-seeds", type=int, help="fedfisher: of CIFAR-10; 0 leaves it out (default 2)")
    add("--rounds", type=int, help="fedceo: T (default: scaled down; the paper's is 300)")
    add(
        "--local-epochs",
        type=int,
        help="fedceo: E (default: scaled down; the paper's is 30); fedfisher: E (default 30)",
    )
    add("--seeds", type=int, help="trainings of each cell (default 3; other federated papers 5)")
    add("--jobs", type=int, default=1, help="trainings at once, cores shared (default 1)")
    add(
        "--timing",
        action="store_true",
        help="instead of the cells, time whole trainings of dp-sgd, dp-kfc, the --methods, and "
        "Opacus' DP-SGD, at the first epsilon, one after the other, alone",
    )
    add("--timing-repeats", type=int, default=1, help="the median of how many (default 1)")
    add("--attack", action="store_true", help="fedceo: gradient inversion of the uploads")
    add("--data-dir", help="folder of the data sets (default $DPKERNELS_DATA)")
    add("--runs", type=Path, help="folder of the trainings (default runs/PAPER)")
    add(
        "--chosen",
        type=Path,
        help="federated papers: JSON of a table whose settings are taken over, not chosen anew",
    )
    add("--output", type=Path, default=Path("benchmarks") / "results", help="folder of the tables")
    add("--epochs", type=int, help="instead of the paper's: a trial, in files that say so")
    add("--batch-size", type=int, help="likewise")
    add("--quiet", action="store_true", help="no progress bars")


def run(options: argparse.Namespace) -> int:
    """Train and write; return the exit status.

    0, 1 if a training failed, 2 for what cannot be done, 130 after Ctrl-C.
    """
    status = 0
    if options.seeds is None and options.paper != "fedfisher":  # its tables differ
        options.seeds = 5 if options.paper in ("dp-fedsofim", "dp-fednew") else 3
    if options.paper in FEDERATED:
        return _run_federated(options)
    options.runs = options.runs or Path("runs") / options.paper
    try:
        if options.table is None:
            raise ValueError("table: name one of dp-kfc's with --table")
        plan = _plan(options)
        try:
            _train(plan, options)
        except KeyboardInterrupt:
            print("\ndpkernels repro: stopped; the same command goes on", file=sys.stderr)
            status = 130
        for file in _write(_progress(plan, options), options.output):
            print(f"written: {file}")
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dpkernels repro: {error}", file=sys.stderr)
        return 2
    if plan.failed:
        print(f"dpkernels repro: failed: {'; '.join(plan.failed)}", file=sys.stderr)
    return status or int(bool(plan.failed))


def _run_federated(options: argparse.Namespace) -> int:
    """Run the tables of a federated paper; return the exit status."""
    from dpkernels.repro.federated import command

    try:
        _check_federated(options)
        for file in command.run(options):
            print(f"written: {file}")
    except KeyboardInterrupt:
        print("\ndpkernels repro: stopped; the same command goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dpkernels repro: {error}", file=sys.stderr)
        return 2
    return 0


def _check_federated(options: argparse.Namespace) -> None:
    """Raise ValueError for what only dp-kfc's tables take, and for numbers below 1."""
    merged = options.paper == "fedfisher"
    for name in ("methods", "timing", "partitions", "cifar_seeds", *_CHANGEABLE):
        if merged and name in ("methods", "partitions", "cifar_seeds"):
            continue
        if getattr(options, name):
            raise ValueError(f"{name}: {options.paper} does not take it; leave it out")
    for name in ("seeds", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value}")


@dataclass
class _Plan:
    """What is to be trained, by the key of its cell, and what became of it.

    tasks: None for the key of what is timed. missing: cells without data, and why.
    """

    table: Table
    cells: list[Cell]
    changed: dict[str, Any]
    tasks: list[tuple[Task, Key | None]]
    missing: dict[Key, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    ended: int = 0

    def note(self, task: Task, outcome: Outcome) -> None:
        """Print what came of ``task``, in one line, and keep what went wrong."""
        from dpkernels.train.formats import MissingData

        self.ended += 1
        where = f"[{self.ended}/{len(self.tasks)}] {task.name}"
        if not isinstance(outcome, Exception):
            print(f"{where}: accuracy {outcome.accuracy:.2f}", flush=True)
            return
        print(f"dpkernels repro: {where}: {outcome}", file=sys.stderr, flush=True)
        key = next(key for one, key in self.tasks if one is task)
        if key is None or not isinstance(outcome, MissingData):
            self.failed.append(task.name)
        else:
            # The table goes without the folder's name, which is of this machine only.
            self.missing[key] = "its data files, or its public data's, were not there"


def _plan(options: argparse.Namespace) -> _Plan:
    """Return what is to be trained. Raises ValueError before anything is, if it cannot be."""
    from dpkernels.precondition.diagnostics_plots import require_matplotlib
    from dpkernels.repro.opacus_peer import require_opacus
    from dpkernels.repro.tables import cells, in_running_order
    from dpkernels.repro.timing import timed_tasks
    from dpkernels.repro.trials import task_of
    from dpkernels.repro.tuned import ALL_TABLES
    from dpkernels.train.data import folder_of
    from dpkernels.whole_file import check_folder

    for name in ("runs", "output"):
        check_folder(getattr(options, name), name)
    if options.table not in ALL_TABLES:
        raise ValueError(f"table must be one of {', '.join(ALL_TABLES)}, got {options.table}")
    for name in ("seeds", "jobs", "timing_repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {getattr(options, name)}")
    if options.timing and options.jobs > 1:
        raise ValueError(f"jobs: what is timed runs alone, got {options.jobs}; leave --jobs out")
    folder_of(options.data_dir)
    require_matplotlib()  # now, and not after hours of training
    table = ALL_TABLES[options.table]
    wanted = cells(table, options.epsilon, options.methods)
    changed = {name: getattr(options, name) for name in _CHANGEABLE}
    changed = {name: value for name, value in changed.items() if value is not None}
    given = {**changed, "data_dir": options.data_dir}
    tasks: list[tuple[Task, Key | None]]
    if options.timing:
        require_opacus()
        chosen = options.methods or ()
        timed = timed_tasks(table, wanted, chosen, options.timing_repeats, options.runs, given)
        tasks = [(task, None) for task in timed]
    else:
        order = in_running_order(wanted, options.seeds)
        tasks = [(task_of(cell, seed, options.runs, given), cell.key) for cell, seed in order]
    return _Plan(table, wanted, changed, tasks)


def _train(plan: _Plan, options: argparse.Namespace) -> None:
    """Train what is not trained yet: what is timed and what runs beside others in processes."""
    from dpkernels.repro.jobs import run_all
    from dpkernels.repro.trials import perform

    if options.timing or options.jobs > 1:
        run_all([task for task, _ in plan.tasks], plan.note, jobs=options.jobs)
        return
    for task, _ in plan.tasks:
        try:
            outcome: Outcome = perform(task, progress=not options.quiet)
        except Exception as error:
            outcome = error
        plan.note(task, outcome)


def _progress(plan: _Plan, options: argparse.Namespace) -> Progress:
    from dpkernels.repro.results import Progress

    return Progress.read(
        plan.table,
        plan.cells,
        options.runs,
        plan.changed,
        command=_command(options),
        missing=plan.missing,
    )


def _command(options: argparse.Namespace) -> str:
    """Return what was asked for, without the folders, which are of this machine only."""
    words = ["dpkernels repro", options.paper, "--table", options.table]
    for name in ("epsilon", "methods"):
        values = getattr(options, name) or ()
        words += [f"--{name}", *(f"{v:g}" if name == "epsilon" else v for v in values)] * bool(
            values
        )
    for name in ("seeds", "jobs", *_CHANGEABLE):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] * (value is not None)
    if options.timing:
        words += ["--timing", "--timing-repeats", str(options.timing_repeats)]
    return " ".join(words)


def _write(progress: Progress, output: Path) -> list[Path]:
    from dpkernels.repro import provenance
    from dpkernels.repro.markdown import render
    from dpkernels.repro.plot import draw
    from dpkernels.repro.record import to_dict
    from dpkernels.whole_file import write_text

    output.mkdir(parents=True, exist_ok=True)
    where = provenance.collect()
    name = progress.table.name
    stem = f"dp_kfc_table{name}" if name.isdigit() else f"dp_kfc_{name}"
    # A trial has files of its own: it must not take the place of the table.
    stem += "".join(f"_{setting}-{value}" for setting, value in progress.changed.items())
    files = [output / f"{stem}.{suffix}" for suffix in ("json", "md", "png")]
    write_text(files[0], json.dumps(to_dict(progress, where), indent=1) + "\n")
    write_text(files[1], render(progress, where))
    draw(progress, files[2])
    return files
