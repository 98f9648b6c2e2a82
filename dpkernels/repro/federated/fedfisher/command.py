"""``dpkernels repro fedfisher``: train and merge what is missing, write tables and pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.repro import provenance
from dpkernels.repro.federated import fedfisher_theorem
from dpkernels.repro.federated.fedfisher import client_time, report
from dpkernels.repro.federated.fedfisher.scene import Scene
from dpkernels.repro.federated.fedfisher.sheets import MODELS, SHEETS, Effort
from dpkernels.repro.federated.fedfisher.study import conduct
from dpkernels.repro.federated.fedfisher_sweeps import Scale
from dpkernels.whole_file import check_folder, write_text

# ``private`` is a table of the other federated papers' kind: ``federated.command`` runs it.
TABLES = ("1", *SHEETS, "theorem", "private")
_FEWER_SEEDS = 3
_DEFAULTS = Effort()


def run(options: argparse.Namespace, name: str) -> list[Path]:
    """Run one of ``TABLES`` but ``private``; return the files that were written.

    Raises ValueError for what does not go together, MissingData without the data sets.
    """
    for setting in ("rounds", "epsilon", "chosen"):
        if getattr(options, setting) is not None:
            raise ValueError(f"{setting}: fedfisher's table {name} does not take it; leave it out")
    for argument in ("runs", "output"):
        if getattr(options, argument) is not None:
            check_folder(getattr(options, argument), argument)
    if name == "1":
        return _client_time(options)
    if name == "theorem":
        return _theorem(options)
    sheet = SHEETS[name](effort_of(options, name))
    if options.methods:
        sheet = sheet.of_methods(options.methods)
    folder = options.runs or Path("runs") / "fedfisher"
    results = conduct(sheet.cells, folder, jobs=options.jobs, report=_say)
    where = provenance.collect()
    files = _files(options.output, sheet.name)
    content = report.to_dict(sheet, results, where, command_of(options, name))
    write_text(files[0], json.dumps(content, indent=1) + "\n")
    write_text(files[1], report.markdown(sheet, results, where))
    report.draw(sheet, results, files[2])
    return files


def effort_of(options: argparse.Namespace, name: str) -> Effort:
    """Return how much is trained; raise ValueError for numbers out of range."""
    seeds = options.seeds or (_FEWER_SEEDS if name == "few-shot" else _DEFAULTS.seeds)
    given: dict[str, Any] = {"seeds": seeds}
    for setting, least in (("partitions", 0), ("cifar_seeds", 0), ("local_epochs", 1)):
        value = getattr(options, setting)
        if value is not None:
            if value < least:
                raise ValueError(f"{setting} must be an integer >= {least}, got {value}")
            given[setting] = value
    if options.clients:
        if name != "clients" or min(options.clients) < 1:
            raise ValueError(
                f"clients: of the figure over clients, integers >= 1, got {options.clients} for "
                f"{name}; the tables have 5"
            )
        given["clients"] = tuple(options.clients)
    return Effort(**given)


def _client_time(options: argparse.Namespace) -> list[Path]:
    if options.jobs > 1:
        raise ValueError(f"jobs: what is timed runs alone, got {options.jobs}; leave --jobs out")
    effort, repeats = effort_of(options, "1"), options.timing_repeats
    datasets = list(MODELS)[: 2 if effort.cifar_seeds else 1]
    found = [
        client_time.measure(
            Scene(dataset, MODELS[dataset], 0.1, local_epochs=effort.local_epochs), repeats
        )
        for dataset in datasets
    ]
    where = provenance.collect()
    files = _files(options.output, "table1")[:2]
    content = client_time.to_dict(found, repeats, where, command_of(options, "1"))
    write_text(files[0], json.dumps(content, indent=1) + "\n")
    write_text(files[1], client_time.markdown(found, repeats, where))
    return files


def _theorem(options: argparse.Namespace) -> list[Path]:
    scale = Scale() if options.seeds is None else Scale(seeds=options.seeds)
    return fedfisher_theorem.conduct(options.output, scale, tell=_say)


def _files(output: Path, name: str) -> list[Path]:
    output.mkdir(parents=True, exist_ok=True)
    return [output / f"fedfisher_{name}.{suffix}" for suffix in ("json", "md", "png")]


def command_of(options: argparse.Namespace, name: str) -> str:
    """Return what was asked for, without the folders, which are of this machine only."""
    words = ["dpkernels repro fedfisher --table", name]
    for setting in ("seeds", "partitions", "cifar_seeds", "local_epochs"):
        if (value := getattr(options, setting)) is not None:
            words += [f"--{setting.replace('_', '-')}", str(value)]
    for setting in ("methods", "clients"):
        several: Sequence[object] = getattr(options, setting) or ()
        words += [f"--{setting}", *map(str, several)] if several else []
    if name == "1":
        words += ["--timing-repeats", str(options.timing_repeats)]
    return " ".join(words)


def _say(text: str) -> None:
    print(text, flush=True)
