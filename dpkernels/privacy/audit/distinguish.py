"""The same mechanism many times, with and without one record: how well can they be told apart?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpkernels.privacy.audit.result import AuditResult, check_levels
from dpkernels.privacy.gaussian import gaussian_epsilon_below

Assumes = Literal["nothing", "gaussian"]
Statistic = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DistinguishingResult(AuditResult):
    """How well two neighbouring data sets were told apart.

    assumes: what the bound rests on. trials: runs of each data set that it was computed from; as
    many others were used to find the statistic.
    mu: distance of the statistic's means divided by its deviation, from below ("gaussian").
    true_positives, false_positives: bounds of their rates, from below and above ("nothing").
    """

    assumes: Assumes
    trials: int
    mu: float | None = None
    true_positives: float | None = None
    false_positives: float | None = None


def distinguishing_audit(
    release: Callable[[bool], Tensor | float],
    *,
    trials: int,
    delta: float,
    confidence: float = 0.95,
    assumes: Assumes = "nothing",
    statistic: Statistic | None = None,
) -> DistinguishingResult:
    """Return a lower bound on epsilon from ``trials`` runs each with and without a record.

    Unit: the record that ``release`` adds. Seen: whatever ``release`` returns.

    release: runs the mechanism with (True) or without (False) the record, each time with new
        noise, and returns all that an observer sees, of one shape: a noisy sum, or several of them
        (of every microbatch, of every rank) one after the other. A mistake that hides in the sum,
        noise that two parts share, is found only where both are seen.
    trials: at least 20. One half of them finds statistic and threshold, the bound comes from the
        other one, so that the confidence is honest.
    assumes: "nothing": a threshold's rates of true and false positives, after Clopper and Pearson.
        No bound is above log(trials / (2 log(2 / (1 - confidence)))).
        "gaussian": the statistic is normal, with one deviation for both data sets, as a projection
        of anything with Gaussian noise is. Sharper, and without that limit.
    statistic: maps what was released, float64 ``[n, d]``, to numbers ``[n]``, row by row. By
        default Fisher's linear discriminant: the direction that separates the means best, for the
        noise that there is, so that parts are subtracted from each other where they share it.

    Costs 2 ``trials`` runs and O(trials d^2 + d^3). Raises ValueError for bad numbers, and for
    something released that is not finite or changes its shape.
    """
    check_levels(delta, confidence)
    if trials < 20:
        raise ValueError(f"distinguishing_audit: trials must be >= 20, got {trials}")
    if assumes not in ("nothing", "gaussian"):
        raise ValueError(
            f"distinguishing_audit: assumes must be 'nothing' or 'gaussian', got {assumes!r}"
        )
    # In turns, so that what changes over time is not taken for the record.
    seen = [_flat(release(trial % 2 == 1)) for trial in range(2 * trials)]
    if len({len(one) for one in seen}) > 1:
        raise ValueError("distinguishing_audit: release must return the same shape every time")
    without, present = torch.stack(seen[0::2]), torch.stack(seen[1::2])
    learn = trials // 2
    if statistic is None:
        direction = fisher_direction(without[:learn], present[:learn])
        scores = (without @ direction, present @ direction)
    else:
        scores = (statistic(without).double(), statistic(present).double())
        if any(one.shape != (trials,) for one in scores):
            raise ValueError(
                f"distinguishing_audit: statistic must map [{trials}, d] to [{trials}]"
            )
        if scores[0][:learn].mean() > scores[1][:learn].mean():
            scores = (-scores[0], -scores[1])
    error = 1 - confidence
    if assumes == "gaussian":
        mu = mu_below(scores[0][learn:], scores[1][learn:], error)
        epsilon = gaussian_epsilon_below(delta, mu)
        return DistinguishingResult(epsilon, delta, confidence, assumes, trials - learn, mu)
    threshold = _best_threshold(scores[0][:learn], scores[1][:learn], delta, error)
    hits = torch.stack([(one[learn:] > threshold).sum() for one in scores])
    rates = _rates(hits[1], hits[0], trials - learn, error)
    epsilon = max(0.0, float(_epsilon_of_rates(*rates, delta)))
    return DistinguishingResult(
        epsilon, delta, confidence, assumes, trials - learn, None, *(float(one) for one in rates)
    )


def fisher_direction(without: Tensor, present: Tensor) -> Tensor:
    """Return the direction ``[d]`` that separates two samples, float64 ``[n, d]``, best.

    (covariance within)^-1 (difference of means), with every coordinate divided by its deviation,
    and the covariance shrunk towards the identity as Ledoit and Wolf (2004) do: fully for
    independent noise, hardly at all where directions differ, as with noise that is shared.
    """
    difference = present.mean(0) - without.mean(0)
    centred = torch.cat([without - without.mean(0), present - present.mean(0)])
    count, size = centred.shape
    deviation = centred.square().mean(0).sqrt()
    # A coordinate without noise decides alone; float32 cannot tell less than 1e-7 from nothing.
    floor = 1e-7 * torch.maximum(without.abs().amax(0), present.abs().amax(0))
    deviation = torch.maximum(deviation, torch.where(floor > 0, floor, 1.0))
    scaled = centred / deviation
    covariance = scaled.T @ scaled / count
    mean = covariance.diagonal().mean()
    spread = (covariance - mean * torch.eye(size, dtype=covariance.dtype)).square().sum()
    # sum over samples of |x x^T - S|^2 = sum of |x|^4 - n |S|^2.
    fourth = scaled.square().sum(1).square().sum() / count
    estimation = (fourth - covariance.square().sum()).clamp(min=0) / count
    weight = float((estimation / spread).clamp(max=1)) if spread > 0 else 1.0
    # Where nothing varies, or noise is shared to the last bit, something must keep it invertible.
    ridge = max(weight * float(mean), 1e-9)
    shrunk = (1 - weight) * covariance + ridge * torch.eye(size, dtype=covariance.dtype)
    direction: Tensor = torch.linalg.solve(shrunk, difference / deviation)
    return direction / deviation


def mu_below(without: Tensor, present: Tensor, error: float) -> float:
    """Return (difference of means) / deviation of two normal samples, ``[n]`` each, from below.

    The deviation is at most s sqrt(df / chi2), and d / deviation at most z sqrt(2/n) above the
    truth, each but for a chance of ``error`` / 2.
    """
    from scipy.special import gammaincinv, ndtri

    count = len(without)
    freedom = 2 * count - 2
    squares = (without - without.mean()).square().sum() + (present - present.mean()).square().sum()
    chi_square = 2 * float(gammaincinv(freedom / 2, error / 2))
    deviation = math.sqrt(float(squares) / chi_square)
    difference = float(present.mean() - without.mean())
    if difference <= 0:
        return 0.0
    if deviation == 0:
        return math.inf
    return max(0.0, difference / deviation + float(ndtri(error / 2)) * math.sqrt(2 / count))


def _best_threshold(without: Tensor, present: Tensor, delta: float, error: float) -> float:
    """Return the threshold whose bound is the best on these samples, ``[n]`` each."""
    candidates = torch.cat([without, present]).unique()
    above = [
        len(one) - torch.searchsorted(one.sort().values, candidates, right=True)
        for one in (without, present)
    ]
    rates = _rates(above[1], above[0], len(without), error)
    return float(candidates[_epsilon_of_rates(*rates, delta).argmax()])


def _rates(hits: Tensor, alarms: Tensor, count: int, error: float) -> tuple[Tensor, Tensor]:
    """Return Clopper and Pearson's bounds: true positives from below, false ones from above.

    hits, alarms: counts of ``count``, of one shape. Each bound fails with probability at most
    ``error`` / 2.
    """
    from scipy.special import betaincinv

    true = betaincinv(hits.clamp(min=1).numpy(), (count - hits + 1).numpy(), error / 2)
    # The upper bound of k of n is one minus the lower one of n - k.
    misses = count - alarms
    true_negative = betaincinv(misses.clamp(min=1).numpy(), (alarms + 1).numpy(), error / 2)
    true, true_negative = torch.as_tensor(true), torch.as_tensor(true_negative)
    return torch.where(hits > 0, true, 0.0), 1 - torch.where(misses > 0, true_negative, 0.0)


def _epsilon_of_rates(true_positives: Tensor, false_positives: Tensor, delta: float) -> Tensor:
    """Return the larger of log((TP - delta) / FP) and log((TN - delta) / FN); may be negative."""
    inside = (true_positives - delta).clamp(min=0) / false_positives
    outside = (1 - false_positives - delta).clamp(min=0) / (1 - true_positives)
    return torch.maximum(inside, outside).log()


def _flat(released: Tensor | float) -> Tensor:
    seen = torch.as_tensor(released, dtype=torch.float64).detach().flatten().cpu().clone()
    if not bool(seen.isfinite().all()):
        raise ValueError("distinguishing_audit: release must return finite numbers")
    return seen
