"""``dpkernels repro``: a table of a paper, trained again and compared."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpkernels.repro.results import Progress

DESCRIPTION = """\
Train the cells of a paper's table with the paper's settings, and write paper, ours and difference
as Markdown, JSON and a plot. Every training has a folder of its own in --runs: those at their end
are read, others are gone on with. After Ctrl-C the same command goes on."""
_CHANGEABLE = ("epochs", "batch_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to ``parser``."""
    add = parser.add_argument
    add("paper", choices=["dp-kfc"], help="whose tables")
    add("--table", type=int, required=True, help="1, 2, 5, 6 or 7")
    add("--epsilon", type=float, nargs="+", help="budgets (default: the table's)")
    add("--methods", nargs="+", help="as dpkernels train names them (default: the table's)")
    add("--seeds", type=int, default=3, help="trainings of each cell (default 3)")
    add("--with-opacus", action="store_true", help="time Opacus' DP-SGD at the first epsilon")
    add("--data-dir", help="folder of the data sets (default $DPKERNELS_DATA)")
    add("--runs", type=Path, default=Path("runs") / "dp-kfc", help="folder of the trainings")
    add("--output", type=Path, default=Path("benchmarks") / "results", help="folder of the tables")
    add("--epochs", type=int, help="instead of the paper's, for a trial")
    add("--batch-size", type=int, help="instead of the paper's, for a trial")
    add("--quiet", action="store_true", help="no progress bars")


def run(options: argparse.Namespace) -> int:
    """Train and write; return the exit status: 0, 2 for what cannot be done, 130 after Ctrl-C."""
    status = 0
    try:
        progress = _begin(options)
        try:
            _fill(progress, options)
        except KeyboardInterrupt:
            print("\ndpkernels repro: stopped; the same command goes on", file=sys.stderr)
            status = 130
        for file in _write(progress, options.output):
            print(f"written: {file}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dpkernels repro: {error}", file=sys.stderr)
        return 2
    return status


def _begin(options: argparse.Namespace) -> Progress:
    from dpkernels.repro.dp_kfc import TABLES
    from dpkernels.repro.opacus_peer import require_opacus
    from dpkernels.repro.results import Progress
    from dpkernels.repro.tables import cells
    from dpkernels.train.data import folder_of

    if options.table not in TABLES:
        raise ValueError(f"table must be one of {', '.join(map(str, TABLES))}, got {options.table}")
    if options.seeds < 1:
        raise ValueError(f"seeds must be an integer >= 1, got {options.seeds}")
    if options.with_opacus:
        require_opacus()
    folder_of(options.data_dir)
    changed = {name: getattr(options, name) for name in _CHANGEABLE}
    changed = {name: value for name, value in changed.items() if value is not None}
    table = TABLES[options.table]
    wanted = cells(table, options.epsilon, options.methods)
    return Progress(table, wanted, options.seeds, changed)


def _fill(progress: Progress, options: argparse.Namespace) -> None:
    """Train what is not trained yet, one after the other."""
    from dpkernels.repro.tables import in_running_order
    from dpkernels.repro.trials import folder_of, options_of, run

    changed: dict[str, Any] = {**progress.changed, "data_dir": options.data_dir}
    if options.with_opacus:
        _time_opacus(progress, options.runs, changed)
    trials = in_running_order(progress.cells, progress.seeds)
    for number, (cell, seed) in enumerate(trials, 1):
        if cell in progress.missing:
            continue
        budget = "no epsilon" if cell.epsilon is None else f"epsilon {cell.epsilon:g}"
        what = f"{cell.block.title}, {cell.row.label}, {budget}, seed {seed}"
        print(f"[{number}/{len(trials)}] {what}", flush=True)
        chosen = options_of(cell, seed, changed)
        try:
            trial = run(chosen, folder_of(options.runs, chosen), progress=not options.quiet)
        except FileNotFoundError as error:
            # The table goes without the folder's name, which is of this machine only.
            print(f"dpkernels repro: {error}", file=sys.stderr)
            progress.missing[cell] = "its data files, or its public data's, were not there"
            continue
        progress.trials.setdefault(cell, {})[seed] = trial
        print(f"  accuracy {trial.accuracy:.2f}, {trial.wall_seconds:.1f} s", flush=True)


def _time_opacus(progress: Progress, runs: Path, changed: dict[str, Any]) -> None:
    """Train each data set of the table by Opacus' DP-SGD, at the epsilon that is run first."""
    from dpkernels.repro.opacus_peer import MODES
    from dpkernels.repro.trials import opacus_options, run_opacus

    for block in progress.table.blocks:
        epsilon = progress.compared_at(block)
        if epsilon is None:
            continue
        chosen = opacus_options(block, epsilon, changed)
        for mode in MODES:
            print(f"{block.title}, Opacus' DP-SGD, {mode}, epsilon {epsilon:g}", flush=True)
            try:
                trial = run_opacus(chosen, mode, runs)
            except FileNotFoundError as error:
                print(f"dpkernels repro: {error}", file=sys.stderr)
                break
            progress.opacus.setdefault(block.title, {})[mode] = trial


def _write(progress: Progress, output: Path) -> list[Path]:
    from dpkernels.repro import provenance
    from dpkernels.repro.markdown import render
    from dpkernels.repro.plot import draw
    from dpkernels.repro.results import to_dict

    output.mkdir(parents=True, exist_ok=True)
    where = provenance.collect()
    stem = f"dp_kfc_table{progress.table.number}"
    files = [output / f"{stem}.{suffix}" for suffix in ("json", "md", "png")]
    files[0].write_text(json.dumps(to_dict(progress, where), indent=1) + "\n")
    files[1].write_text(render(progress, where))
    draw(progress, files[2])
    return files
