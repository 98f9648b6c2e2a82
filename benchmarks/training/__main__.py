"""Measure private training: ``python -m benchmarks.training``.

Writes ``training.json``, ``training.md``, ``training.png`` and ``training_growth.png`` to
``benchmarks/results``, and the table to the README; a partial run (``--only``, ``--no-growth``)
only where ``--output`` says.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

import torch

from benchmarks import provenance
from benchmarks.report import rewrite_section
from benchmarks.training import report, scaling
from benchmarks.training.forms import FORMS
from benchmarks.training.measure import WorkloadResult, measure
from benchmarks.training.models import WORKLOADS
from dpkernels import backend

_ROOT = Path(__file__).resolve().parent.parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.again:
        _show(options.output or _RESULTS, readme=options.output is None)
        return 0
    if backend.extension is None:
        sys.exit("benchmarks.training: dpkernels._C is not built; run make build")
    where = provenance.collect(torch.device("cpu"))
    forms = [name for name in FORMS if name == "plain SGD" or fnmatch.fnmatch(name, options.forms)]
    chosen = [w for w in WORKLOADS if fnmatch.fnmatch(w.name, options.only)]
    found = []
    for workload in chosen:
        print(workload.name, file=sys.stderr, flush=True)
        found.append(measure(workload, forms, options.seconds))
        print(report.table(found[-1:]), file=sys.stderr, flush=True)
    growth: dict[str, list[WorkloadResult]] = {}
    for axis in scaling.AXES if options.growth else ():
        print(axis.name, file=sys.stderr, flush=True)
        growth[axis.name] = [
            measure(axis.workload(size), scaling.FORMS, options.seconds / 4) for size in axis.sizes
        ]
    if found:
        print(report.table(found))
    partial = options.only != "*" or options.forms != "*" or not options.growth
    output = options.output or (None if partial else _RESULTS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        report.write(output / "training.json", where, {"models": found, **growth})
        _show(output, readme=output == _RESULTS and not partial)
    return 0


def _show(output: Path, readme: bool) -> None:
    """Make table, pictures and, if asked for, the README's table from the JSON in ``output``."""
    where, results = report.read(output / "training.json")
    title = f"{where['cpu']}, {where['threads']} threads, commit {str(where['commit'])[:7]}"
    found = results.pop("models")
    if found:
        text = f"{title}\n\n{report.table(found)}"
        (output / "training.md").write_text(f"{text}\n")
        report.bars(found, output / "training.png", title)
        if readme:
            rewrite_section(_ROOT / "README.md", "training", text)
    sizes = {axis.name: axis.sizes for axis in scaling.AXES}
    if results:
        growth = {name: (sizes[name], one) for name, one in results.items()}
        report.curves(growth, output / "training_growth.png", title)
    print(f"written: {output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models, as in 'MLP*'")
    parser.add_argument("--forms", default="*", metavar="PATTERN", help="forms, as in 'DP*'")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long for each model")
    parser.add_argument("--no-growth", dest="growth", action="store_false")
    parser.add_argument(
        "--again", action="store_true", help="measure nothing; show training.json again"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
