"""Gaussian differential privacy: the parts that are exact.

Opacus' functions for sampled steps take a central limit, which is not an upper bound of epsilon:
those are refused. ``dpkernels.opacus.accountants.PRVAccountant`` bounds the same steps.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dpkernels.privacy.gaussian import gaussian_delta, gaussian_epsilon


def delta_eps_mu(*, eps: float, mu: float) -> float:
    """Return the delta at which a mu-GDP mechanism has this epsilon, rounded up."""
    return gaussian_delta(eps, mu)


def eps_from_mu(*, mu: float, delta: float) -> float:
    """Return the epsilon at which a mu-GDP mechanism has this delta, rounded up."""
    return gaussian_epsilon(delta, mu)


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: the central limit that it takes for sampled steps is not an upper bound of "
        "epsilon; use PRVAccountant, or RDPAccountant, for the same steps"
    )


def compute_mu_uniform(**_: Any) -> float:
    """Refuse: see the module."""
    _refuse("compute_mu_uniform")


def compute_mu_poisson(**_: Any) -> float:
    """Refuse: see the module."""
    _refuse("compute_mu_poisson")


def compute_eps_uniform(**_: Any) -> float:
    """Refuse: see the module."""
    _refuse("compute_eps_uniform")


def compute_eps_poisson(**_: Any) -> float:
    """Refuse: see the module."""
    _refuse("compute_eps_poisson")
