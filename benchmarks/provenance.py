"""Where and when a run was made: commit, processor, versions, time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dpkernels
from dpkernels import backend

_ROOT = Path(__file__).resolve().parent.parent


def collect(device: torch.device) -> dict[str, Any]:
    """Return what is needed to judge and to repeat a run."""
    extension = backend.extension
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        # Untracked sources count, and so does not knowing: only a clean answer is clean.
        "dirty": _git("status", "--porcelain") != "",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "instruction_set": {
            "dpkernels": "none" if extension is None else extension.cpu_features()["active"],
            "torch": torch.backends.cpu.get_cpu_capability(),
        },
        "build": None if extension is None else extension.build_config(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "dpkernels": dpkernels.__version__,
        },
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
