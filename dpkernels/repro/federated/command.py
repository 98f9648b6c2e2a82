"""``dpkernels repro dp-fedsofim``, ``dp-fednew``, ``fedceo``, ``fedfisher``: choose, run, write."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro import provenance
from dpkernels.repro.federated import dp_fednew, dp_fedsofim, fedceo, report
from dpkernels.repro.federated.chosen import read_chosen
from dpkernels.repro.federated.fedfisher import command as fedfisher
from dpkernels.repro.federated.fedfisher import private
from dpkernels.repro.federated.inversion import command as inversion
from dpkernels.repro.federated.inversion.study import Effort
from dpkernels.repro.federated.study import Result, Table, conduct
from dpkernels.train.data import folder_of
from dpkernels.whole_file import write_text


def run(options: argparse.Namespace) -> list[Path]:
    """Run a table and write it; return the files. Runs that were kept are not run again.

    Raises ValueError for a table or budget that is not known, MissingData without the data sets.
    """
    require_matplotlib()  # now, and not after an hour
    if options.data_dir:
        os.environ["DPKERNELS_DATA"] = str(options.data_dir)
    folder_of(None)
    if options.attack:
        return _attack(options)
    if options.paper == "fedceo" and options.table == "why":
        return fedceo.why(options.output, options.rounds, options.local_epochs)
    names = _names(options)
    if options.paper == "fedfisher":
        merged = [name for name in names if name != "private"]
        files = [file for name in merged for file in fedfisher.run(options, name)]
        return files + (_choose_and_run(options, ["private"]) if "private" in names else [])
    return _choose_and_run(options, names)


def _choose_and_run(options: argparse.Namespace, names: Sequence[str]) -> list[Path]:
    """Run tables whose settings are chosen on held-out records; return the files."""
    tables = [_table(options, name) for name in names]
    runs = options.runs or Path("runs") / options.paper
    written: list[Path] = []
    for table in tables:
        chosen = None
        if options.chosen is not None:
            chosen, note = read_chosen(options.chosen, table.cells)
            table = replace(table, notes=(*table.notes, note))
        results = conduct(
            table.cells,
            folder=runs,
            validation=table.validation,
            seeds=options.seeds or 3,
            jobs=options.jobs,
            chosen=chosen,
            report=lambda text: print(text, flush=True),
        )
        written += _write(options, table, results)
    return written


def _attack(options: argparse.Namespace) -> list[Path]:
    if options.paper != "fedceo":
        raise ValueError(f"attack: it is fedceo's, got {options.paper}; leave --attack out")
    return inversion.run(tuple(inversion.DATASETS), Effort(), output=options.output)


def _names(options: argparse.Namespace) -> Sequence[str]:
    known: Sequence[str] = ("1",)
    if options.paper != "dp-fedsofim":
        of_paper = {
            "dp-fednew": tuple(dp_fednew.TABLES),
            "fedceo": fedceo.TABLES,
            "fedfisher": fedfisher.TABLES,
        }
        known = of_paper[options.paper]
    if options.table is None and options.paper == "fedfisher":
        raise ValueError(f"table: name one of fedfisher's, {', '.join(known)}, with --table")
    if options.table is None:
        return known
    if options.table not in known:
        raise ValueError(
            f"table: {options.paper} has {', '.join(known)}, got {options.table!r}; leave it out "
            "for all"
        )
    return (options.table,)


def _table(options: argparse.Namespace, name: str) -> Table:
    _check_scale(options)
    if options.paper == "fedfisher":
        table = private.table()
    elif options.paper == "dp-fedsofim":
        table = dp_fedsofim.table()
    elif options.paper == "fedceo":
        table = fedceo.table(name, options.rounds, options.local_epochs)
    else:
        make = dp_fednew.TABLES[name]
        table = make(options.clients) if options.clients else make()
    return table.at(options.epsilon) if options.epsilon else table


def _check_scale(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers of a table that are not the user's to change."""
    if options.clients and options.paper != "dp-fednew":
        number = {"dp-fedsofim": 20, "fedceo": 100, "fedfisher": private.CLIENTS}[options.paper]
        raise ValueError(f"clients: {options.paper} has {number}; leave --clients out")
    for setting in ("rounds", "local_epochs"):
        value = getattr(options, setting)
        if value is None:
            continue
        if options.paper != "fedceo":
            raise ValueError(f"{setting}: {options.paper}'s are fixed; leave it out")
        if value < 1:
            raise ValueError(f"{setting} must be an integer >= 1, got {value}")


def _write(options: argparse.Namespace, table: Table, results: Sequence[Result]) -> list[Path]:
    where = provenance.collect()
    stem = f"{options.paper.replace('-', '_')}_table{table.name}"
    if not table.name.isdigit():
        stem = f"{options.paper.replace('-', '_')}_{table.name}"
    options.output.mkdir(parents=True, exist_ok=True)
    files = [options.output / f"{stem}.{suffix}" for suffix in ("json", "md", "png")]
    title = f"{table.paper}: {table.caption}"
    content = report.to_dict(title, table.notes, results, where, _command(options, table.name))
    write_text(files[0], json.dumps(content, indent=1) + "\n")
    text = report.markdown(title, table.notes, results, where)
    if table.by_round is not None:
        text += report.rounds_table(results, table.by_round)
    write_text(files[1], text + table.appendix)
    report.draw(title, results, files[2])
    return files


def _command(options: argparse.Namespace, name: str) -> str:
    words = ["dpkernels repro", options.paper, "--table", name]
    words += ["--seeds", str(options.seeds)] if options.seeds is not None else []
    if options.chosen is not None:
        words += ["--chosen", options.chosen.name]
    for setting in ("rounds", "local_epochs"):
        if (value := getattr(options, setting)) is not None:
            words += [f"--{setting.replace('_', '-')}", str(value)]
    if options.clients:
        words += ["--clients", *map(str, options.clients)]
    if options.epsilon:
        words += ["--epsilon", *(f"{epsilon:g}" for epsilon in options.epsilon)]
    return " ".join(words)
