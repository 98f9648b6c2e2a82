"""The bound from counts of correct guesses: exact where it is known, and honest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from dpkernels.privacy.audit import epsilon_lower_bound, loss_decrease, one_run_audit


def theorem(m, r, v, epsilon, delta):
    """Return the probability in the theorem, summed term by term."""
    q = math.exp(epsilon) / (math.exp(epsilon) + 1)
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    worst = max((math.fsum(mass[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return math.fsum(mass[v:]) + 2 * m * delta * worst


@given(data=st.data(), confidence=st.sampled_from([0.9, 0.99]))
def test_the_bound_is_where_the_theorem_says(data, confidence):
    m = data.draw(st.integers(1, 60))
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(r // 2, r))
    delta = data.draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.5 / m]))
    bound = epsilon_lower_bound(m, r, v, delta, confidence)
    # The p-value is raised by 1e-9, which moves epsilon by less than 1e-6 for these counts.
    if bound > 0:
        assert theorem(m, r, v, bound, delta) <= 1 - confidence
    assert theorem(m, r, v, bound + 1e-6, delta) > 1 - confidence


def test_the_example_of_the_paper():
    """Appendix D: 75 of 100 guesses about 1000 canaries show 0.673, as printed."""
    assert round(epsilon_lower_bound(1000, 100, 75, 1e-4, 0.95), 3) == 0.673


def test_all_guesses_right_without_delta_has_a_closed_form():
    for guesses in (1, 20, 5000):
        rate = 0.05 ** (1 / guesses)
        expected = max(0.0, math.log(rate / (1 - rate)))
        found = epsilon_lower_bound(5000, guesses, guesses, 0.0, 0.95)
        assert found <= expected
        assert math.isclose(found, expected, rel_tol=1e-6)


@given(correct=st.integers(1, 80), delta=st.sampled_from([0.0, 1e-5, 1e-3]))
def test_more_correct_guesses_and_smaller_delta_show_more(correct, delta):
    bound = epsilon_lower_bound(100, 80, correct, delta, 0.95)
    assert bound >= epsilon_lower_bound(100, 80, correct - 1, delta, 0.95)
    assert bound >= epsilon_lower_bound(100, 80, correct, delta + 1e-3, 0.95)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("reveals", ["nothing", "a coin", "all coins"])
def test_a_private_mechanism_is_accused_as_rarely_as_is_said(epsilon, reveals):
    """Randomised response, which with probability delta gives a coin, or all of them, away."""
    m, delta, confidence = 50, 1e-3, 0.9
    rate = 1 / (1 + math.exp(-epsilon))
    if reveals == "a coin":
        rate = delta + (1 - delta) * rate
    chance = binom.pmf(np.arange(m + 1), m, rate)
    if reveals == "all coins":
        chance *= 1 - delta
        chance[m] += delta
    accused = [epsilon_lower_bound(m, m, v, delta, confidence) > epsilon for v in range(m + 1)]
    assert any(accused)
    assert chance[accused].sum() <= 1 - confidence


def test_choosing_the_best_number_of_guesses_is_paid_for():
    """Scores that know nothing: any bound above 0 is a wrong alarm."""
    generator = torch.Generator().manual_seed(0)
    alarms = sum(
        one_run_audit(
            lambda included: torch.rand(len(included), generator=generator),
            canaries=96,
            delta=0.0,
            confidence=0.8,
            guesses=range(2, 97, 2),
            generator=generator,
        ).epsilon_lower
        > 0
        for _ in range(200)
    )
    assert alarms <= binom.ppf(1 - 1e-6, 200, 0.2)


def test_guesses_go_to_the_ends_of_the_scores():
    coins = []

    def train_and_score(included):
        coins.append(included)
        scores = included.double()
        scores[50:] *= -1  # the other half is scored wrongly, but is nearer to the middle
        scores[:50] = 2 * scores[:50] - 1
        return scores * torch.cat([torch.full((50,), 9.0), torch.ones(50)])

    result = one_run_audit(
        train_and_score,
        canaries=100,
        delta=1e-5,
        guesses=20,
        generator=torch.Generator().manual_seed(0),
    )
    assert (result.canaries, result.guesses, result.correct) == (100, 20, 20)
    assert 30 < int(coins[0].sum()) < 70  # fair coins: 4 deviations to both sides
    assert result.epsilon_lower == epsilon_lower_bound(100, 20, 20, 1e-5, 0.95)


def test_what_train_and_score_does_to_the_coins_does_not_count():
    def cheat(included):
        included.fill_(True)
        return torch.zeros(len(included))

    result = one_run_audit(cheat, canaries=1000, delta=0.0, guesses=1000)
    assert result.correct < 1000


def test_loss_decrease_is_higher_for_what_was_learnt():
    inputs, labels = torch.eye(3), torch.tensor([0, 1, 1])
    before, after = torch.zeros(3, 2), torch.tensor([[2.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    scores = loss_decrease(lambda x: x @ before, lambda x: x @ after, inputs, labels)
    assert scores[0] > scores[1] == 0 > scores[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11, 5, 0.0, 0.9), "correct <= guesses <= canaries"),
        ((10, 5, 6, 0.0, 0.9), "correct <= guesses <= canaries"),
        ((10, 0, 0, 0.0, 0.9), "guesses >= 1"),
        ((10, 5, 5, math.nan, 0.9), "delta must be in"),
        ((10, 5, 5, 0.06, 0.9), r"at most 1 / \(2 canaries\) = 0.05"),
        ((10, 5, 5, 0.0, 1.0), "confidence must be in"),
    ],
)
def test_bad_counts_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bound(*arguments)


@pytest.mark.parametrize(
    ("options", "scores", "message"),
    [
        ({"canaries": 0}, torch.zeros, "canaries must be >= 1"),
        ({"guesses": 11}, torch.zeros, "guesses must be from 1"),
        ({"guesses": []}, torch.zeros, "guesses must be from 1"),
        ({}, lambda m: torch.zeros(m + 1), r"got shape \[11\]"),
        ({}, lambda m: torch.full((m,), math.nan), "10 of them not finite"),
    ],
)
def test_bad_input_of_the_audit_is_named(options, scores, message):
    with pytest.raises(ValueError, match=message):
        one_run_audit(
            lambda included: scores(len(included)), **({"canaries": 10, "delta": 0.0} | options)
        )


def test_bad_numbers_are_refused_before_the_training():
    def train_and_score(included):
        pytest.fail("trained")

    with pytest.raises(ValueError, match="delta"):
        one_run_audit(train_and_score, canaries=10, delta=-1.0)
