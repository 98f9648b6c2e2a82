"""Composition of privacy losses for small deltas, by exponential tilting.

A Fourier transform in float64 is wrong by about 1e-16 for each step, wherever on the grid: 10,000
steps hide all deltas below 1e-12. So the masses m[k] of every step are tilted first, to
w[k] = m[k] e^(slope k) / M with M = sum of m[k] e^(slope k). Their sum over all steps is composed,
and tilted back: mass i of the composition is

    q[i] e^(log M - slope i),    log M added up over all steps.

With the slope at which Chernoff's bound is least, q has its centre where epsilon lies, and what is
wrong with q is wrong with delta in proportion: by 1e-16 of delta for each step.
"""

from __future__ import annotations

import math

import numpy as np

from dpkernels.privacy.accountants.privacy_loss import (
    EPS,
    TAIL,
    Loss,
    Parts,
    compose,
    convolve,
    lost,
)

# Mass that composition without tilting counts as infinite may be this part of delta. Epsilon moves
# by less than from one step to the next, so that it grows with steps from one way to the other.
_NEGLIGIBLE = 1e-6
# Slopes are powers of sqrt(2), and times the length of a step's distribution within these bounds:
# the best one falls like the root of steps, to 0.03 at a million; e to the last does not overflow.
_FLATTEST, _STEEPEST = 2.0**-12, 512.0


def epsilon_at(parts: Parts, delta: float) -> float:
    """Return an upper bound of epsilon at ``delta``; inf if one step alone loses more than that."""
    if lost(parts) <= _NEGLIGIBLE * delta:
        return compose(parts).epsilon(delta)
    slopes = _slopes(parts)
    bounds = [(_log_moment(parts, slope) - math.log(delta)) / slope for slope in slopes]
    composed = tilted(parts, slopes[int(np.argmin(bounds))])
    # What lies below the first loss is not known.
    return max(composed.epsilon(delta), composed.lowest * composed.interval)


def delta_at(parts: Parts, epsilon: float) -> float:
    """Return an upper bound of delta at ``epsilon``."""
    plain = compose(parts).delta(epsilon)
    if lost(parts) <= _NEGLIGIBLE * plain:
        return plain
    index = epsilon / parts[0][0].interval - sum(loss.lowest * count for loss, count in parts)
    slopes = _slopes(parts)
    bounds = [_log_moment(parts, slope) - slope * index for slope in slopes]
    composed = tilted(parts, slopes[int(np.argmin(bounds))])
    if epsilon < composed.lowest * composed.interval:
        return plain
    return min(plain, composed.delta(epsilon))


def tilted(parts: Parts, slope: float) -> Loss:
    """Return the composition of ``parts``, accurate around where ``slope`` tilts it to.

    What is below its lowest loss is left out: delta is an upper bound for epsilon from there on.

    Each factor of a Fourier coefficient is right to a few units in the last place, relative to 1,
    and the inverse averages over coefficients; masses are raised by what that makes of them. What
    is cut off above is at most TAIL of the tilted mass, and counts as infinite.
    """
    steps = [(loss.tilt(slope), count) for loss, count in parts]
    low, q, coefficients = convolve(steps)
    high, mean = low + len(q) - 1, float(np.abs(coefficients).mean())
    counts = sum(count for _, count in parts)
    width = max(len(loss.masses) for loss, _ in parts)
    log_moment = _log_moment(parts, slope)
    exponents = log_moment - slope * np.arange(low, high + 1, dtype=np.float64)
    # Exponents, and the logs that they are made of, are right to a unit of their size.
    rounding = 8 * EPS * counts * (1 + slope * width)
    raised = np.maximum(q, 0.0) + 8 * EPS * (counts + 8) * mean
    masses = np.minimum(raised * np.exp(np.minimum(exponents + rounding, 700.0)), 1.0)
    survived = sum(count * math.log1p(-loss.infinite) for loss, count in parts)
    above = len(parts) * TAIL * math.exp(min(log_moment - slope * high + rounding, 700.0))
    lowest = sum(loss.lowest * count for loss, count in parts) + low
    return Loss(lowest, masses, -math.expm1(survived) + above, parts[0][0].interval)


def _slopes(parts: Parts) -> list[float]:
    width = max(len(loss.masses) for loss, _ in parts)
    first, last = (math.log2(bound / width) for bound in (_FLATTEST, _STEEPEST))
    return [2.0 ** (k / 2) for k in range(math.ceil(2 * first), math.floor(2 * last) + 1)]


def _log_moment(parts: Parts, slope: float) -> float:
    return sum(count * loss.log_moment(slope) for loss, count in parts)
