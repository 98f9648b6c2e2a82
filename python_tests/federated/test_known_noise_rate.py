"""The rate that follows from the noise, and a federation with a given noise multiplier."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dpkernels.federated import Seen, UDPFedAvg
from dpkernels.federated.release import spent_by_all
from python_tests.federated.cases import federation, finish, network, terms


def held_and_told(rounds=6):
    held = network()
    return held, replace(terms(held, "user"), rounds=rounds, layers=held.layers)


def noise_of_all_rounds(algorithm, told, theta, std, draws=200):
    """Return the mean norm of theta's noise after all rounds of means that are noise alone."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(draws):
        state = algorithm.server_start(told, theta)
        for _ in range(told.rounds):
            noise = std * torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
            state = algorithm.server(algorithm.stages(told)[0], told, state, Seen(noise, std))
        total += float((state["theta"] - theta).norm()) / draws
    return total


@pytest.mark.parametrize("settings", [{}, {"decay": 0.7}, {"noise_length": 0.5}])
@pytest.mark.parametrize("rounds", [1, 25])
def test_the_noise_of_all_rounds_is_as_long_as_was_asked_for(settings, rounds):
    held, told = held_and_told(rounds)
    theta = held.initial()
    algorithm = UDPFedAvg(**settings)
    found = noise_of_all_rounds(algorithm, told, theta, std=3.0)
    wanted = algorithm.noise_length * float(theta.norm())
    assert found == pytest.approx(wanted, rel=0.05)


def test_with_momentum_it_is_at_most_that():
    held, told = held_and_told(40)
    theta = held.initial()
    algorithm = UDPFedAvg(momentum=0.5)
    found = noise_of_all_rounds(algorithm, told, theta, std=3.0)
    wanted = algorithm.noise_length * float(theta.norm())
    assert 0.9 * wanted < found <= wanted


@pytest.mark.parametrize("std", [0.0, 1e-9])
def test_little_noise_takes_the_whole_mean(std):
    held, told = held_and_told()
    theta = held.initial()
    algorithm = UDPFedAvg()
    mean = torch.ones_like(theta)
    state = algorithm.server_start(told, theta)
    after = algorithm.server(algorithm.stages(told)[0], told, state, Seen(mean, std))
    assert torch.equal(after["theta"], theta + mean)


def test_a_first_model_of_zeros_asks_for_a_rate():
    held, told = held_and_told()
    zeros = torch.zeros_like(held.initial())
    with pytest.raises(ValueError, match="all zeros; pass lr"):
        UDPFedAvg().server_start(told, zeros)
    UDPFedAvg(lr=0.1).server_start(told, zeros)


def test_shrinking_has_a_rate_of_one_and_a_given_rate_is_taken():
    held, told = held_and_told()
    theta = held.initial()
    mean, std = torch.full_like(theta, 100.0), 1e-3
    for algorithm, rate in ((UDPFedAvg(shrink="energy"), 1.0), (UDPFedAvg(lr=0.25), 0.25)):
        state = algorithm.server_start(told, theta)
        after = algorithm.server(algorithm.stages(told)[0], told, state, Seen(mean, std))
        assert torch.allclose(after["theta"] - theta, rate * mean, rtol=1e-4)


def test_a_noise_multiplier_is_the_one_that_is_added_and_accounted():
    held, told = held_and_told(5)
    run = federation(UDPFedAvg(), held, told, epsilon=None, noise_multiplier=4.0)
    assert set(run.multipliers.values()) == {4.0}
    planned = spent_by_all(run.release, run.stages, 4.0, run.delta, "gaussian")
    finish(run)
    assert run.epsilon() == pytest.approx(planned) == pytest.approx(run.epsilon_target)
    budget = federation(UDPFedAvg(), held, told, epsilon=planned)
    assert budget.multipliers["update"] == pytest.approx(4.0, rel=1e-3)
    assert budget.multipliers["update"] >= 4.0 * (1 - 1e-6)


@pytest.mark.parametrize(
    ("epsilon", "multiplier", "message"),
    [(1.0, 2.0, "exclude each other"), (None, 0.0, "noise_multiplier"), (None, math.nan, "finite")],
)
def test_what_does_not_go_together_is_refused(epsilon, multiplier, message):
    held, told = held_and_told()
    with pytest.raises(ValueError, match=message):
        federation(UDPFedAvg(), held, told, epsilon=epsilon, noise_multiplier=multiplier)
