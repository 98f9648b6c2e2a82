"""What accountants hold to, whichever it is: histories, refusals, monotony, rough answers."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from scipy.stats import norm

from dpkernels.privacy import (
    EveryRecord,
    GaussianQuery,
    NotPrivate,
    Poisson,
    Shuffled,
    Statement,
    WithoutReplacement,
    gaussian_step,
    make_accountant,
)
from dpkernels.privacy.accountants import ACCOUNTANTS, GaussianAccountant, RdpAccountant
from dpkernels.privacy.accountants.exposure import exposure
from dpkernels.privacy.accountants.pld import PldAccountant
from dpkernels.privacy.accountants.privacy_loss import compose
from dpkernels.privacy.gaussian import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
SAMPLED = (Poisson(0.02), WithoutReplacement(20, 1000))
BOTH = list(itertools.product(["rdp", "pld"], SAMPLED))


def spent(name, *runs):
    accountant = make_accountant(name)
    for statement, steps in runs:
        accountant.compose(statement, steps)
    return accountant


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_nothing_released_costs_nothing(name):
    accountant = spent(name, (gaussian_step(1.0, EveryRecord()), 0))
    assert accountant.epsilon(DELTA) == 0 and accountant.delta(1.0) == 0
    assert accountant.steps == 0 and accountant.history == []


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("sampling", [EveryRecord(), Shuffled(10)])
def test_a_release_without_noise_costs_everything(name, sampling):
    accountant = spent(name, (gaussian_step(0.0, sampling), 1))
    assert accountant.epsilon(DELTA) == math.inf and accountant.delta(1.0) == 1


@pytest.mark.parametrize("name", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", SAMPLED)
def test_a_sampled_release_without_noise_costs_everything(name, sampling):
    runs = [(gaussian_step(1.0, sampling), 3), (gaussian_step(0.0, sampling), 1)]
    assert spent(name, *runs).epsilon(DELTA) == math.inf


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_equal_steps_make_one_run(name):
    first, second = (gaussian_step(sigma, EveryRecord()) for sigma in (1.0, 2.0))
    accountant = spent(name, (first, 1), (first, 2), (second, 1), (first, 1))
    assert accountant.history == [(first, 3), (second, 1), (first, 1)]
    assert accountant.steps == 5


@pytest.mark.parametrize(("name", "sampling"), BOTH)
def test_the_order_of_steps_does_not_matter(name, sampling):
    one, other = (gaussian_step(sigma, sampling) for sigma in (1.0, 1.7))
    sorted_ = spent(name, (one, 20), (other, 30)).epsilon(DELTA)
    mixed = spent(name, (other, 10), (one, 20), (other, 20)).epsilon(DELTA)
    assert mixed == pytest.approx(sorted_, rel=1e-12)


@pytest.mark.parametrize(("name", "sampling"), BOTH)
def test_epsilon_is_that_of_delta(name, sampling):
    accountant = spent(name, (gaussian_step(1.0, sampling), 100))
    epsilon = accountant.epsilon(DELTA)
    # The way back goes through sums of up to 1e6 masses that are right to 1e-16.
    assert accountant.delta(epsilon) == pytest.approx(DELTA, rel=1e-6)
    assert accountant.delta(epsilon * 1.001) < DELTA < accountant.delta(epsilon * 0.999)


@pytest.mark.parametrize(("name", "sampling"), BOTH)
def test_more_steps_and_less_noise_cost_more(name, sampling):
    def epsilon(sigma, steps):
        return spent(name, (gaussian_step(sigma, sampling), steps)).epsilon(DELTA)

    assert epsilon(1.0, 100) < epsilon(1.0, 101) < epsilon(0.99, 101)


@pytest.mark.parametrize("name", ["rdp", "pld"])
@pytest.mark.parametrize(
    ("sampled", "whole"),
    [(Poisson(0.5), Poisson(1.0)), (WithoutReplacement(5, 10), WithoutReplacement(10, 10))],
)
def test_sampling_is_worth_something_and_at_rate_one_nothing(name, sampled, whole):
    adjacency = gaussian_step(1.0, whole).adjacency
    everything = gaussian_step(3.0, EveryRecord(), adjacency=adjacency)
    at_one = spent(name, (gaussian_step(3.0, whole), 10)).epsilon(DELTA)
    assert at_one == spent(name, (everything, 10)).epsilon(DELTA)
    assert spent(name, (gaussian_step(3.0, sampled), 10)).epsilon(DELTA) < at_one


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (10, 1), (11, 2), (30, 3), (31, 4)])
def test_shuffled_epochs_cost_what_steps_on_everything_cost(name, steps, epochs):
    shuffled = spent(name, (gaussian_step(2.0, Shuffled(10)), steps))
    every = gaussian_step(2.0, EveryRecord(), adjacency="replace-one")
    assert shuffled.epsilon(DELTA) == spent(name, (every, epochs)).epsilon(DELTA)


def test_an_epoch_of_changing_noise_costs_its_worst_step():
    """Two steps on both sides of an epoch's end may have the same record: each epoch counts."""
    quiet, loud = (gaussian_step(sigma, Shuffled(10)) for sigma in (1.0, 4.0))
    # Epoch 1: 9 loud steps and a quiet one. Epoch 2: 3 quiet ones, 7 loud ones.
    accountant = spent("gaussian", (loud, 9), (quiet, 4), (loud, 7))
    every = gaussian_step(1.0, EveryRecord(), adjacency="replace-one")
    assert accountant.epsilon(DELTA) == spent("gaussian", (every, 2)).epsilon(DELTA)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_gaussian_epsilon_is_the_hockey_stick_rounded_up(mu, delta):
    epsilon = gaussian_epsilon(delta, mu)
    assert gaussian_delta(epsilon, mu) <= delta
    if epsilon:
        assert gaussian_delta(epsilon * (1 - 1e-6), mu) > delta


def test_gaussian_delta_is_that_of_the_formula():
    sigmas = (2.0, 3.0, 5.0)
    accountant = spent("gaussian", *((gaussian_step(s, EveryRecord()), 2) for s in sigmas))
    mu = math.sqrt(sum(2 / s**2 for s in sigmas))
    a, b = mu / 2 - 1 / mu, -mu / 2 - 1 / mu
    # Rounded up by at most 2^-48 of each of two numbers of order 1.
    formula = norm.cdf(a) - math.e * norm.cdf(b)
    assert formula <= accountant.delta(1.0) <= formula + 2**-47


@pytest.mark.parametrize("sampling", SAMPLED)
def test_the_gaussian_accountant_refuses_amplification(sampling):
    with pytest.raises(ValueError, match="mixture of Gaussians; take the pld or rdp"):
        GaussianAccountant().compose(gaussian_step(1.0, sampling))


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_two_adjacencies_or_units_are_refused(name):
    accountant = spent(name, (gaussian_step(1.0, EveryRecord()), 1))
    with pytest.raises(ValueError, match="adjacency must be 'add-remove'"):
        accountant.compose(gaussian_step(1.0, Shuffled(3)))
    with pytest.raises(ValueError, match="unit must be 'record'"):
        accountant.compose(Statement((GaussianQuery(1.0, 1.0),), EveryRecord(), unit="user"))
    assert accountant.steps == 1


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_two_views_are_refused_however_they_come(name):
    query = (GaussianQuery(1.0, 1.0),)
    one, other = (Statement(query, EveryRecord(), view=v) for v in ("aggregate", "each_upload"))
    message = "view must be 'aggregate', as in the history, got 'each_upload'; keep an accountant"
    accountant = spent(name, (one, 2))
    with pytest.raises(ValueError, match=message):
        accountant.compose(other)
    with pytest.raises(ValueError, match=message):
        accountant.compose(other, 0)
    with pytest.raises(ValueError, match=message):
        accountant.replace([(one, 1), (other, 1)])
    with pytest.raises(ValueError, match="view must be 'each_upload'"):
        accountant.load_state_dict(spent(name, (other, 1)).state_dict())
    assert accountant.history == [(one, 2)]


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_a_void_statement_has_no_epsilon_and_says_why(name):
    void = Statement((GaussianQuery(1.0, 1.0),), EveryRecord(), void="the seed is fixed")
    accountant = spent(name, (gaussian_step(1.0, EveryRecord()), 1), (void, 1))
    for ask in (lambda: accountant.epsilon(DELTA), lambda: accountant.delta(1.0)):
        with pytest.raises(NotPrivate, match="the seed is fixed"):
            ask()


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_a_history_survives_json(name):
    runs = [(gaussian_step(sigma, Shuffled(4)), 3) for sigma in (1.0, 2.0)]
    accountant = spent(name, *runs)
    accountant.epsilon(DELTA, within=0.1)
    other = make_accountant(name)
    other.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert other.history == runs
    assert other.epsilon(DELTA, within=0.1) == accountant.epsilon(DELTA)


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_going_back_does_not_take_back_what_was_released(name):
    first, second = (gaussian_step(sigma, Poisson(0.1)) for sigma in (1.0, 2.0))
    accountant = spent(name, (first, 3), (second, 2))
    accountant.epsilon(DELTA, within=0.1)
    for earlier in ([(first, 2)], [(first, 3)], [(first, 3), (second, 1)], []):
        accountant.load_state_dict(spent(name, *earlier).state_dict())
        assert accountant.history == [(first, 3), (second, 2)]
    # Of another run: both have been released.
    accountant.load_state_dict(spent(name, (second, 4)).state_dict())
    assert accountant.history == [(second, 4), (first, 3), (second, 2)]
    exact = spent(name, (second, 6), (first, 3)).epsilon(DELTA)
    assert accountant.epsilon(DELTA, within=0.1) == pytest.approx(exact, rel=1e-9)


def test_a_history_is_replaced_where_that_is_said():
    accountant = spent("rdp", (gaussian_step(1.0, Poisson(0.1)), 3))
    accountant.replace([])
    assert accountant.epsilon(DELTA) == 0


def test_epochs_of_different_runs_are_counted_apart():
    each = [gaussian_step(2.0, Shuffled(4, run=name)) for name in "abcd"]
    apart = spent("gaussian", *((statement, 1) for statement in each))
    assert apart.epsilon(DELTA) == spent("gaussian", (each[0], 16)).epsilon(DELTA)
    assert apart.epsilon(DELTA) > spent("gaussian", (each[0], 4)).epsilon(DELTA)


@pytest.mark.parametrize(("name", "before"), [("rdp", 5000), ("pld", 3000)])
def test_a_rough_epsilon_where_it_hardly_grows_any_more(name, before):
    accountant = spent(name, (gaussian_step(1.0, Poisson(0.01)), before))
    for _ in range(6):
        accountant.compose(gaussian_step(3.0, Poisson(0.01)))
        rough = accountant.epsilon(DELTA, within=0.02)
        assert accountant.epsilon(DELTA) <= rough <= 1.02 * accountant.epsilon(DELTA)


def test_one_release_to_all_beside_rare_samples_does_not_ask_for_a_finer_grid_than_allowed():
    exposed = exposure(
        [(gaussian_step(1.0, EveryRecord()), 1), (gaussian_step(1.0, Poisson(1e-6)), 1000)]
    )
    for parts in PldAccountant()._parts(exposed):
        assert len(compose(parts).masses) <= 4 * (1 << 18)


@pytest.mark.parametrize("name", ["rdp", "pld"])
@pytest.mark.parametrize("within", [0.02, 0.2])
def test_a_rough_epsilon_is_never_too_small_nor_more_than_allowed_too_large(name, within):
    """Also where the noise changes, and where steps were skipped."""
    accountant = make_accountant(name)
    for sigma, strides in [(1.0, [1] * 60), (0.8, [1] * 30), (1.2, [1, 7, 1, 40, 1])]:
        for stride in strides:
            accountant.compose(gaussian_step(sigma, Poisson(0.05)), stride)
            exact, rough = accountant.epsilon(DELTA), accountant.epsilon(DELTA, within=within)
            assert exact <= rough <= (1 + within) * exact


def test_a_rough_epsilon_is_computed_at_few_steps(monkeypatch):
    """It grows like the root of steps: by 2% in 4% of them, 120 times from 20 steps to 2,000."""
    computed = []
    exact = RdpAccountant._epsilon_of
    monkeypatch.setattr(
        RdpAccountant, "_epsilon_of", lambda *args: computed.append(1) or exact(*args)
    )
    accountant = make_accountant("rdp")
    for _ in range(2000):
        accountant.compose(gaussian_step(1.0, Poisson(0.05)))
        accountant.epsilon(DELTA, within=0.02)
    assert len(computed) < 200


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, math.inf])
def test_delta_out_of_range_is_refused(name, delta):
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\)"):
        make_accountant(name).epsilon(delta)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
def test_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be finite and >= 0"):
        make_accountant("rdp").delta(epsilon)


@pytest.mark.parametrize("steps", [-1, 1.5, "3", True])
def test_steps_that_are_no_count_are_refused(steps):
    with pytest.raises(ValueError, match="steps must be a whole number >= 0"):
        make_accountant("rdp").compose(gaussian_step(1.0, Poisson(0.1)), steps)


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf])
def test_noise_out_of_range_is_refused(sigma):
    with pytest.raises(ValueError, match="noise_multiplier must be finite and >= 0"):
        gaussian_step(sigma, EveryRecord())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(1.2), "rate must be in"),
        (lambda: Poisson(math.nan), "rate must be in"),
        (lambda: Poisson(0.0), "rate must be in"),
        (lambda: WithoutReplacement(11, 10), "batch must be a whole number from 1"),
        (lambda: WithoutReplacement(0.5, 10), "batch must be a whole number from 1"),
        (lambda: Shuffled(0), "batches must be a whole number"),
        (lambda: Shuffled(2.5), "batches must be a whole number"),
        (lambda: make_accountant("moments"), "gaussian, rdp, pld, got 'moments'"),
        (lambda: make_accountant("rdp").epsilon(DELTA, within=1.0), "within must be in"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
