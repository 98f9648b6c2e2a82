"""Compiled kernels for differentially private training with second-order geometry."""

from __future__ import annotations

from dpkernels import engine, ops, precondition
from dpkernels.backend import BackendUnavailable, explain, use_backend
from dpkernels.engine import (
    PrivateTraining,
    Unsupported,
    batch_norm_to_group_norm,
    clipping,
    make_private,
)
from dpkernels.native import include_paths, kernel_sources
from dpkernels.ops.noise import NoiseKey

__all__ = [
    "BackendUnavailable",
    "NoiseKey",
    "PrivateTraining",
    "Unsupported",
    "__version__",
    "batch_norm_to_group_norm",
    "clipping",
    "engine",
    "explain",
    "include_paths",
    "kernel_sources",
    "make_private",
    "ops",
    "precondition",
    "use_backend",
]

__version__ = "0.1.0"
