"""Check public models: ``python -m benchmarks.models``.

Writes ``models.md`` to ``benchmarks/results``; ``--only`` checks some and writes nothing. Exits
with 1 if a model gives a wrong gradient, or is refused and was not known to be, or the reverse.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from benchmarks.models.check import Result, check
from benchmarks.models.registry import all_cases

_OUTPUT = Path(__file__).resolve().parent.parent / "results" / "models.md"
_HEAD = """# Public models

What `make_private` does with models of transformers {transformers} and PEFT {peft} as they are,
built small from their configurations (torch {torch}). Written by `python -m benchmarks.models`.

A model runs if its gradient is that of a loop over single samples, clipped and added up, in float64
without noise, in batches of 3 and 5 samples. *Error* is the largest difference, relative to the
largest gradient. Other models are refused before the first step, with the module and the reason.

Rules: *lifted* layers have no samples at their own input, and a module around them runs once more
for each sample; *vmap* modules have parameters of their own and run once more themselves.

{runs} of {all} run, {refused} are refused.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--only", default="*", help="names to check, with wildcards")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    chosen = [x for x in all_cases() if fnmatch.fnmatch(x.name.lower(), options.only.lower())]
    if not chosen:
        sys.exit(f"--only: nothing matches {options.only!r}")
    results = []
    for case in chosen:
        result = check(case)
        results.append(result)
        print(f"{'' if result.expected else 'UNEXPECTED  '}{case.name}: {_outcome(result)}")
    if options.only == "*":
        _OUTPUT.write_text(table(results))
        print(f"written: {_OUTPUT}")
    return 0 if all(result.expected for result in results) else 1


def table(results: list[Result]) -> str:
    """Return the results as Markdown, a section for each family."""
    refused = sum(bool(result.message) for result in results)
    lines = [
        _HEAD.format(
            transformers=transformers.__version__,
            peft=version("peft"),
            torch=torch.__version__.split("+")[0],
            runs=len(results) - refused,
            all=len(results),
            refused=refused,
        )
    ]
    for family in dict.fromkeys(result.case.family for result in results):
        lines += [f"## {family}", "", "| model | result | error | rules, or the reason |"]
        lines.append("|---|---|---|---|")
        for result in results:
            if result.case.family == family:
                name, note = result.case.name, result.case.note
                lines.append(f"| {name}{f' ({note})' if note else ''} | {_cells(result)} |")
        lines.append("")
    return "\n".join(lines)


def _cells(result: Result) -> str:
    if result.message:
        return f"refused | | {result.message.replace('|', '/')}"
    # Digits of a rounding error differ between machines; its size does not.
    return f"runs | {_size(result.error)} | {', '.join(result.rules)}"


def _size(error: float) -> str:
    bounds = [bound for bound in (1e-14, 1e-12, 1e-9, 1e-5) if error <= bound]
    return f"< {bounds[0]:.0e}" if bounds else f"{error:.1e}"


def _outcome(result: Result) -> str:
    return f"refused: {result.message}" if result.message else f"error {result.error:.1e}"


if __name__ == "__main__":
    sys.exit(main())
