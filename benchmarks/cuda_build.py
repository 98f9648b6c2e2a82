"""Install dpkernels as a GPU user does, and check what comes of it: ``make cuda-build``.

Run by an environment of its own that has the CUDA build of torch. Needs nvcc, and no GPU. Compiles
under ``DPKERNELS_BUILD=auto``, imports, and writes ``cuda_build.json``, with a hash of what was
built: ``make gpu-check`` says when the sources have changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import source_tree
from benchmarks.gpu.cuda_sources import nvcc_version

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cuda_build.json"
INSTALLED = ROOT / "benchmarks" / "gpu" / "installed.py"
LOG_LINES = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, print, write; return 0 if all is in order."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_build", description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "cuda", help="where to build")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    tree: Path = options.tree.resolve()

    digest = source_tree.digest()
    source_tree.copy(tree)
    pip = [sys.executable, "-m", "pip"]
    _run([*pip, "uninstall", "-q", "-y", "dpkernels"], tree)
    began = time.monotonic()
    built = _run([*pip, "install", "-v", "--no-build-isolation", "."], tree)
    seconds = time.monotonic() - began
    if built.returncode:
        return _failed("pip install . failed", built)
    # From the folder that holds the tree: the installed package is to be found, not its sources.
    looked = _run([sys.executable, str(INSTALLED)], tree.parent)
    if looked.returncode:
        return _failed("the installed package is not in order", looked)
    report: dict[str, Any] = json.loads(looked.stdout)
    report["versions"]["nvcc"] = nvcc_version()
    report |= {
        "built_from": digest,
        "seconds_to_install": round(seconds, 1),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    options.result.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))
    return 0


def summary(report: dict[str, Any]) -> str:
    """Return the report in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    operators = report["operators"]
    lines = [
        f"cuda-build: installed in {report['seconds_to_install']:.0f} s for "
        f"{', '.join(report['architectures'])}: {versions}",
        f"cuda-build: {operators['CUDA']} operators are registered for CUDA, "
        f"{len(operators['compiled'])} of them compiled ({', '.join(operators['compiled'])})",
        f"cuda-build: built from {report['built_from']}",
    ]
    for call, said in (report["without_driver"] or {}).items():
        lines.append(f"cuda-build: without a driver, {call}: {said}")
    return "\n".join(lines)


def standing(result: Path = RESULT, root: Path = ROOT) -> str:
    """Say, in one line, whether the sources are those of the last ``make cuda-build``."""
    if not result.is_file():
        return "CUDA build: never checked; run make cuda-build (5.4 GB, needs nvcc)."
    report = json.loads(result.read_text())
    torch = f"torch {report['versions']['torch']}, nvcc {report['versions']['nvcc']}"
    if report["built_from"] == source_tree.digest(root):
        return f"CUDA build: checked on these sources with {torch}."
    return (
        f"CUDA build: STALE: csrc, setup.py or a schema has changed since it was checked with "
        f"{torch}; run make cuda-build."
    )


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in ``folder``, without the settings and the paths of whoever called."""
    unset = ("DPKERNELS_BACKEND", "DPKERNELS_BUILD", "PYTHONPATH", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _failed(what: str, run: subprocess.CompletedProcess[str]) -> int:
    lines = (run.stdout + run.stderr).splitlines()
    print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
    print(f"cuda-build: {what}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
