"""The distinguishing audit stays below epsilon for the engine's steps, and above for broken ones.

At a confidence of 1 - 1e-6 the audits of sound steps, ten of them, give a wrong alarm for one in
100,000 sets of seeds; the seeds are fixed besides, so that every run is like the last.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dpkernels.privacy.audit import distinguishing_audit
from dpkernels.privacy.gaussian import gaussian_epsilon
from dpkernels.privacy.mechanism import EveryRecord, gaussian_step
from python_tests.privacy.audit import broken

CONFIDENCE = 1 - 1e-6
# Without assumptions the tail of a delta of 1e-5 is out of reach of so few trials.
DELTAS = {"gaussian": 1e-5, "nothing": 1e-2}
TRIALS = 800
# What so few trials without assumptions do not show: with 1000 to count, 2.1 of the true 6.0, where
# 2.3 are claimed.
SUBTLE = {broken.half_the_noise, broken.per_layer_with_noise_for_flat}


def claimed(delta):
    statement = gaussian_step(broken.SIGMA, EveryRecord())
    return gaussian_epsilon(delta, 1 / statement.noise_multiplier)


@cache
def recorded(make):
    release = make()
    return [release(trial % 2 == 1) for trial in range(2 * TRIALS)]


def audited(make, assumes):
    """Audit what was recorded, in the order in which the audit asks: without, with, without."""
    seen = iter(enumerate(recorded(make)))

    def replay(present):
        index, released = next(seen)
        assert present == (index % 2 == 1)
        return released

    return distinguishing_audit(
        replay, trials=TRIALS, delta=DELTAS[assumes], confidence=CONFIDENCE, assumes=assumes
    )


@pytest.mark.parametrize("assumes", ["gaussian", "nothing"])
@pytest.mark.parametrize("make", broken.SOUND)
def test_a_sound_step_stays_below_epsilon(make, assumes):
    result = audited(make, assumes)
    assert not result.contradicts(claimed(DELTAS[assumes]))
    if assumes == "gaussian":
        # mu is 1. Of 400 trials each, chi-square takes 12% off the estimate and the difference of
        # means 4.89 sqrt(2/400) = 0.35, which leaves 0.53, give or take 0.07; epsilon / 4 is where
        # 0.29 is left, 3 of them away. (The seeds are fixed.)
        assert result.epsilon_lower > claimed(1e-5) / 4


@pytest.mark.parametrize("make", broken.BROKEN)
def test_a_broken_step_is_caught(make):
    assert audited(make, "gaussian").contradicts(claimed(DELTAS["gaussian"]))


@pytest.mark.parametrize("make", [make for make in broken.BROKEN if make not in SUBTLE])
def test_a_broken_step_is_caught_without_assumptions(make):
    assert audited(make, "nothing").contradicts(claimed(DELTAS["nothing"]))


@pytest.mark.parametrize(
    "make", [broken.each_microbatch_with_the_same_noise, broken.each_rank_with_the_same_seed]
)
def test_shared_noise_hides_from_who_sees_one_part(make):
    """It is the difference of the parts that gives the record away."""
    parts = torch.stack(recorded(make)).chunk(2, dim=1)

    def audit(seen):
        trials = iter(seen)
        return distinguishing_audit(
            lambda present: next(trials),
            trials=TRIALS,
            delta=1e-5,
            confidence=CONFIDENCE,
            assumes="gaussian",
        )

    assert not any(audit(part).contradicts(claimed(1e-5)) for part in parts)
    assert audit(parts[1] - parts[0]).contradicts(claimed(1e-5))
