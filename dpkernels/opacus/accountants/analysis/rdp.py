"""Renyi divergences of Poisson-sampled steps, and the epsilon that they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpkernels.privacy.mechanism import Poisson


def compute_rdp(
    *, q: float, noise_multiplier: float, steps: int, orders: Sequence[float] | float
) -> Any:
    """Return the divergences of ``steps`` steps at all orders: an array, or a number for one order.

    q: the rate of Poisson sampling. noise_multiplier: noise over sensitivity of each step.
    """
    import numpy as np

    from dpkernels.privacy.accountants import renyi

    given = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    if q == 0:
        found = np.zeros_like(given)
    elif noise_multiplier == 0:
        found = np.full_like(given, math.inf)
    elif q == 1:
        found = given / (2 * noise_multiplier**2)
    else:
        found = renyi.divergences(noise_multiplier, Poisson(q), tuple(map(float, given)))
    total = steps * np.asarray(found)
    return float(total[0]) if np.ndim(orders) == 0 else total


def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Sequence[float] | float, delta: float
) -> tuple[float, float]:
    """Return the least epsilon at ``delta`` of all orders, and the order that gives it.

    orders, rdp: of the same length; a divergence that is not a number is left out. The conversion
    is proposition 12 of Canonne, Kamath and Steinke 2020.
    """
    import numpy as np

    alphas, divergences = (np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (orders, rdp))
    if alphas.shape != divergences.shape:
        raise ValueError(
            f"get_privacy_spent: rdp must have one value for each of the {len(alphas)} orders, got "
            f"{len(divergences)}"
        )
    bounds = divergences + np.log1p(-1 / alphas) - np.log(delta * alphas) / (alphas - 1)
    if np.isnan(bounds).all():
        return math.inf, math.nan
    best = int(np.nanargmin(bounds))
    return max(0.0, float(bounds[best])), float(alphas[best])
