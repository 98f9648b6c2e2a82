"""Privacy loss distributions on a grid, rounded to where they are worse, and their composition.

Discretisation is "connect the dots" (Doroshenko et al. 2022), composition by Fourier transforms
(Koskela et al. 2020). dp-accounting has the same; but building one takes it 0.3 to 2 s, which a
search over noise cannot afford, and composing 0.2 s, which a call in every step cannot. The two
agree: the tests compare them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr

Floats = NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)
# What lies further out than this many standard deviations has mass 8e-24 and counts as infinite.
_REACH = 10.0
# Mass of the tails of a composition that counts as infinite, and the slopes at which Chernoff
# bounds of where they begin are tried, over the length of a step's distribution: from 1/4, in
# doublings, to 512, which does not overflow.
TAIL = 1e-15
_SLOPES = 2.0 ** np.arange(-2, 10)


@dataclass
class Loss:
    """A distribution of privacy losses: ``masses[k]`` at (lowest + k) interval, the rest at inf."""

    lowest: int
    masses: Floats
    infinite: float
    interval: float
    _transforms: dict[int, NDArray[np.complex128]] = field(default_factory=dict)
    _log_moments: Floats | None = None
    _moment_at: dict[float, float] = field(default_factory=dict)
    _tilted: dict[float, Loss] = field(default_factory=dict)

    def losses(self) -> Floats:
        """Return the losses that masses are at."""
        return (
            np.arange(self.lowest, self.lowest + len(self.masses), dtype=np.float64) * self.interval
        )

    def delta(self, epsilon: float) -> float:
        """Return infinite + sum over losses > epsilon of (1 - e^(epsilon - loss)) mass."""
        losses = self.losses()
        above = losses > epsilon
        return float(self.infinite - np.expm1(epsilon - losses[above]) @ self.masses[above])

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon >= 0 whose delta is at most ``delta``; inf if there is none."""
        if self.infinite > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        losses = self.losses()
        beyond = self.infinite + np.cumsum(self.masses[::-1])[::-1]  # mass of losses >= each
        # The least epsilon is at most the last loss that has more than delta at it and beyond, and
        # no more than 60 less: e^-60 is nothing beside 1, and e^60 does not overflow.
        last = int(np.flatnonzero(beyond > delta)[-1])
        first = int(np.searchsorted(losses, max(0.0, losses[last] - 60)))
        relative = np.exp(losses[last] - losses[first:])
        scaled = np.cumsum((self.masses[first:] * relative)[::-1])[::-1]
        # Up to each loss, delta(epsilon) = beyond - e^(epsilon - losses[last]) scaled.
        count = last + 1 - first
        enough = beyond[first : last + 1] - scaled[:count] / relative[:count] <= delta
        k = int(np.argmax(enough)) if enough.any() else count - 1
        return max(0.0, float(losses[last]) + math.log((beyond[first + k] - delta) / scaled[k]))

    def tails(self, count: int) -> tuple[int, int]:
        """Return indices of ``count`` losses' sum between which all but TAIL of its mass lies."""
        width = len(self.masses)
        slopes = _SLOPES / width
        if self._log_moments is None:
            self._log_moments = np.log([self._moments(slopes[0]), self._moments(-slopes[0])])
        reach = (count * self._log_moments + math.log(2 / TAIL)) / slopes
        low, high = math.floor(-reach[1].min()), math.ceil(reach[0].min())
        return max(0, low), min(count * (width - 1), high)

    def _moments(self, slope: float) -> list[float]:
        """Return the sums of e^(slope k) masses[k], for slopes that double."""
        powers = np.exp(slope * np.arange(len(self.masses)))
        moments = []
        for doubled in range(len(_SLOPES)):
            if doubled:
                powers *= powers
            moments.append(float(self.masses @ powers))
        return moments

    def log_moment(self, slope: float) -> float:
        """Return the log of the sum of e^(slope k) masses[k], which is kept."""
        if slope not in self._moment_at:
            powers = np.exp(slope * np.arange(len(self.masses)))
            self._moment_at[slope] = math.log(self.masses @ powers)
        return self._moment_at[slope]

    def tilt(self, slope: float) -> Loss:
        """Return masses[k] e^(slope k), made to add up to 1; the last one asked for is kept."""
        if slope not in self._tilted:
            exponents = slope * np.arange(len(self.masses)) - self.log_moment(slope)
            masses = self.masses * np.exp(exponents)
            self._tilted = {slope: Loss(self.lowest, masses, 0.0, self.interval)}
        return self._tilted[slope]

    def transform(self, length: int) -> NDArray[np.complex128]:
        """Return the Fourier transform at ``length``; the last one asked for is kept."""
        if length not in self._transforms:
            self._transforms.clear()
            places = np.arange(len(self.masses)) % length
            self._transforms[length] = rfft(np.bincount(places, self.masses, length))
        return self._transforms[length]


Parts = list[tuple[Loss, int]]


def lost(parts: Parts) -> float:
    """Return the mass that ``compose`` counts as infinite.

    The mass that is cut off counts, and so does what rounding may have cost: each of n factors of a
    Fourier coefficient, which are at most 1, is right to about a unit in the last place, and the
    inverse transform averages over coefficients.
    """
    survived = sum(count * math.log1p(-loss.infinite) for loss, count in parts)
    counts = sum(count for _, count in parts)
    return -math.expm1(survived) + len(parts) * TAIL + counts * EPS


def compose(parts: Parts) -> Loss:
    """Return the distribution of the sum of ``count`` losses of each (loss, count)."""
    low, masses, _ = convolve(parts)
    lowest = sum(loss.lowest * count for loss, count in parts) + low
    return Loss(lowest, np.maximum(masses, 0.0), lost(parts), parts[0][0].interval)


def convolve(parts: Parts) -> tuple[int, Floats, NDArray[np.complex128]]:
    """Return the index at which the sum's masses begin, the masses, and their Fourier transform.

    The index counts from the sum of the parts' lowest losses.
    """
    bounds = [loss.tails(count) for loss, count in parts]
    low, high = (sum(side) for side in zip(*bounds, strict=True))
    # Distinct lengths are few, so that transforms are used again as steps go on.
    length = next_fast_len(1 << (high - low).bit_length(), real=True)
    product = np.ones(length // 2 + 1, np.complex128)
    for loss, count in parts:
        product *= loss.transform(length) ** count
    return low, np.roll(irfft(product, length), -low)[: high - low + 1], product


def _spread(
    lowest: int, upper: tuple[Floats, Floats], lower: tuple[Floats, Floats], interval: float
) -> Loss:
    """Return the distribution with the buckets' masses moved to their ends.

    upper, lower: for each edge of buckets, P(loss <= edge) and P(loss > edge), under the
        distribution that outputs come from and under the one it is compared with.

    A bucket's masses P and Q under both stay what they are: b of P goes to its upper end and P - b
    to its lower one, with b = (P - e^low Q) / (1 - e^-interval). The curve of delta over e^epsilon
    becomes its own chords, which lie above it. b is raised by what rounding may take from it. All
    below the first edge goes to it, all above the last is infinite.
    """
    p, p_scale = _between(*upper)
    q, q_scale = _between(*lower)
    edges = (lowest + np.arange(len(upper[0]))) * interval
    growth = np.exp(np.minimum(edges[:-1], 700.0))  # less than it is moves masses up
    slack = 4 * EPS * (p_scale + growth * q_scale)
    raised = np.clip((p - growth * q + slack) / -math.expm1(-interval), 0.0, p)
    masses = np.zeros(len(edges))
    masses[0] = upper[0][0]
    masses[1:] += raised
    masses[:-1] += p - raised
    return Loss(lowest, masses, float(upper[1][-1]), interval)


def _between(below: Floats, above: Floats) -> tuple[Floats, Floats]:
    """Return the masses between edges, from the smaller tail, and how large that tail is."""
    left = below[1:] < above[:-1]
    masses = np.where(left, np.diff(below), -np.diff(above))
    return np.maximum(masses, 0.0), np.where(left, below[1:], above[:-1])


def _outputs(sigma: float, rate: float, losses: Floats) -> Floats:
    """Return the output z at which log(1 - q + q e^((2 z - 1) / (2 sigma^2))) is ``losses``."""
    with np.errstate(divide="ignore"):
        # Each of the two is exact where the other cancels or overflows.
        near = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / rate, -1.0))
    exponent = np.where(losses < 30, near, losses - math.log(rate))
    result: Floats = sigma**2 * exponent + 0.5
    return result


def loss_at(sigma: float, rate: float, z: float) -> float:
    """Return the privacy loss of output ``z`` where removing a record is to be hidden."""
    exponent = (2 * z - 1) / (2 * sigma**2)
    if exponent > 30:
        return math.log(rate) + exponent
    return math.log1p(rate * math.expm1(exponent)) if rate < 1 else exponent


def _tails(sigma: float, rate: float, z: Floats) -> tuple[tuple[Floats, Floats], ...]:
    """Return (P(Z <= z), P(Z > z)) with the record, sampled at ``rate``, and without it."""
    without = ndtr(z / sigma), ndtr(-z / sigma)
    shifted = ndtr((z - 1) / sigma), ndtr((1 - z) / sigma)
    mixed = tuple((1 - rate) * a + rate * b for a, b in zip(without, shifted, strict=True))
    return (mixed[0], mixed[1]), without


def _edges(low: float, high: float, interval: float) -> tuple[int, Floats]:
    lowest, highest = math.floor(low / interval), math.ceil(high / interval)
    highest = max(highest, lowest + 1)
    return lowest, np.arange(lowest, highest + 1, dtype=np.float64) * interval


def removal(sigma: float, rate: float, interval: float) -> Loss:
    """Return the loss of a Gaussian on a Poisson sample where a record is removed."""
    reach = _REACH * sigma
    low, high = (loss_at(sigma, rate, z) for z in (-reach, 1 + reach))
    lowest, edges = _edges(low, high, interval)
    mixed, without = _tails(sigma, rate, _outputs(sigma, rate, edges))
    return _spread(lowest, mixed, without, interval)


def addition(sigma: float, rate: float, interval: float) -> Loss:
    """Return the loss of a Gaussian on a Poisson sample where a record is added.

    The two distributions change places, and the loss its sign: it falls as the output grows.
    """
    reach = _REACH * sigma
    low, high = (-loss_at(sigma, rate, z) for z in (1 + reach, -reach))
    lowest, edges = _edges(low, high, interval)
    mixed, without = _tails(sigma, rate, _outputs(sigma, rate, -edges))
    return _spread(lowest, without[::-1], mixed[::-1], interval)


def replacement(sigma: float, rate: float, interval: float) -> Loss:
    """Return the loss of a Gaussian on a batch without replacement where a record is replaced.

    For epsilon >= 0 delta is at most that of ``removal``, q times the delta without sampling at
    log(1 + (e^epsilon - 1) / q) (Balle, Barthe and Gaboardi 2018). Replacing is symmetric, which
    gives the curve for epsilon < 0: a loss of -x has e^-x times the mass of x, and what is left has
    loss 0. That curve is convex in e^epsilon, so that there are two distributions which have it,
    and they stand for the mechanism in composition too (Zhu, Dong and Wang 2022).
    """
    high = loss_at(sigma, rate, 1 + _REACH * sigma)
    _, edges = _edges(0.0, high, interval)
    mixed, without = _tails(sigma, rate, _outputs(sigma, rate, edges))
    one_side = _spread(0, mixed, without, interval)
    positive = one_side.masses[1:]
    negative = (positive * np.exp(-edges[1:]))[::-1]
    zero = 1 - one_side.infinite - positive.sum() - negative.sum()
    masses = np.concatenate([negative, [max(zero, 0.0)], positive])
    return Loss(-len(positive), masses, one_side.infinite, interval)
