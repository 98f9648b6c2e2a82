"""Gaussian releases without sampling, exactly."""

from __future__ import annotations

from dpkernels.privacy.accountants.accountant import Accountant
from dpkernels.privacy.accountants.exposure import Exposure, amplification
from dpkernels.privacy.gaussian import gaussian_delta, gaussian_epsilon
from dpkernels.privacy.mechanism import Statement


class GaussianAccountant(Accountant):
    """Exact composition of Gaussians; there is no better bound. Without sampling only.

    T releases with noise multipliers sigma_t are one with mu = sqrt(sum of 1 / sigma_t^2).
    """

    name = "gaussian"

    def _why_not(self, statement: Statement) -> str | None:
        if (sampling := amplification(statement)) is None:
            return None
        return (
            "the gaussian accountant takes steps without amplification (every record, shuffled, or "
            f"drawn in sight), got {sampling}: what is released from a random batch is a mixture "
            "of Gaussians; take the pld or rdp accountant"
        )

    def _epsilon_of(self, exposed: Exposure, delta: float) -> float:
        return gaussian_epsilon(delta, exposed.mu)

    def _delta_of(self, exposed: Exposure, epsilon: float) -> float:
        return gaussian_delta(epsilon, exposed.mu)
