"""Gaussian releases without sampling, exactly."""

from __future__ import annotations

import math
import sys

from dpkernels.privacy.accountants.accountant import Accountant
from dpkernels.privacy.accountants.exposure import Exposure, amplification
from dpkernels.privacy.mechanism import Statement


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Return the log of delta at ``epsilon`` of a Gaussian with sensitivity over noise ``mu``.

    Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu): Balle and Wang 2018, eq. 6.
    """
    from scipy.special import log_ndtr

    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = float(log_ndtr(-mu / 2 - epsilon / mu))
    # Both logs are right to a few units in the last place, and the difference is rounded to where
    # delta is larger.
    slack = 4 * sys.float_info.epsilon * (1 + abs(upper) + abs(lower) + epsilon)
    log_ratio = min(epsilon + lower - upper, 0.0) - slack
    return upper + math.log(-math.expm1(log_ratio))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at ``delta`` of a Gaussian with sensitivity over noise ``mu``, rounded up."""
    target = math.log(delta)
    if gaussian_log_delta(mu, 0.0) <= target:
        return 0.0
    # What concentrated differential privacy gives (Bun and Steinke 2016, prop. 1.3) is enough.
    low, high = 0.0, mu**2 / 2 + mu * math.sqrt(-2 * target)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if gaussian_log_delta(mu, middle) <= target:
            high = middle
        else:
            low = middle
    return high


class GaussianAccountant(Accountant):
    """Exact composition of Gaussians; there is no better bound. Without sampling only.

    T releases with noise multipliers sigma_t are one with mu = sqrt(sum of 1 / sigma_t^2).
    """

    name = "gaussian"

    def _why_not(self, statement: Statement) -> str | None:
        if (sampling := amplification(statement)) is None:
            return None
        return (
            "the gaussian accountant takes steps that see every record, or shuffled ones, got "
            f"{sampling}: what is released from a random batch is a mixture of Gaussians; take the "
            "pld or rdp accountant"
        )

    def _epsilon_of(self, exposed: Exposure, delta: float) -> float:
        return gaussian_epsilon(exposed.mu, delta)

    def _delta_of(self, exposed: Exposure, epsilon: float) -> float:
        return math.exp(gaussian_log_delta(exposed.mu, epsilon))
