"""Which units of several clients are the same: the most probable under a Beta-Bernoulli process.

Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019.
Global units theta_i ~ N(0, sigma0 I) come from a Beta process of mass gamma; client j has a
Bernoulli draw of them, each as v ~ N(theta_i, sigma I). sigma and sigma0 are variances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


@dataclass(frozen=True)
class Prior:
    """What is believed of units before they are seen.

    sigma: variance of a client's unit around its global unit. sigma0: of a global unit around 0.
    gamma: mass of the Beta process, about the number of global units of one client.
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 7.0

    def __post_init__(self) -> None:
        for name in ("sigma", "sigma0", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"pfnm: {name} must be finite and > 0, got {value}")


def match_units(
    units: Sequence[Tensor], prior: Prior, *, sweeps: int = 100, most: int | None = None
) -> list[Tensor]:
    """Return for each client the global unit of each of its units, int64 ``[L_j]``.

    units: ``[L_j, D]`` for each client, float64. sweeps: how often all clients are gone through at
    most; it ends when a sweep changes nothing, and none makes the posterior smaller. most: no more
    global units than this or than the widest client has; None: up to all.
    Two units of a client are never the same. Global units are numbered as they are met, client by
    client: those of the first client are its own, in its order.

    Cost of a client in a sweep: L_j L D for L global units, and an assignment of (L_j, L + L_j),
    about the third power of L in the worst case.
    """
    found = {0: torch.arange(len(units[0]), device=units[0].device)}
    for j in range(1, len(units)):
        found = _rematched(j, found, units, prior, most)
    for _ in range(sweeps if len(units) > 1 else 0):
        before = found
        for j in range(len(units)):
            found = _rematched(j, found, units, prior, most)
        if all(torch.equal(before[j], found[j]) for j in found):
            break
    return list(found.values())


def global_units(units: Sequence[Tensor], assignments: Sequence[Tensor], prior: Prior) -> Tensor:
    """Return theta ``[L, D]``: ``sum v / sigma / (1 / sigma0 + m / sigma)`` over the m that match.

    It is the posterior's maximum given the assignments (Proposition 1): a unit of one client
    alone is shrunk by sigma0 / (sigma0 + sigma), by half at the defaults.
    """
    sums, counts = _sums(units, assignments, prior)
    return sums / _precision(counts, prior).unsqueeze(1)


def _rematched(
    j: int, found: dict[int, Tensor], units: Sequence[Tensor], prior: Prior, most: int | None
) -> dict[int, Tensor]:
    """Return the assignments with client j's the most probable given the others'.

    Twice the gain in log posterior, less what is the same for all answers. For global unit i,
    which m others have, of mean theta_i and precision P_i = 1 / sigma0 + m / sigma:
    ``-|v - theta_i|^2 / (sigma + 1 / P_i) + 2 log(m / (J - m))``; for the k-th new one:
    ``-|v|^2 / (sigma + sigma0) + 2 log(gamma / J) - 2 log k``.
    """
    others = _numbered({k: labels for k, labels in found.items() if k != j})
    sums, counts = _sums([units[k] for k in others], list(others.values()), prior)
    own, known = units[j], len(sums)
    new = len(own) if most is None else min(len(own), max(most, len(own), known) - known)
    squares = own.square().sum(1, keepdim=True)
    precision = _precision(counts, prior)
    theta = sums / precision.unsqueeze(1)
    gain = own.new_empty(len(own), known + new)
    gain[:, :known] = (
        -(squares - 2 * own @ theta.T + theta.square().sum(1)) / (prior.sigma + 1 / precision)
        + 2 * (counts / (len(units) - counts)).log()
    )
    ranks = torch.arange(1, new + 1, dtype=own.dtype, device=own.device)
    gain[:, known:] = (
        -squares / (prior.sigma + prior.sigma0)
        + 2 * math.log(prior.gamma / len(units))
        - 2 * ranks.log()
    )
    _, columns = linear_sum_assignment(gain.cpu().numpy(), maximize=True)
    answer = torch.as_tensor(columns, dtype=torch.long, device=own.device)
    return _numbered(dict(sorted({**others, j: answer}.items())))


def _numbered(found: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the same partition, its blocks numbered from 0 in the order in which they are met."""
    flat = torch.cat(list(found.values()))
    names, blocks = flat.unique(return_inverse=True)
    at = torch.arange(len(flat), device=flat.device)
    met = torch.full_like(names, len(flat)).scatter_reduce(0, blocks, at, "amin")
    numbers = met.argsort().argsort()[blocks]
    return dict(zip(found, numbers.split([len(labels) for labels in found.values()]), strict=True))


def _sums(
    units: Sequence[Tensor], assignments: Sequence[Tensor], prior: Prior
) -> tuple[Tensor, Tensor]:
    """Return of each global unit the sum of its v / sigma ``[L, D]``, and their number ``[L]``."""
    rows, labels = torch.cat(list(units)), torch.cat(list(assignments))
    count = int(labels.max()) + 1
    sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, labels, rows / prior.sigma)
    return sums, labels.bincount(minlength=count).to(rows.dtype)


def _precision(counts: Tensor, prior: Prior) -> Tensor:
    return 1 / prior.sigma0 + counts / prior.sigma
