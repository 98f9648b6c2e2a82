"""Measure the kernels: ``python -m benchmarks``.

Writes ``kernels.json`` and ``kernels.png`` to ``benchmarks/results``; a partial run (``--quick``,
``--only``) writes only where ``--output`` says. Exits with 1 if an output does not match.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import sys
from pathlib import Path

import torch

import dpkernels
from benchmarks import machine, provenance, report
from benchmarks.registry import all_cases
from benchmarks.results import Report
from benchmarks.runner import Options, run_case
from benchmarks.startup import measure_startup
from benchmarks.timing import Budget
from dpkernels import backend
from dpkernels.backend import BACKENDS

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_STARTUP = "import dpkernels"
# The probe of full size takes longer than all else of a small case.
_QUICK_GEMM = 512


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.readme is not None:
        found = Report.read((options.output or _RESULTS) / "kernels.json")
        report.rewrite_section(options.readme, "kernels", report.markdown(found))
        return 0
    result = _measure(options)
    print(report.table(result))
    partial = options.quick or options.only != "*"
    output = options.output or (None if partial and not options.update else _RESULTS)
    if output is not None:
        if options.update:
            result = Report.read(output / "kernels.json").with_newer(result)
        output.mkdir(parents=True, exist_ok=True)
        result.write(output / "kernels.json")
        report.picture(result, output / "kernels.png")
        print(f"written: {output / 'kernels.json'}, {output / 'kernels.png'}")
    return 0 if all(r.correct for r in result.results) else 1


def _measure(options: argparse.Namespace) -> Report:
    device = torch.device(options.device)
    seconds = options.seconds or (0.2 if options.quick else 6.0)
    budget = Budget(seconds, options.rounds)
    how = Options(
        budget,
        compile=options.compile and not options.quick,
        gemm_size=_QUICK_GEMM if options.quick else machine.GEMM_SIZE,
    )
    chosen = all_cases(device, quick=options.quick, only=options.only)
    with_startup = fnmatch.fnmatch(_STARTUP, options.only)
    if not chosen and not with_startup:
        names = [case.name for case in all_cases(device, quick=options.quick)]
        sys.exit(f"--only: nothing matches {options.only!r}; there are {', '.join(names)}")
    forced = dpkernels.use_backend(options.backend) if options.backend else contextlib.nullcontext()
    unbuilt = device.type == "cpu" and backend.extension is None
    if unbuilt and options.backend is None and not options.quick:
        sys.exit(
            "benchmarks: dpkernels._C is not built, so the reference would be timed against itself;"
            " run make build (make bench does), or say --backend reference"
        )
    where = provenance.collect(device)
    results = []
    with forced:
        rates = machine.survey(device, Budget(min(seconds, 2.0)))
        try:
            for number, case in enumerate(chosen, 1):
                print(f"[{number}/{len(chosen)}] {case.name}", file=sys.stderr, flush=True)
                # What is alive now stays so: collections around what is timed need not look at it.
                gc.collect()
                gc.freeze()
                results.append(run_case(case, device, how))
        finally:
            gc.unfreeze()
    startup = measure_startup(3 if options.quick else 9) if with_startup else None
    return Report(where, rates, results, startup, quick=options.quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", choices=BACKENDS, help="serve every operation from this one")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, no torch.compile: under a minute if idle"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="cases or operations, as in 'clip_and_sum*'"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (and read)")
    parser.add_argument(
        "--update",
        action="store_true",
        help="put the cases of --only in place of those in kernels.json, and say so there",
    )
    parser.add_argument("--seconds", type=float, help="how long to measure each case")
    parser.add_argument("--rounds", type=int, help="exactly so many rounds instead")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--readme",
        nargs="?",
        type=Path,
        const=_ROOT / "README.md",
        metavar="FILE",
        help="measure nothing; rewrite the marked section of README.md from kernels.json",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
