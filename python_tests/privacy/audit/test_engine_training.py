"""The audit of one run, on a whole private training and on broken ones.

Coins and noise are seeded, so that what holds once holds always; the confidence is 0.99. With 200
canaries no bound can be above 3.5, so that epsilon is chosen as 2 and 1.4. What stays hidden at
that size: half of the noise (the bound is then 0.6 of 2) and a quarter of it (1.8); those, and the
other mistakes of a single step, are the distinguishing audit's.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dpkernels.privacy.audit import one_run_audit
from dpkernels.privacy.gaussian import gaussian_epsilon
from python_tests.privacy.audit.training import CANARIES, STEPS, Run

DELTA = 1e-5
SIGMA = 8.0


def audited(train_and_score):
    return one_run_audit(
        train_and_score,
        canaries=CANARIES,
        delta=DELTA,
        confidence=0.99,
        generator=torch.Generator().manual_seed(0),
    )


def claimed(sigma, steps=STEPS):
    """Return epsilon for a canary that is in so many steps, all of which are seen."""
    return gaussian_epsilon(DELTA, math.sqrt(steps) / sigma)


@pytest.mark.parametrize("sigma", [SIGMA, 2.0, 1.0])
def test_the_engine_stays_below_epsilon(sigma):
    assert not audited(Run(sigma).score_of_the_model).contradicts(claimed(sigma))


def test_canaries_are_found_where_epsilon_is_large():
    """Or the audit would find nothing anywhere. 100 guesses, all right, show 2.75."""
    assert audited(Run(1.0).score_of_the_model).epsilon_lower > 2


@pytest.mark.parametrize("run", [{"actual_sigma": 0.0}, {"clip": False}], ids=str)
def test_training_without_noise_or_clipping_is_caught(run):
    assert audited(Run(SIGMA, **run).score_of_the_model).contradicts(claimed(SIGMA))


def test_noise_that_is_the_same_in_every_step_is_caught():
    sound, repeated = (
        audited(partial(Run(SIGMA).score_of_the_gradients, same_noise=same))
        for same in (False, True)
    )
    assert not sound.contradicts(claimed(SIGMA, STEPS // 2))
    assert repeated.contradicts(claimed(SIGMA, STEPS // 2))
