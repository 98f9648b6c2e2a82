"""Noise that no generator draws: its mass is added to delta."""

from __future__ import annotations

import json
import math

import pytest
from scipy.stats import norm

from dpkernels.ops.noise import UNREACHABLE_MASS
from dpkernels.privacy import (
    EveryRecord,
    GaussianQuery,
    Poisson,
    Statement,
    WithoutReplacement,
    calibrate_noise_multiplier,
    gaussian_step,
    make_accountant,
)
from dpkernels.privacy.accountants import ACCOUNTANTS, Accountant
from dpkernels.privacy.calibration import UNREACHABLE
from dpkernels.privacy.mechanism import Sampling

DELTA = 1e-5
CASES: list[tuple[str, Sampling, int]] = [
    ("gaussian", EveryRecord(), 10),
    ("rdp", Poisson(0.01), 1000),
    ("pld", Poisson(0.01), 1000),
    ("pld", WithoutReplacement(10, 1000), 1000),
]


def spent(name: str, sampling: Sampling, steps: int, unreachable: float = 0.0) -> Accountant:
    """Return an accountant after equal steps with noise multiplier 4."""
    accountant = make_accountant(name)
    accountant.compose(gaussian_step(4.0, sampling, unreachable=unreachable), steps)
    return accountant


@pytest.mark.parametrize(("name", "sampling", "steps"), CASES)
def test_delta_grows_by_the_mass_of_both_data_sets(
    name: str, sampling: Sampling, steps: int
) -> None:
    exact, drawn = spent(name, sampling, steps), spent(name, sampling, steps, 1e-12)
    for epsilon in (0.0, 1.0, 5.0, 20.0):
        added = (1 + math.exp(epsilon)) * steps * 1e-12
        expected = min(1.0, exact.delta(epsilon) + added)
        assert drawn.delta(epsilon) == pytest.approx(expected, rel=1e-12)
    assert spent(name, sampling, steps, 1e-3).delta(800.0) == 1.0


@pytest.mark.parametrize(("name", "sampling", "steps"), CASES)
def test_epsilon_leaves_room_for_it(name: str, sampling: Sampling, steps: int) -> None:
    """From nothing to more than delta: epsilon grows, holds, and is infinite in the end."""
    exact = spent(name, sampling, steps).epsilon(DELTA)
    masses = [0.0, *(10.0**-k for k in range(24, 4, -1))]
    drawn = [spent(name, sampling, steps, mass) for mass in masses]
    epsilons = [accountant.epsilon(DELTA) for accountant in drawn]
    assert epsilons[0] == exact
    assert epsilons == sorted(epsilons) and epsilons[-1] == math.inf
    assert epsilons[1] == pytest.approx(exact, rel=1e-6)
    for accountant, epsilon in zip(drawn, epsilons, strict=True):
        if epsilon < math.inf:
            # Divergences give delta and epsilon by two bounds, which are not quite inverse.
            assert accountant.delta(epsilon) <= DELTA * (1 + (1e-9 if name != "rdp" else 1e-6))


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_rough_answers_allow_for_it_too(name: str) -> None:
    accountant = make_accountant(name)
    for _ in range(30):
        accountant.compose(gaussian_step(1.0, Poisson(0.01), unreachable=1e-15))
        exact = accountant.epsilon(DELTA)
        assert exact <= accountant.epsilon(DELTA, within=0.05) <= 1.05 * exact


def test_32_bit_uniforms_would_not_have_kept_to_delta() -> None:
    """One coordinate, moved by C = 2 standard deviations in one step in 1,000.

    An output beyond the neighbour's support shows the record. Its probability is part of delta.
    """
    sigma, rate, steps, delta = 0.5, 0.001, 20_000, 1e-5

    def shown(support: float) -> float:
        return rate * steps * norm.sf(support - 1 / sigma)

    before, now = (math.sqrt(2 * bits * math.log(2)) for bits in (33, 97))
    assert shown(before) == pytest.approx(1.9e-5, rel=0.02)
    assert shown(before) > delta
    assert shown(now) < 1e-19

    def epsilon(unreachable: float) -> float:
        accountant = make_accountant("pld")
        step = gaussian_step(sigma, Poisson(rate), unreachable=unreachable)
        accountant.compose(step, steps)
        return accountant.epsilon(delta)

    exact = epsilon(0.0)
    assert epsilon(2.0**-32) == math.inf
    for elements in (1, 10**6, 10**9):
        assert exact <= epsilon(elements * UNREACHABLE_MASS) <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_it_survives_json_and_old_histories_have_none(name: str) -> None:
    accountant = make_accountant(name)
    accountant.compose(gaussian_step(1.0, EveryRecord(), unreachable=1e-9), 3)
    state = json.loads(json.dumps(accountant.state_dict()))
    other = make_accountant(name)
    other.load_state_dict(state)
    assert other.history == accountant.history
    del state["history"][0][0]["queries"][0]["unreachable"]
    assert Statement.from_dict(state["history"][0][0]).unreachable == 0


def test_queries_add_up() -> None:
    queries = (GaussianQuery(1.0, 2.0, 1e-12), GaussianQuery(0.5, 3.0, 2e-12))
    assert Statement(queries, EveryRecord()).unreachable == pytest.approx(3e-12)


@pytest.mark.parametrize("mass", [-1e-9, 1.5, math.nan])
def test_what_is_no_probability_is_refused(mass: float) -> None:
    with pytest.raises(ValueError, match="unreachable must be a probability"):
        GaussianQuery(1.0, 1.0, mass)


def test_calibrated_noise_keeps_to_the_budget_with_the_noise_that_is_drawn() -> None:
    assert UNREACHABLE == 2**30 * UNREACHABLE_MASS
    steps, sampling = 500, Poisson(0.02)
    sigma = calibrate_noise_multiplier(2.0, DELTA, steps, sampling, accountant="rdp")
    for elements in (1, 10**6, 2**30):
        accountant = make_accountant("rdp")
        step = gaussian_step(sigma, sampling, unreachable=elements * UNREACHABLE_MASS)
        accountant.compose(step, steps)
        assert accountant.epsilon(DELTA) <= 2.0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_small_model_needs_no_more_noise_than_its_own_elements_ask_for(accountant: str) -> None:
    """At epsilon = 40, e^epsilon times the mass of 2^30 elements is more than delta."""
    steps, sampling, mass = 30, Poisson(0.2), 300 * UNREACHABLE_MASS
    arguments = (40.0, DELTA, steps, sampling)
    sigma = calibrate_noise_multiplier(*arguments, accountant=accountant, unreachable=mass)
    assert sigma < calibrate_noise_multiplier(*arguments, accountant=accountant)

    def epsilon(unreachable: float) -> float:
        spent = make_accountant(accountant)
        spent.compose(gaussian_step(sigma, sampling, unreachable=unreachable), steps)
        return spent.epsilon(DELTA)

    assert 0.99 * 40 <= epsilon(mass) <= 40
    assert epsilon(UNREACHABLE) == math.inf
