"""Privacy loss distributions: composed numerically, tight up to their grid."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from dpkernels.privacy.accountants.accountant import Accountant
from dpkernels.privacy.accountants.exposure import Exposure, Sampled
from dpkernels.privacy.accountants.rdp import RdpAccountant
from dpkernels.privacy.gaussian import gaussian_delta, gaussian_epsilon
from dpkernels.privacy.mechanism import Poisson, WithoutReplacement

if TYPE_CHECKING:
    from dpkernels.privacy.accountants.privacy_loss import Loss, Parts

# Steps of the grid in a standard deviation of a step's loss. Moving a loss to the ends of its
# bucket adds at most a quarter of the squared interval to the variance: 2.5e-4 of it.
_FINENESS = 32
# Points of a step's grid at most, whatever its noise: 2 MB.
_LARGEST = 1 << 18


def _rate(sampling: Poisson | WithoutReplacement) -> float:
    if isinstance(sampling, Poisson):
        return sampling.rate
    return sampling.batch / sampling.population


def _interval(sampled: Sampled) -> tuple[float, float]:
    """Return the interval that a step asks for, and the least one that it allows."""
    sigma, rate = sampled[0], _rate(sampled[1])
    # The likelihood ratio has standard deviation q sqrt(e^(1/sigma^2) - 1), and its log about that
    # as long as it is small; beyond 1 the scale is that of the Gaussian's own loss, 1/sigma, or of
    # whether the record was drawn, which moves the loss by 1 / (2 sigma^2).
    scale = max(1.0, 1 / sigma, math.sqrt(rate) / (2 * sigma**2))
    spread = min(rate * math.sqrt(math.expm1(min(sigma**-2, 700.0))), scale)
    return spread / _FINENESS, _span(sigma, rate) / _LARGEST


def _span(sigma: float, rate: float) -> float:
    """Return how far losses of a step reach, from 10 standard deviations to 10."""
    from dpkernels.privacy.accountants.privacy_loss import loss_at

    return loss_at(sigma, rate, 1 + 10 * sigma) - loss_at(sigma, rate, -10 * sigma)


@lru_cache(maxsize=16)
def _losses(sampled: Sampled, interval: float) -> tuple[Loss, ...]:
    """Return the losses of a step that have to be hidden: of removing and adding, or replacing."""
    from dpkernels.privacy.accountants import privacy_loss

    sigma, sampling = sampled
    if isinstance(sampling, WithoutReplacement):
        return (privacy_loss.replacement(sigma, _rate(sampling), interval),)
    kinds = (privacy_loss.removal, privacy_loss.addition)
    return tuple(kind(sigma, sampling.rate, interval) for kind in kinds)


class PldAccountant(Accountant):
    """The default: within a percent of the truth up to a million steps, for any sampling.

    interval: of the grid of losses; None takes one that suits the steps. Whatever it is, losses
        are rounded to where epsilon is larger.

    A history of many different steps costs a Fourier transform for each: take rdp then.
    """

    name = "pld"

    def __init__(self, interval: float | None = None) -> None:
        super().__init__()
        if interval is not None and not 0 < interval < math.inf:
            raise ValueError(f"interval must be finite and > 0, or None, got {interval}")
        self.interval = interval

    def _parts(self, exposed: Exposure) -> list[Parts]:
        """Return the losses of all steps, for each side that has to be hidden."""
        from dpkernels.privacy.accountants import privacy_loss

        interval = self.interval
        if interval is None:
            wanted, allowed = zip(*(_interval(kind) for kind, _ in exposed.sampled), strict=True)
            least = _span(1 / exposed.mu, 1.0) / _LARGEST if exposed.mu else 0.0
            interval = max(min(wanted), *allowed, least)
        steps = [(_losses(kind, interval), count) for kind, count in exposed.sampled]
        sides = []
        for side in range(len(steps[0][0])):
            parts = [(losses[side], count) for losses, count in steps]
            if exposed.mu:
                # At rate 1 adding and removing are the same.
                parts.append((privacy_loss.removal(1 / exposed.mu, 1.0, interval), 1))
            sides.append(parts)
        return sides

    def _epsilon_of(self, exposed: Exposure, delta: float) -> float:
        if not exposed.sampled:
            return gaussian_epsilon(delta, exposed.mu)
        from dpkernels.privacy.accountants.tilted import epsilon_at

        epsilon = max(epsilon_at(parts, delta) for parts in self._parts(exposed))
        # Steps' own distributions end at 10 standard deviations. Divergences have no end, and are
        # an upper bound too.
        return epsilon if epsilon < math.inf else RdpAccountant()._epsilon_of(exposed, delta)

    def _delta_of(self, exposed: Exposure, epsilon: float) -> float:
        if not exposed.sampled:
            return gaussian_delta(epsilon, exposed.mu)
        from dpkernels.privacy.accountants.tilted import delta_at

        return max(delta_at(parts, epsilon) for parts in self._parts(exposed))
