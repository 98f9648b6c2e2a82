"""Call every compiled operator with a sanitizer in the process: ``make sanitize``.

``address``  memory errors and undefined behaviour, on torch's threads.
``thread``   data races, on threads that the sanitizer sees start and end.

Builds the extension in a folder of its own, then runs ``worker`` there. Every run draws new
arguments; ``--seed`` repeats one. Needs GCC and Linux.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import source_tree

ROOT = Path(__file__).resolve().parent.parent.parent
# -fno-wrapv undoes Python's own flag, under which an overflow is no error. Casts of numbers that do
# not fit are not among what -fsanitize=undefined looks for. What vptr needs, torch does not export.
COMMON = "-O1 -g1 -fno-omit-frame-pointer -fno-wrapv"


@dataclass(frozen=True)
class Sanitizer:
    """How to compile with it, how to run with it, what its reports look like."""

    flags: str
    libraries: tuple[str, ...]
    options: dict[str, str]
    report: str
    threads: tuple[int, ...]
    calls: int


SANITIZERS = {
    "address": Sanitizer(
        flags=f"{COMMON} -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr",
        # The second one, because exceptions are thrown before it would be loaded.
        libraries=("libasan.so", "libstdc++.so"),
        options={
            # Python keeps what it has to its end. A size of 2^40 is to fail as it does elsewhere.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096"
            ":detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        report=r"runtime error: .*|ERROR: AddressSanitizer.*",
        threads=(1, 8),
        calls=60,
    ),
    "thread": Sanitizer(
        flags=f"{COMMON} -fsanitize=thread -DDPKERNELS_STD_THREADS",
        libraries=("libtsan.so", "libstdc++.so"),
        options={"TSAN_OPTIONS": "halt_on_error=0:exitcode=0:report_signal_unsafe=0"},
        report=r"WARNING: ThreadSanitizer.*|FATAL: ThreadSanitizer.*",
        threads=(8,),
        calls=20,
    ),
}


def main() -> int:
    """Build, run, print the reports; return 0 if there are none."""
    parser = argparse.ArgumentParser(prog="python -m python_tests.sanitize", description=__doc__)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--calls", type=int, help="of each operator in each configuration")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--operators", nargs="+", default=[])
    options = parser.parse_args()
    sanitizer = SANITIZERS[options.sanitizer]
    tree = ROOT / "build" / f"sanitize-{options.sanitizer}"
    print(f"sanitize: compiling with -fsanitize={options.sanitizer} in {tree.relative_to(ROOT)}")
    if not build(tree, sanitizer):
        return 1
    arguments = ["--seed", str(options.seed), "--calls", str(options.calls or sanitizer.calls)]
    arguments += ["--threads", *map(str, sanitizer.threads)]
    if options.operators:
        arguments += ["--operators", *options.operators]
    print(f"sanitize: {' '.join(arguments)}", flush=True)
    log = tree / "reports"
    code = run(tree, sanitizer, arguments, log)
    found = reports(log.read_text(errors="replace"), sanitizer.report)
    for report, where in found.items():
        print(f"sanitize: {report}\n    first in: {where}", file=sys.stderr)
    if code or found:
        print(
            f"sanitize: exit code {code}, {len(found)} kinds of reports; all are in "
            f"{log.relative_to(ROOT)}",
            file=sys.stderr,
        )
        return 1
    print("sanitize: no report")
    return 0


def build(tree: Path, sanitizer: Sanitizer) -> bool:
    """Compile ``dpkernels._C`` in ``tree``; say what the compiler said if that fails."""
    source_tree.copy(tree)
    compiler = tree / "c++"
    script = f'#!/bin/sh\nexec {os.environ.get("CXX") or "c++"} "$@" {sanitizer.flags}\n'
    if not compiler.exists() or compiler.read_text() != script:
        compiler.write_text(script)
        compiler.chmod(0o755)
    made = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | {"CXX": str(compiler), "DPKERNELS_BUILD": "cpu"},
        capture_output=True,
        text=True,
    )
    if made.returncode:
        print(made.stdout + made.stderr, file=sys.stderr)
    return made.returncode == 0


def run(tree: Path, sanitizer: Sanitizer, arguments: list[str], log: Path) -> int:
    """Run the worker on what was built in ``tree``; its standard error goes to ``log``."""
    libraries = [_library(name) for name in sanitizer.libraries]
    # Frames and torch's own threads: shadow memory needs addresses where it expects them.
    command = ["setarch", "-R", sys.executable, "-m", "python_tests.sanitize.worker", *arguments]
    environment = {
        **os.environ,
        **sanitizer.options,
        "LD_PRELOAD": " ".join(libraries),
        # The built package first, then this one's tests.
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
        "OMP_NUM_THREADS": "8",
    }
    with log.open("w") as errors:
        return subprocess.run(command, cwd=tree, env=environment, stderr=errors).returncode


def reports(text: str, pattern: str) -> dict[str, str]:
    """Return each kind of report with the call in which it first came up."""
    found: dict[str, str] = {}
    where = "the start"
    for line in text.splitlines():
        if line.startswith("call "):
            where = line.removeprefix("call ")
        elif matched := re.search(rf"\S*\s*(?:{pattern})", line):
            found.setdefault(matched[0].strip(), where)
    return found


def _library(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    command = [os.environ.get("CXX") or "c++", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
