"""Compiled kernels for differentially private training with second-order geometry."""

from __future__ import annotations

from dpkernels import ops
from dpkernels.backend import BackendUnavailable, explain, use_backend
from dpkernels.native import include_paths, kernel_sources
from dpkernels.ops.noise import NoiseKey

__all__ = [
    "BackendUnavailable",
    "NoiseKey",
    "__version__",
    "explain",
    "include_paths",
    "kernel_sources",
    "ops",
    "use_backend",
]

__version__ = "0.1.0"
