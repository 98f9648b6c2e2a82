"""Calls every compiled operator with random arguments, in a process with a sanitizer in it.

Prints one line a configuration. What ends the process (a report of the address sanitizer, a call
that takes longer than a minute) is preceded by the call's name and seed on standard error.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from collections.abc import Iterator

os.environ.pop("DPKERNELS_BACKEND", None)

import torch

from dpkernels import backend
from python_tests.sanitize.calls import CALLS
from python_tests.sanitize.draw import Draw
from python_tests.sanitize.malformed import malform

SECONDS_A_CALL = 120


def compiled_operators() -> list[str]:
    """Return the operators that ``dpkernels._C`` implements on the CPU."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [n for n in backend.operations() if has_kernel(f"dpkernels::{n}", "CPU")]


def call(operator: str, seed: int, *, malformed: bool) -> bool:
    """Call the operator with the arguments of this seed; return whether it computed.

    A malformed call may raise, or compute where nothing was wrong with it after all. A well-formed
    one may raise only for what its numbers are: a NaN, a matrix that is not symmetric.
    """
    draw = Draw(seed)
    arguments = CALLS[operator](draw)
    if malformed:
        arguments = malform(draw, arguments)
    try:
        getattr(torch.ops.dpkernels, operator).default(*arguments)
    except (ValueError, IndexError, RuntimeError, TypeError, NotImplementedError, MemoryError):
        return False
    return True


def configurations(instruction_sets: list[str], threads: list[int]) -> Iterator[tuple[str, int]]:
    """Set each instruction set and number of threads in turn."""
    assert backend.extension is not None, "dpkernels._C is not built"
    for isa in instruction_sets:
        backend.extension.set_isa(isa)
        for count in threads:
            torch.set_num_threads(count)
            yield isa, count


def main() -> None:
    """Run ``--calls`` well-formed and as many malformed calls of each operator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--operators", nargs="+", default=compiled_operators())
    options = parser.parse_args()
    features = backend.extension.cpu_features()
    isas = ["portable", *(isa for isa in ("avx2", "avx512") if features[isa])]
    for isa, threads in configurations(isas, options.threads):
        computed = {True: 0, False: 0}
        for operator in options.operators:
            for number in range(options.calls):
                for malformed in (False, True):
                    seed = options.seed + number
                    where = f"{operator} seed {seed} malformed {malformed} {isa} x{threads}"
                    # Into the file that reports are read from: what comes after belongs to it.
                    print(f"call {where}", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback_later(SECONDS_A_CALL, exit=True)
                    computed[malformed] += call(operator, seed, malformed=malformed)
        total = options.calls * len(options.operators)
        print(
            f"{isa}, {threads} threads: {total} well-formed calls ({computed[False]} computed), "
            f"{total} malformed ones ({computed[True]} computed, the others raised)",
            flush=True,
        )
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
