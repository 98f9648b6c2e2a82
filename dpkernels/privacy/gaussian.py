"""The exact privacy of Gaussian noise, rounded to the side that is safe.

mu is how far what is seen moves, in L2, divided by the noise: 1 / sigma for one step on all
records, sqrt(T) / sigma for T of them. Then (Balle and Wang 2018, Theorem 8)

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

is exact. A guarantee is rounded up, and what an audit claims to have found is rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta for ``epsilon`` >= 0 and ``mu`` >= 0, rounded up."""
    _check(epsilon=epsilon, mu=mu)
    return _delta_between(epsilon, mu)[1]


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest epsilon >= 0 for ``delta`` in [0, 1] and ``mu`` >= 0, rounded up.

    Infinite where there is none: ``delta`` of 0, or ``mu`` infinite.
    """
    return _smallest_epsilon(delta, mu)


def gaussian_epsilon_below(delta: float, mu: float) -> float:
    """Return the same, rounded down: for whoever shows that epsilon is at least so large."""
    return _smallest_epsilon(delta, mu, below=True)


def bisect(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Return where ``holds`` turns from true (at ``low``) to false (at ``high``), from both sides.

    The two ends are as close as 1e-12 of their size, or neighbouring floats.
    """
    while high - low > 1e-12 * high:
        middle = low + (high - low) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _smallest_epsilon(delta: float, mu: float, *, below: bool = False) -> float:
    """Return it from above, or from below."""
    _check(mu=mu)
    if not 0 <= delta <= 1:
        raise ValueError(f"delta must be in [0, 1], got {delta}")
    if mu == 0 or delta == 1:
        return 0.0
    if delta == 0 or mu == math.inf:
        return math.inf
    # Here Phi(mu/2 - epsilon/mu) <= exp(-(epsilon/mu - mu/2)^2 / 2) = delta; a little more, for
    # the rounding.
    top = 1.001 * (mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))) + 1e-9
    side = 0 if below else 1

    def too_small(epsilon: float) -> bool:
        return _delta_between(epsilon, mu)[side] > delta

    if top == math.inf:
        return math.inf
    return bisect(too_small, 0.0, top)[side] if too_small(0.0) else 0.0


def _delta_between(epsilon: float, mu: float) -> tuple[float, float]:
    """Return delta(epsilon) from below and from above.

    With t = epsilon/mu - mu/2 and s = epsilon/mu + mu/2, e^epsilon phi(s) = phi(t), so that

        delta = Phi(-t) - phi(t) R(s),    R(s) = Phi(-s) / phi(s) <= 1/s,

    has no large exponents. t and s are off by at most 2^-52 s, which moves the first term by phi(t)
    times that; phi(t) itself is off by 2^-52 |t| s, and R by a few roundings. All together is
    within 2^-50 (Phi(-t) (1 + t+ s) + phi(t) (1 + s)), and twice that leaves room for the library.
    """
    from scipy.special import erfcx

    if mu == 0 or epsilon == math.inf:
        return 0.0, 0.0
    t, s = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if t > 40:  # Phi(-40) is below all floats
        return 0.0, math.ulp(0.0)
    if t < -40:
        return 1 - 2**-48, 1.0
    density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    tail = math.erfc(t / math.sqrt(2)) / 2
    delta = tail - density * math.sqrt(math.pi / 2) * float(erfcx(s / math.sqrt(2)))
    error = 2**-49 * (tail * (1 + max(t, 0.0) * s) + density * (1 + s))
    # The next float covers what underflows.
    return max(0.0, delta - error), min(1.0, math.nextafter(delta + error, math.inf))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
