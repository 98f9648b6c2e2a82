"""One factor on the noise of a whole plan: it keeps to the budget, and a little less would not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.privacy import (
    EveryRecord,
    GaussianQuery,
    NotPrivate,
    Poisson,
    Shuffled,
    Statement,
    WithoutReplacement,
    calibrate_noise_multiplier,
    calibrate_noise_scale,
    calibrate_steps,
    epsilon_after,
    gaussian_step,
    make_accountant,
)
from dpkernels.privacy.calibration import UNREACHABLE
from dpkernels.privacy.gaussian import gaussian_epsilon
from python_tests.hypothesis_profiles import examples

DELTA = 1e-5


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def spent(planned, scale, delta, accountant):
    total = make_accountant(accountant)
    for statement, steps in planned:
        total.compose(statement.with_noise(scale), steps)
    return total.epsilon(delta)


def plans(samplings, **facts):
    query = st.builds(
        GaussianQuery, logarithmic(1e-4, 1e4), logarithmic(1e-3, 1e3), st.sampled_from([0.0, 1e-20])
    )
    queries = st.lists(query, min_size=1, max_size=3).map(tuple)
    statement = st.builds(
        Statement, queries, samplings, **{k: st.just(v) for k, v in facts.items()}
    )
    return st.lists(st.tuples(statement, st.integers(1, 500)), min_size=1, max_size=4)


SHUFFLED = st.integers(1, 50).map(Shuffled)
RATES = logarithmic(1e-3, 1.0).map(lambda rate: min(rate, 1.0))
DRAWN = st.integers(1, 100).map(lambda batch: WithoutReplacement(batch, 100))
EVERY = st.just(EveryRecord())
SEEN = {"adjacency": "replace-one", "unit": "user", "view": "each_upload"}
UNAMPLIFIED = (
    plans(EVERY)
    | plans(EVERY | SHUFFLED, adjacency="replace-one")
    | plans(EVERY | SHUFFLED | DRAWN | RATES.map(Poisson), **SEEN)
    | plans(EVERY | SHUFFLED | DRAWN | RATES.map(Poisson), sampled="clients")
)
AMPLIFIED = (
    plans(EVERY | RATES.map(Poisson))
    | plans(EVERY | SHUFFLED | DRAWN, adjacency="replace-one")
    | plans(EVERY | RATES.map(Poisson), unit="user")
)


def check_scale(accountant, epsilon, delta, planned):
    scale = calibrate_noise_scale(epsilon, delta, planned, accountant=accountant)
    assert spent(planned, scale, delta, accountant) <= epsilon
    least = min(statement.noise_multiplier for statement, _ in planned)
    if scale * least > 0.011:  # 0.01 is the least noise multiplier that is searched
        assert spent(planned, 0.98 * scale, delta, accountant) > epsilon


@examples(200)
@given(
    st.sampled_from(["gaussian", "pld", "rdp"]),
    logarithmic(0.05, 20.0),
    logarithmic(1e-9, 1e-3),
    UNAMPLIFIED,
)
def test_plans_without_amplification(accountant, epsilon, delta, planned):
    check_scale(accountant, epsilon, delta, planned)


@examples(100)
@given(logarithmic(0.05, 20.0), logarithmic(1e-9, 1e-3), AMPLIFIED)
def test_plans_with_amplification_by_rdp(epsilon, delta, planned):
    check_scale("rdp", epsilon, delta, planned)


@examples(12)
@given(logarithmic(0.1, 10.0), logarithmic(1e-7, 1e-3), AMPLIFIED.map(lambda plan: plan[:2]))
def test_plans_with_amplification_by_pld(epsilon, delta, planned):
    check_scale("pld", epsilon, delta, planned)


@pytest.mark.parametrize("accountant", ["gaussian", "pld", "rdp"])
def test_a_covariance_and_rounds_share_the_budget_as_planned(accountant):
    """mu^2 = 1/4 + 70/400 in the plan's own noise; the factor brings it to the budget's."""
    facts = {"adjacency": "replace-one", "view": "each_upload"}
    planned = [
        (Statement((GaussianQuery(2.0, 4.0),), EveryRecord(), **facts), 1),
        (Statement((GaussianQuery(0.2, 4.0),), EveryRecord(), **facts), 70),
    ]
    scale = calibrate_noise_scale(1.0, DELTA, planned, accountant=accountant)
    reached = gaussian_epsilon(DELTA, math.sqrt(1 / 4 + 70 / 400) / scale)
    assert reached <= 1.0
    if accountant != "rdp":
        assert reached >= 0.99


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_factor_is_relative_to_the_noise_of_the_plan(scale):
    planned = [(gaussian_step(3.0, EveryRecord()), 10), (gaussian_step(1.0, EveryRecord()), 1)]
    scaled = [(statement.with_noise(scale), steps) for statement, steps in planned]
    one, other = (calibrate_noise_scale(0.5, DELTA, plan) for plan in (planned, scaled))
    assert scale * other == pytest.approx(one, rel=1e-3)


def test_one_kind_of_step_has_its_noise_multiplier_as_factor():
    for sampling in (Poisson(0.02), WithoutReplacement(20, 1000), Shuffled(7)):
        sigma = calibrate_noise_multiplier(2.0, DELTA, 100, sampling)
        step = gaussian_step(1.0, sampling, unreachable=UNREACHABLE)
        assert calibrate_noise_scale(2.0, DELTA, [(step, 100)]) == pytest.approx(sigma, rel=2e-3)


def test_noise_that_cannot_be_drawn_is_taken_as_planned():
    def scale(unreachable):
        step = gaussian_step(1.0, EveryRecord(), unreachable=unreachable)
        return calibrate_noise_scale(5.0, DELTA, [(step, 10)])

    assert scale(3e-9) > 1.005 * scale(0.0)
    with pytest.raises(ValueError, match=r"10 steps with EveryRecord\(\).*take a larger delta"):
        scale(1e-6)


STEP = gaussian_step(1.0, EveryRecord())
SILENT = Statement((GaussianQuery(1.0, 1.0), GaussianQuery(1.0, 0.0)), EveryRecord())
OTHER = gaussian_step(1.0, EveryRecord(), view="each_upload")


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        ([], "planned must name what is released"),
        ([(STEP, 1), (SILENT, 1)], "query 1 of statement 1 has no noise"),
        ([(STEP, 0)], "steps must be a whole number >= 1"),
        ([(STEP, 1), (OTHER, 1)], "view must be 'aggregate'"),
        ([(STEP, 1), (gaussian_step(1.0, Shuffled(3)), 1)], "adjacency must be 'add-remove'"),
    ],
)
def test_plans_that_have_no_factor_are_refused(planned, message):
    for accountant in ("pld", "rdp"):
        with pytest.raises(ValueError, match=message):
            calibrate_noise_scale(1.0, DELTA, planned, accountant=accountant)


def test_budgets_and_accountants_are_checked():
    with pytest.raises(ValueError, match="epsilon must be finite and > 0"):
        calibrate_noise_scale(0.0, DELTA, [(STEP, 1)])
    with pytest.raises(ValueError, match="delta must be in"):
        calibrate_noise_scale(1.0, 1.0, [(STEP, 1)])
    sampled = gaussian_step(1.0, Poisson(0.1))
    with pytest.raises(ValueError, match="mixture of Gaussians"):
        calibrate_noise_scale(1.0, DELTA, [(sampled, 1)], accountant="gaussian")
    void = Statement(STEP.queries, EveryRecord(), void="it looks at the data")
    with pytest.raises(NotPrivate, match="it looks at the data"):
        calibrate_noise_scale(1.0, DELTA, [(STEP, 1), (void, 1)])


def test_the_facts_of_a_step_change_what_its_noise_is_worth():
    def sigma(sampling, **facts):
        return calibrate_noise_multiplier(2.0, DELTA, 50, sampling, **facts)

    # Replacing one moves the sum twice as far.
    twice = sigma(EveryRecord(), adjacency="replace-one")
    assert twice == pytest.approx(2 * sigma(EveryRecord()), rel=2e-3)
    # Clients drawn in sight, or for a record: as if all took part.
    assert sigma(Poisson(0.1), unit="user", view="each_upload") == pytest.approx(twice, rel=2e-3)
    assert sigma(Poisson(0.1), sampled="clients") == sigma(EveryRecord())
    assert sigma(Poisson(0.1), unit="user") < 0.5 * sigma(EveryRecord())
    with pytest.raises(ValueError, match="Poisson sampling is accounted under add-remove"):
        sigma(Poisson(0.1), adjacency="replace-one")


@pytest.mark.parametrize(
    ("sampling", "facts"),
    [
        (EveryRecord(), {"adjacency": "replace-one"}),
        (Poisson(0.1), {"unit": "user", "view": "each_upload"}),
        (Poisson(0.1), {"sampled": "clients"}),
        (WithoutReplacement(1, 10), {"sampled": "clients", "adjacency": "add-remove"}),
    ],
)
def test_steps_and_epsilon_know_the_facts(sampling, facts):
    step = gaussian_step(40.0, sampling, **facts)
    steps = calibrate_steps(1.0, DELTA, 40.0, sampling, **facts)
    mu = 1 / step.noise_multiplier
    assert gaussian_epsilon(DELTA, math.sqrt(steps) * mu) <= 1.0
    assert gaussian_epsilon(DELTA, math.sqrt(steps + 1) * mu) > 1.0
    epsilon = epsilon_after(40.0, DELTA, steps, sampling, accountant="pld", **facts)
    assert epsilon == pytest.approx(gaussian_epsilon(DELTA, math.sqrt(steps) * mu), rel=1e-5)
