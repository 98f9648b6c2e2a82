"""``get_noise_multiplier``: the noise that a budget needs."""

from __future__ import annotations

import math
from typing import Any

from dpkernels.opacus.accountants.registry import create_accountant
from dpkernels.opacus.accountants.statements import StatementAccountant
from dpkernels.privacy.calibration import calibrate_noise_multiplier
from dpkernels.privacy.mechanism import Poisson, Sampling

# Epochs over a rate are whole steps but for rounding: 49 / (49 * (1 / 49)) is above 1.
_ROUNDING = 1e-9


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
    **kwargs: Any,
) -> float:
    """Return a noise multiplier with which Poisson-sampled steps stay within the budget.

    sample_rate: of each step. epochs or steps: how long it goes on; an epoch is 1 / sample_rate
        steps, and a part of a step counts as one.
    epsilon_tolerance, kwargs: taken, as Opacus takes them, and not needed: the search is finer, and
        its result never over the budget.
    """
    if (steps is None) is (epochs is None):
        raise ValueError(
            f"get_noise_multiplier: pass steps or epochs, one of them, got steps={steps} and "
            f"epochs={epochs}"
        )
    sampling = Poisson(sample_rate)
    if epochs is not None:
        steps = math.ceil(epochs / sample_rate * (1 - _ROUNDING))
    assert steps is not None
    return noise_for(target_epsilon, target_delta, steps, sampling, accountant)


def noise_for(
    epsilon: float, delta: float, steps: int, sampling: Sampling, mechanism: str
) -> float:
    """Return the noise multiplier by the accountant that Opacus' users call ``mechanism``."""
    accountant = create_accountant(mechanism)
    if not isinstance(accountant, StatementAccountant):
        raise ValueError(
            f"accountant: {mechanism!r} is registered by the caller, and cannot be calibrated; "
            "pass 'prv' or 'rdp', or find noise_multiplier yourself and call make_private"
        )
    return calibrate_noise_multiplier(epsilon, delta, steps, sampling, accountant=accountant.name)
