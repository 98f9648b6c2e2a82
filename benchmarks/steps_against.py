"""Compare steps with those of another checkout: ``python -m benchmarks.steps_against FOLDER``.

FOLDER holds another commit of this repository with its extension built. A process of each takes
turns on one machine: some steps of a workload here, then there. Reported is the median ratio of the
turns, and its quartiles; the first step, in which a model is tried out, is told apart. Writes
``steps_against.json`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance

_ROOT = Path(__file__).resolve().parent.parent
# Runs in either checkout: it uses nothing that one of them may lack.
_WORKER = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch
from benchmarks.training.forms import FORMS
from benchmarks.training.models import WORKLOADS
steps = {}
for line in sys.stdin:
    index, form, count = line.rstrip().split("\\t")
    key = index, form
    times = []
    if key not in steps:
        steps.clear()
        torch.manual_seed(0)
        workload = WORKLOADS[int(index)]
        steps[key] = FORMS[form](workload.model(), *workload.batch())
    for _ in range(int(count)):
        begin = time.perf_counter()
        steps[key]()
        times.append(time.perf_counter() - begin)
    print(*times, flush=True)
"""


class Worker:
    """A process that takes steps in one checkout."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _WORKER],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def steps(self, workload: int, form: str, count: int) -> list[float]:
        """Return the seconds that each of ``count`` steps takes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{workload}\t{form}\t{count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("steps_against: a process ended; its message is above")
        return [float(x) for x in line.split()]


def compare(here: Worker, there: Worker, workload: int, form: str, turns: int) -> dict[str, Any]:
    """Return times of one workload in both, and the ratio of their turns."""
    first = [worker.steps(workload, form, 1)[0] for worker in (here, there)]
    each = max(1, round(0.3 / statistics.median(there.steps(workload, form, 3))))
    here.steps(workload, form, 3)
    pairs = []
    for turn in range(turns):
        order = (here, there) if turn % 2 else (there, here)
        times = {x: statistics.median(x.steps(workload, form, each)) for x in order}
        pairs.append((times[here], times[there]))
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "form": form,
        "ms": 1e3 * statistics.median(a for a, _ in pairs),
        "before_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": middle,
        "quartiles": [low, high],
        "first_step_ms": 1e3 * first[0],
        "first_step_before_ms": 1e3 * first[1],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0."""
    from benchmarks.training.models import WORKLOADS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps_against", description=__doc__)
    parser.add_argument("folder", type=Path, help="another checkout, with its extension built")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--forms", nargs="+", default=["DP-SGD"])
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    where = provenance.collect(torch.device("cpu"))
    git = ["git", "-C", str(options.folder), "rev-parse", "--short", "HEAD"]
    before = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    here, there = Worker(_ROOT), Worker(options.folder)
    found = []
    for index, workload in enumerate(WORKLOADS):
        for form in options.forms:
            row = {"workload": workload.name} | compare(here, there, index, form, options.turns)
            found.append(row)
            low, high = row["quartiles"]
            print(
                f"{workload.name}, {form}: {row['ms']:.2f} ms, before {row['before_ms']:.2f}: "
                f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}); first step "
                f"{row['first_step_ms']:.0f} ms, before {row['first_step_before_ms']:.0f}",
                flush=True,
            )
    path = options.results / "steps_against.json"
    path.write_text(json.dumps({"provenance": where, "before": before, "rows": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
