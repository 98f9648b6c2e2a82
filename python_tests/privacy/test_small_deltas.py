"""Privacy loss distributions at small deltas, where a Fourier transform's rounding hides them."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from dpkernels.privacy import EveryRecord, Poisson, WithoutReplacement, gaussian_step
from dpkernels.privacy.accountants import (
    Accountant,
    GaussianAccountant,
    PldAccountant,
    RdpAccountant,
)
from dpkernels.privacy.mechanism import Sampling
from python_tests.optional_packages import optional_package

dp_accounting = optional_package("dp_accounting")
pld = optional_package("dp_accounting.pld")

DELTAS = [1e-5, 1e-8, 1e-10, 1e-12, 1e-13, 1e-15]
STEPS = [1, 10, 1000, 10_000, 100_000, 1_000_000]
SETTINGS: list[tuple[float, Sampling]] = [
    (0.6, Poisson(0.001)),
    (1.0, Poisson(0.01)),
    (2.0, Poisson(0.05)),
    (10.0, Poisson(1e-5)),
    (0.8, Poisson(0.3)),
    (2.0, WithoutReplacement(100, 10_000)),
]


def composed(accountant: Accountant, sigma: float, sampling: Sampling, steps: int) -> Accountant:
    """Return ``accountant`` after equal steps."""
    accountant.compose(gaussian_step(sigma, sampling), steps)
    return accountant


@pytest.mark.parametrize(("sigma", "sampling"), SETTINGS)
def test_epsilon_is_finite_below_rdp_and_monotone(sigma: float, sampling: Sampling) -> None:
    epsilons = {}
    for steps in STEPS:
        tight = composed(PldAccountant(), sigma, sampling, steps)
        loose = composed(RdpAccountant(), sigma, sampling, steps)
        for delta in DELTAS:
            epsilons[steps, delta] = tight.epsilon(delta)
            assert epsilons[steps, delta] <= loose.epsilon(delta) < math.inf
    for steps in STEPS:
        by_delta = [epsilons[steps, delta] for delta in DELTAS]
        assert by_delta == sorted(by_delta)
    for delta in DELTAS:
        by_steps = [epsilons[steps, delta] for steps in STEPS]
        assert by_steps == sorted(by_steps)


@pytest.mark.parametrize("delta", [1e-9, 1e-12])
def test_epsilon_grows_with_every_step_from_one_way_to_the_other(delta: float) -> None:
    """Rounding is 2e-16 a step: where it is 1e-6 of delta, masses begin to be tilted."""
    switch = round(1e-6 * delta / 2.3e-16)
    for first in {max(1, switch - 3), 1, 5000}:
        counts = range(first, first + 6)
        epsilons = [
            composed(PldAccountant(), 1.0, Poisson(0.01), steps).epsilon(delta) for steps in counts
        ]
        assert epsilons == sorted(set(epsilons))


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-12, 1e-15])
@pytest.mark.parametrize("steps", [1, 100, 10_000, 1_000_000])
def test_gaussians_have_the_exact_epsilon(steps: int, delta: float) -> None:
    """Sampled at a rate of nearly 1: what is left out moves mu by 1e-9, and the grid by 1.3e-4.

    What lies beyond 10 standard deviations of a step counts as infinite, and so against delta.
    """
    sigma = math.sqrt(steps)
    exact = composed(GaussianAccountant(), sigma, EveryRecord(), steps).epsilon(delta)
    wider = composed(GaussianAccountant(), sigma / (1 + 1.3e-4), EveryRecord(), steps)
    ours = composed(PldAccountant(), sigma, Poisson(1 - 1e-9), steps).epsilon(delta)
    beyond = steps * norm.sf(10)
    assert exact * (1 - 1e-7) <= ours <= wider.epsilon(delta - beyond) * (1 + 1e-5)


def test_delta_and_epsilon_are_inverse() -> None:
    for sigma, sampling in SETTINGS:
        accountant = composed(PldAccountant(), sigma, sampling, 20_000)
        for delta in (1e-6, 1e-11, 1e-14):
            epsilon = accountant.epsilon(delta)
            assert accountant.delta(epsilon) == pytest.approx(delta, rel=2e-3)


@pytest.mark.parametrize("steps", [1, 1000, 10_000])
@pytest.mark.parametrize("delta", [1e-9, 1e-12])
def test_epsilon_is_not_below_dp_accountings_optimistic_one(steps: int, delta: float) -> None:
    sigma, rate, interval = 1.0, 0.01, 1e-3
    loss = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        pessimistic_estimate=False,
        value_discretization_interval=interval,
    )
    least = loss.self_compose(steps).get_epsilon_for_delta(delta)
    ours = composed(PldAccountant(interval), sigma, Poisson(rate), steps).epsilon(delta)
    assert least <= ours
    if steps == 1:  # theirs has no rounding to allow for yet
        assert ours == pytest.approx(least, rel=5e-3)


def test_a_delta_beyond_every_distribution_falls_back_on_divergences() -> None:
    tight = composed(PldAccountant(), 1.0, Poisson(0.01), 1000).epsilon(1e-40)
    assert tight == composed(RdpAccountant(), 1.0, Poisson(0.01), 1000).epsilon(1e-40)


def test_several_kinds_of_steps_are_tilted_alike() -> None:
    accountant = composed(PldAccountant(), 1.0, Poisson(0.01), 30_000)
    alone = accountant.epsilon(1e-12)
    composed(accountant, 3.0, Poisson(0.02), 30_000)
    composed(accountant, 50.0, EveryRecord(), 10)
    together = accountant.epsilon(1e-12)
    loose = RdpAccountant()
    loose.replace(accountant.history)
    assert alone < together < loose.epsilon(1e-12)
