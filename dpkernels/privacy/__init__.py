"""Guarantees: what is released, and which (epsilon, delta) that amounts to."""

from __future__ import annotations

from dpkernels.privacy.accountants import Accountant, make_accountant
from dpkernels.privacy.calibration import (
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_noise_scale,
    calibrate_steps,
    epsilon_after,
)
from dpkernels.privacy.mechanism import (
    Adjacency,
    Drawn,
    EveryRecord,
    GaussianQuery,
    NotPrivate,
    Poisson,
    Sampling,
    Shuffled,
    Statement,
    View,
    WithoutReplacement,
    adjacency_of,
    gaussian_step,
)

__all__ = [
    "Accountant",
    "Adjacency",
    "Drawn",
    "EveryRecord",
    "GaussianQuery",
    "NotPrivate",
    "Poisson",
    "Sampling",
    "Shuffled",
    "Statement",
    "View",
    "WithoutReplacement",
    "adjacency_of",
    "calibrate_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_noise_scale",
    "calibrate_steps",
    "epsilon_after",
    "gaussian_step",
    "make_accountant",
]
