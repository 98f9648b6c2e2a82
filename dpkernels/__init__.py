"""Compiled kernels for differentially private training with second-order geometry."""

from __future__ import annotations

from dpkernels import engine, ops, postprocess, precondition, privacy, run
from dpkernels.backend import BackendUnavailable, explain, use_backend
from dpkernels.engine import (
    PrivateTraining,
    Unsupported,
    batch_norm_to_group_norm,
    clipping,
    make_plain,
    make_private,
)
from dpkernels.native import include_paths, kernel_sources
from dpkernels.ops.noise import NoiseKey
from dpkernels.privacy.samplers import FixedSizeSampler, PoissonSampler, ShuffledSampler
from dpkernels.run import PrivateLoader, PrivateRun

__all__ = [
    "BackendUnavailable",
    "FixedSizeSampler",
    "NoiseKey",
    "PoissonSampler",
    "PrivateLoader",
    "PrivateRun",
    "PrivateTraining",
    "ShuffledSampler",
    "Unsupported",
    "__version__",
    "batch_norm_to_group_norm",
    "clipping",
    "engine",
    "explain",
    "include_paths",
    "kernel_sources",
    "make_plain",
    "make_private",
    "ops",
    "postprocess",
    "precondition",
    "privacy",
    "run",
    "use_backend",
]

__version__ = "0.1.0"
