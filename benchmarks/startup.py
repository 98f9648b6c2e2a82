"""How long ``import dpkernels`` takes once torch is there, in fresh processes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.results import Startup
from benchmarks.timing import Spread

LIMIT_SECONDS = 0.3

_PROGRAM = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import dpkernels
print(middle - start, time.perf_counter() - middle)
"""


def measure_startup(processes: int) -> Startup:
    """Start ``processes`` interpreters, one after the other; return the spread of both imports.

    One more is started first and not counted: it reads the files into memory.
    """
    pairs = [_import_seconds() for _ in range(processes + 1)][1:]
    torch_seconds, ours = zip(*pairs, strict=True)
    return Startup(Spread.of(ours), Spread.of(torch_seconds), LIMIT_SECONDS)


def _import_seconds() -> tuple[float, float]:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    torch_seconds, ours = map(float, done.stdout.split())
    return torch_seconds, ours
