"""Guarantees: what is released, and which (epsilon, delta) that amounts to."""

from __future__ import annotations

from dpkernels.privacy.accountants import Accountant, make_accountant
from dpkernels.privacy.calibration import (
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_steps,
)
from dpkernels.privacy.mechanism import (
    EveryRecord,
    GaussianQuery,
    NotPrivate,
    Poisson,
    Sampling,
    Shuffled,
    Statement,
    WithoutReplacement,
    gaussian_step,
)

__all__ = [
    "Accountant",
    "EveryRecord",
    "GaussianQuery",
    "NotPrivate",
    "Poisson",
    "Sampling",
    "Shuffled",
    "Statement",
    "WithoutReplacement",
    "calibrate_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "gaussian_step",
    "make_accountant",
]
