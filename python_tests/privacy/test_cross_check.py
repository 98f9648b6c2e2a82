"""dp-accounting's opinion of a whole history beside ours."""

from __future__ import annotations

import math

import pytest

from dpkernels.privacy import (
    EveryRecord,
    NotPrivate,
    Poisson,
    Shuffled,
    Statement,
    WithoutReplacement,
    gaussian_step,
)
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.cross_check import dp_accounting_epsilon

HISTORIES = {
    "poisson": [(gaussian_step(1.0, Poisson(0.01)), 300)],
    "noise and rate change": [
        (gaussian_step(1.0, Poisson(0.01)), 200),
        (gaussian_step(2.0, Poisson(0.05)), 50),
        (gaussian_step(8.0, EveryRecord()), 4),
    ],
    "shuffled": [(gaussian_step(4.0, Shuffled(10)), 25)],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_both_agree(history):
    ours = make_accountant("pld")
    for statement, steps in history:
        ours.compose(statement, steps)
    # Theirs is on a grid of 1e-4: each of n steps may be rounded up by half of it, at random.
    steps = sum(count for _, count in history)
    theirs = dp_accounting_epsilon(ours.history, 1e-5)
    assert theirs == pytest.approx(ours.epsilon(1e-5), rel=2e-3, abs=1e-4 * math.sqrt(steps))


def test_batches_without_replacement_are_bounded_from_above():
    statement = gaussian_step(4.0, WithoutReplacement(10, 1000))
    ours = make_accountant("pld")
    ours.compose(statement, 100)
    assert ours.epsilon(1e-5) <= dp_accounting_epsilon([(statement, 100)], 1e-5)


def test_what_has_no_epsilon_has_none_here():
    assert dp_accounting_epsilon([], 1e-5) == 0
    assert dp_accounting_epsilon([(gaussian_step(0.0, Poisson(0.1)), 1)], 1e-5) == math.inf
    step = gaussian_step(1.0, Poisson(0.1))
    void = Statement(step.queries, step.sampling, void="it looks at the data")
    with pytest.raises(NotPrivate, match="it looks at the data"):
        dp_accounting_epsilon([(void, 1)], 1e-5)
