"""The accountants beside dp-accounting and Opacus, on a grid of settings."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from dpkernels.privacy import EveryRecord, Poisson, WithoutReplacement, gaussian_step
from dpkernels.privacy.accountants import GaussianAccountant, PldAccountant, RdpAccountant
from dpkernels.privacy.accountants.renyi import divergences
from python_tests.optional_packages import optional_package

dp_accounting = optional_package("dp_accounting")
pld = optional_package("dp_accounting.pld")
rdp = optional_package("dp_accounting.rdp")
opacus_accountants = optional_package("opacus.accountants")

# Noise multiplier, rate, steps, delta: 50 of them, from one step to ten epochs.
GRID = [
    (sigma, rate, steps, delta)
    for sigma, delta in [(0.6, 1e-5), (0.8, 1e-6), (1.0, 1e-5), (1.5, 1e-7), (4.0, 1e-5)]
    for rate, steps in [
        (0.001, 1),
        (0.001, 1000),
        (0.001, 10000),
        (0.01, 10),
        (0.01, 100),
        (0.01, 1000),
        (0.05, 20),
        (0.05, 200),
        (0.3, 3),
        (0.3, 30),
    ]
]
# dp-accounting needs seconds for a privacy loss distribution on its own grid, of 1e-4.
INTERVAL = 1e-3


def composed(accountant, sigma, sampling, steps):
    accountant.compose(gaussian_step(sigma, sampling), steps)
    return accountant


def poisson_event(sigma, rate, steps):
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def test_the_grid_is_of_fifty():
    assert len(set(GRID)) == 50


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), GRID)
def test_rdp_equals_dp_accounting(sigma, rate, steps, delta):
    """At whole orders, where both have the sum; theirs at others is a bound of an integral."""
    orders = (*range(2, 64), 128, 256)
    theirs = rdp.RdpAccountant(orders)
    theirs.compose(poisson_event(sigma, rate, steps))
    ours = composed(RdpAccountant(orders), sigma, Poisson(rate), steps)
    # Ours are raised by 1e-10. Theirs add up to 257 logs near 0, each right to 1e-16 (times steps).
    rounding = 257 * 2.3e-16 * steps
    assert ours.epsilon(delta) == pytest.approx(theirs.get_epsilon(delta), rel=2e-10, abs=rounding)
    assert ours.delta(1.0) == pytest.approx(theirs.get_delta(1.0), rel=1e-6)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), GRID)
def test_rdp_with_all_orders_is_not_above_dp_accounting(sigma, rate, steps, delta):
    theirs = rdp.RdpAccountant()
    theirs.compose(poisson_event(sigma, rate, steps))
    ours = composed(RdpAccountant(), sigma, Poisson(rate), steps).epsilon(delta)
    assert ours <= theirs.get_epsilon(delta) * (1 + 1e-9)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), GRID)
def test_rdp_with_the_orders_of_opacus_equals_opacus(sigma, rate, steps, delta):
    """They have other orders, and no total-variation bound, which makes them negative."""
    theirs = opacus_accountants.RDPAccountant()
    theirs.history = [(sigma, rate, steps)]
    orders = theirs.DEFAULT_ALPHAS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the last one
        expected = max(0.0, theirs.get_epsilon(delta))
    ours = composed(RdpAccountant(orders), sigma, Poisson(rate), steps).epsilon(delta)
    # Opacus ends its series for orders between whole ones at e^-30, 1e-13, of 1 each step.
    if ours:
        assert ours == pytest.approx(expected, rel=1e-6, abs=1e-13 * steps)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), GRID)
def test_pld_equals_dp_accounting_on_the_same_grid(sigma, rate, steps, delta):
    theirs = pld.PLDAccountant(value_discretization_interval=INTERVAL)
    theirs.compose(poisson_event(sigma, rate, steps))
    ours = composed(PldAccountant(INTERVAL), sigma, Poisson(rate), steps)
    # Each has an allowance for rounding and tails of its own, 1e-15 to 3e-12 of mass, at most 3e-5
    # of the least delta; epsilon moves by less than that of itself.
    assert ours.epsilon(delta) == pytest.approx(theirs.get_epsilon(delta), rel=3e-5, abs=1e-9)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), GRID)
def test_pld_is_below_rdp(sigma, rate, steps, delta):
    tight, loose = (
        composed(kind(), sigma, Poisson(rate), steps).epsilon(delta)
        for kind in (PldAccountant, RdpAccountant)
    )
    assert tight < loose


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), GRID)
def test_pld_is_within_the_error_that_opacus_allows_its_own(sigma, rate, steps, delta):
    """PRV gives an upper bound, at most twice eps_error = 0.01 above the truth; so does ours."""
    theirs = opacus_accountants.PRVAccountant()
    theirs.history = [(sigma, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rdp that it chooses its domain by
        expected = theirs.get_epsilon(delta)
    ours = composed(PldAccountant(), sigma, Poisson(rate), steps).epsilon(delta)
    assert expected - 0.02 - 0.001 * expected < ours < expected * 1.001


@pytest.mark.parametrize("steps", [1, 10, 1000, 100_000])
def test_composed_losses_of_gaussians_bound_the_exact_delta(steps):
    """Sampled at a rate of nearly 1, where the formula without sampling is a bound from above."""
    rate = 1 - 1e-9
    sigma = 2 * math.sqrt(steps)
    exact = composed(GaussianAccountant(), sigma, EveryRecord(), steps)
    wider = composed(GaussianAccountant(), sigma / (1 + 1.25e-4), EveryRecord(), steps)
    ours = composed(PldAccountant(), sigma, Poisson(rate), steps)
    for epsilon in (0.0, 0.5, 1.0, 2.0, 3.0):
        # A mixture that leaves a record out with 1e-9 a step is that much below, at most. Above is
        # what the grid adds, half of 2.5e-4 to mu, and the allowance for rounding.
        delta, below, rounding = exact.delta(epsilon), steps * 1e-9, steps * 2.3e-16 + 1e-14
        assert delta - below <= ours.delta(epsilon)
        assert ours.delta(epsilon) <= wider.delta(epsilon) + rounding


@pytest.mark.parametrize("sigma", [0.2, 0.7, 2.0, 10.0])
@pytest.mark.parametrize("rate", [1e-5, 0.01, 0.6])
def test_divergences_between_whole_orders_lie_on_a_convex_curve_through_them(sigma, rate):
    """The log of A is convex in the order: it lies below its chords."""
    orders = (2.0, 2.5, 3.0, 3.5, 4.0)
    log_a = divergences(sigma, Poisson(rate), orders) * (np.array(orders) - 1)
    middle = (log_a[:-2] + log_a[2:]) / 2
    assert np.all(log_a[1:-1] < middle * (1 + 1e-9))
    assert np.all(np.diff(log_a) > 0)


ORDERS = (1.5, 2.0, 3.0, 4.5, 8.0, 16.0, 64.0)
BATCHES = [(0.5, 10), (1.0, 10), (2.0, 100), (5.0, 100), (3.0, 500)]


@pytest.mark.parametrize(("sigma", "batch"), BATCHES)
def test_divergences_without_replacement_lie_between_a_pair_and_dp_accountings_bound(sigma, batch):
    """Where all others are at -C and one moves from -C to C, the sum moves by 2 C if it is drawn.

    That is Poisson sampling's pair with noise relative to 2 C. dp-accounting's bound is relative to
    2 C too: taken with noise over C it would be below the pair for little noise.
    """
    relative = gaussian_step(2 * sigma, WithoutReplacement(batch, 1000)).noise_multiplier
    assert relative == sigma
    pair = divergences(sigma, Poisson(batch / 1000), ORDERS)
    ours = divergences(sigma, WithoutReplacement(batch, 1000), ORDERS)
    theirs = rdp.RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    theirs.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, batch, gaussian))
    assert np.all(pair <= ours * (1 + 1e-9)) and np.all(ours <= theirs.rdp * (1 + 1e-9))


@pytest.mark.parametrize(("sigma", "batch"), [(2.0, 10), (4.0, 100), (6.0, 500)])
def test_losses_without_replacement_bound_both_pairs_and_are_below_rdp(sigma, batch):
    """The pair above, and the one where all others are 0 and one moves from -C to C."""
    rate, steps, delta = batch / 1000, 50, 1e-5
    sampling = WithoutReplacement(batch, 1000)
    ours = composed(PldAccountant(), sigma, sampling, steps).epsilon(delta)
    pair = composed(PldAccountant(), sigma / 2, Poisson(rate), steps).epsilon(delta)
    loss = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
        value_discretization_interval=1e-3,
    )
    other_pair = loss.self_compose(steps).get_epsilon_for_delta(delta)
    assert max(pair, other_pair) * 0.999 < ours
    assert ours < composed(RdpAccountant(), sigma, sampling, steps).epsilon(delta)


def test_losses_of_several_kinds_compose_as_dp_accountings():
    runs = [(1.0, 0.01, 100), (1.5, 0.05, 30)]
    theirs, ours = (
        pld.PLDAccountant(value_discretization_interval=INTERVAL),
        PldAccountant(INTERVAL),
    )
    for sigma, rate, steps in runs:
        theirs.compose(poisson_event(sigma, rate, steps))
        composed(ours, sigma, Poisson(rate), steps)
    theirs.compose(dp_accounting.GaussianDpEvent(6.0), 2)
    composed(ours, 6.0, EveryRecord(), 2)
    assert ours.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-6)
