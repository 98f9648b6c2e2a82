"""What is returned keeps to the budget; a little less noise, or one step more, would not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.privacy import (
    EveryRecord,
    Poisson,
    Shuffled,
    WithoutReplacement,
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_steps,
)
from dpkernels.privacy.calibration import epsilon_after
from python_tests.hypothesis_profiles import examples


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


EPSILONS = logarithmic(0.05, 20.0)
DELTAS = logarithmic(1e-9, 1e-3)
STEPS = logarithmic(1, 1e5).map(round)
POISSON = logarithmic(1e-5, 1.0).map(lambda rate: Poisson(min(rate, 1.0)))
SHUFFLED = st.integers(1, 1000).map(Shuffled)
DRAWN = logarithmic(1, 1e4).map(lambda batch: WithoutReplacement(round(batch), 20_000))
UNSAMPLED = SHUFFLED | st.just(EveryRecord())


def check_noise(accountant, epsilon, delta, steps, sampling):
    sigma = calibrate_noise_multiplier(epsilon, delta, steps, sampling, accountant=accountant)

    def spent(noise):
        return epsilon_after(noise, delta, steps, sampling, accountant=accountant)

    assert spent(sigma) <= epsilon
    if sigma > 0.011:  # 0.01 is the least that is returned
        assert spent(0.98 * sigma) > epsilon


@examples(800)
@given(EPSILONS, DELTAS, STEPS, POISSON)
def test_noise_for_poisson_sampling_by_rdp(epsilon, delta, steps, sampling):
    check_noise("rdp", epsilon, delta, steps, sampling)


@examples(100)
@given(EPSILONS, DELTAS, STEPS, DRAWN | UNSAMPLED)
def test_noise_for_other_sampling_by_rdp(epsilon, delta, steps, sampling):
    check_noise("rdp", epsilon, delta, steps, sampling)


@examples(100)
@given(EPSILONS, DELTAS, STEPS, UNSAMPLED)
def test_noise_without_sampling_exactly(epsilon, delta, steps, sampling):
    check_noise("gaussian", epsilon, delta, steps, sampling)


@examples(30)
@given(EPSILONS, logarithmic(1e-7, 1e-3), logarithmic(1, 1e4).map(round), POISSON | DRAWN)
def test_noise_by_pld(epsilon, delta, steps, sampling):
    check_noise("pld", epsilon, delta, steps, sampling)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_noise_uses_the_budget_up(accountant):
    sigma = calibrate_noise_multiplier(2.0, 1e-5, 500, Poisson(0.02), accountant=accountant)
    spent = epsilon_after(sigma, 1e-5, 500, Poisson(0.02), accountant=accountant)
    assert 0.99 * 2.0 <= spent <= 2.0


@pytest.mark.parametrize(
    ("accountant", "sampling", "sigma"),
    [
        ("gaussian", EveryRecord(), 40.0),
        ("gaussian", Shuffled(7), 40.0),
        ("rdp", WithoutReplacement(10, 1000), 4.0),
        ("rdp", Poisson(0.01), 1.0),
        ("pld", Poisson(0.01), 1.0),
    ],
)
def test_one_step_more_is_too_much(accountant, sampling, sigma):
    steps = calibrate_steps(1.0, 1e-5, sigma, sampling, accountant=accountant)
    assert epsilon_after(sigma, 1e-5, steps, sampling, accountant=accountant) <= 1.0
    assert epsilon_after(sigma, 1e-5, steps + 1, sampling, accountant=accountant) > 1.0
    if isinstance(sampling, Shuffled):
        assert steps % sampling.batches == 0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_one_record_more_is_too_much(accountant):
    size = calibrate_batch_size(1.0, 1e-5, 1.0, 300, 50_000, accountant=accountant)

    def spent(batch):
        return epsilon_after(1.0, 1e-5, 300, Poisson(batch / 50_000), accountant=accountant)

    assert spent(size) <= 1.0 < spent(size + 1)


def test_a_batch_is_at_most_everybody():
    assert calibrate_batch_size(1.0, 1e-5, 100.0, 10, 300, accountant="rdp") == 300


def test_what_cannot_be_had_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="take a larger delta or epsilon"):
        # Of orders up to 4096, rdp gives log(1 / delta) / 4095 at least.
        calibrate_noise_multiplier(1e-3, 1e-9, 10, EveryRecord(), accountant="rdp")
    with pytest.raises(ValueError, match="one step spends more than epsilon"):
        calibrate_steps(1.0, 1e-5, 0.5, EveryRecord(), accountant="gaussian")
    with pytest.raises(ValueError, match="batches of one record of 10 spend more"):
        calibrate_batch_size(0.1, 1e-5, 1.0, 1000, 10, accountant="rdp")
    with pytest.raises(ValueError, match="any number of steps"):
        calibrate_steps(1.0, 1e-5, 1e9, EveryRecord(), accountant="gaussian")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1e-5, 10), "epsilon must be finite and > 0"),
        ((math.nan, 1e-5, 10), "epsilon must be finite and > 0"),
        ((math.inf, 1e-5, 10), "epsilon must be finite and > 0"),
        ((1.0, 0.0, 10), "delta must be in"),
        ((1.0, 1e-5, 0), "steps must be a whole number >= 1"),
        ((1.0, 1e-5, 2.0), "steps must be a whole number >= 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate_noise_multiplier(*arguments, Poisson(0.1), accountant="rdp")
    if "steps" not in message:
        with pytest.raises(ValueError, match=message):
            calibrate_steps(*arguments[:2], 1.0, Poisson(0.1), accountant="rdp")


@pytest.mark.parametrize("population", [0, -5, 10.0])
def test_a_population_that_is_no_count_is_refused(population):
    with pytest.raises(ValueError, match="population must be a whole number >= 1"):
        calibrate_batch_size(1.0, 1e-5, 1.0, 10, population, accountant="rdp")
