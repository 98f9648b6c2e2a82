"""Where and when a run was made: commit, processor, versions, time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch

import dpkernels
from dpkernels import backend
from dpkernels.repro.provenance import commit, cpu_model


def collect(device: torch.device) -> dict[str, Any]:
    """Return what is needed to judge and to repeat a run."""
    extension = backend.extension
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit(),
        "cpu": cpu_model(),
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
