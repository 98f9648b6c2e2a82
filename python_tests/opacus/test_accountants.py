"""Accountants under Opacus' names give upper bounds of epsilon, and no worse ones than Opacus."""

from __future__ import annotations

import math
import warnings

import pytest

from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.accountants import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    register_accountant,
    registry,
)
from dpkernels.opacus.accountants.utils import get_noise_multiplier
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.calibration import UNREACHABLE
from dpkernels.privacy.mechanism import Poisson, gaussian_step
from python_tests.opacus.small import made, train
from python_tests.optional_packages import optional_package

DELTA = 1e-5


def stepped(accountant, *runs):
    for noise_multiplier, rate, steps in runs:
        for _ in range(steps):
            accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
    return accountant


RUNS = [(1.0, 0.01, 30), (0.8, 0.02, 10)]


@pytest.mark.parametrize(("kind", "name"), [(RDPAccountant, "rdp"), (PRVAccountant, "pld")])
def test_epsilon_is_that_of_the_accountant_behind_it(kind, name):
    wanted = make_accountant(name)
    for noise_multiplier, rate, steps in RUNS:
        step = gaussian_step(noise_multiplier, Poisson(rate), unreachable=UNREACHABLE)
        wanted.compose(step, steps)
    accountant = stepped(kind(), *RUNS)
    assert accountant.get_epsilon(delta=DELTA) == wanted.epsilon(DELTA)
    assert accountant.history == RUNS and len(accountant) == len(RUNS)
    again = kind()
    again.history = RUNS
    assert again.accountant.history == wanted.history


def test_renyi_epsilon_is_opacus_at_its_orders_and_no_larger_at_ours():
    theirs = optional_package("opacus.accountants").RDPAccountant
    ours, wanted = stepped(RDPAccountant(), *RUNS), stepped(theirs(), *RUNS)
    # Ours set 2^-20 of delta aside for noise that cannot be drawn, of which Opacus knows nothing.
    epsilon = wanted.get_epsilon(DELTA * (1 - 2**-20))
    # Series of orders that are not whole are broken off at terms of e^-30; 1000 of them a step.
    assert ours.get_epsilon(DELTA, alphas=theirs.DEFAULT_ALPHAS) == pytest.approx(
        epsilon, abs=40 * 1000 * math.exp(-30), rel=0
    )
    assert ours.get_epsilon(DELTA) <= epsilon + 40 * 1000 * math.exp(-30)


def test_privacy_loss_is_that_of_opacus_but_for_its_error():
    theirs = optional_package("opacus.accountants").PRVAccountant
    # Opacus' is above the truth by up to twice its eps_error, ours by less than one per cent.
    wanted = stepped(theirs(), *RUNS).get_epsilon(DELTA, eps_error=0.01)
    epsilon = stepped(PRVAccountant(), *RUNS).get_epsilon(DELTA, eps_error=0.01)
    assert wanted - 0.02 <= epsilon <= wanted * 1.01


def test_the_gaussian_accountant_refuses_sampling():
    with pytest.raises(ValueError, match="Poisson"):
        GaussianAccountant().step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.parametrize("mechanism", ["rdp", "prv"])
def test_a_state_comes_back(mechanism):
    accountant = stepped(create_accountant(mechanism), *RUNS)
    other = create_accountant(mechanism)
    other.load_state_dict(accountant.state_dict())
    assert other.history == RUNS
    assert other.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)


@pytest.mark.parametrize(("history", "warned"), [(RUNS, 1), ([], 0)])
def test_a_state_that_does_not_say_how_records_were_sampled_warns(history, warned):
    accountant = RDPAccountant()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accountant.load_state_dict({"history": history, "mechanism": "rdp"})
    assert accountant.history == history
    assert ["poisson_sampling=False" in str(one.message) for one in caught] == [True] * warned


def test_a_history_may_be_set():
    accountant = stepped(RDPAccountant(), (2.0, 0.1, 1))
    accountant.history = RUNS
    assert accountant.get_epsilon(DELTA) == stepped(RDPAccountant(), *RUNS).get_epsilon(DELTA)


@pytest.mark.parametrize("state", [{}, {"history": []}, {"mechanism": "rdp"}])
def test_a_state_that_lacks_something_is_refused(state):
    with pytest.raises(ValueError, match="state_dict must have"):
        RDPAccountant().load_state_dict(state)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_noise_for_a_budget_is_enough_and_not_more_than_opacus_takes(accountant):
    theirs = optional_package("opacus.accountants.utils")
    given = {"target_epsilon": 2.0, "target_delta": DELTA, "sample_rate": 0.02, "steps": 50}
    sigma = get_noise_multiplier(**given, accountant=accountant)
    spent = create_accountant(accountant)
    spent.history = [(sigma, 0.02, 50)]
    assert spent.get_epsilon(DELTA) <= 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sigma <= 1.01 * theirs.get_noise_multiplier(**given, accountant=accountant)


class Counter(IAccountant):
    """Counts steps, and calls that epsilon."""

    def __init__(self):
        self.history = []

    def step(self, *, noise_multiplier, sample_rate):
        self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta, **_):
        return float(len(self.history))

    def __len__(self):
        return len(self.history)

    @classmethod
    def mechanism(cls):
        return "counter"


def test_an_accountant_of_the_callers_is_told_of_every_step(monkeypatch):
    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    register_accountant("counter", Counter)
    engine = PrivacyEngine(accountant="counter")
    model, optimizer, loader = made(engine)
    train(model, optimizer, loader)
    assert engine.get_epsilon(DELTA) == len(loader) == optimizer.run.training.steps
    assert engine.accountant.history[0] == (1.0, 0.25, 1)
    with pytest.raises(ValueError, match="knows Poisson sampling only"):
        made(PrivacyEngine(accountant="counter"), poisson_sampling=False)
    with pytest.raises(ValueError, match="cannot be calibrated"):
        get_noise_multiplier(
            target_epsilon=1, target_delta=DELTA, sample_rate=0.1, steps=1, accountant="counter"
        )
