"""Where and when a table was made: commit, processor, versions, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dpkernels import info


def collect() -> dict[str, Any]:
    """Return what is needed to judge and to repeat a run, in types that JSON knows."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": info.versions(),
    }


def commit() -> dict[str, Any]:
    """Return the commit of the sources that run, and whether they differ from it.

    An installed package may lie inside of somebody else's repository: only one that tracks this
    file is asked.
    """
    if _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return {"commit": "unknown", "dirty": True}
    # Results that are being written are no sources.
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return {"commit": _git("rev-parse", "HEAD") or "unknown", "dirty": changed != ""}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """Return the processor's name, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
