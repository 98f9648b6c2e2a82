"""The distinguishing audit on mechanisms whose epsilon is known."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom

from dpkernels.privacy.audit import distinguishing_audit
from dpkernels.privacy.audit.distinguish import _rates, fisher_direction, mu_below
from dpkernels.privacy.gaussian import gaussian_epsilon

SURE = 1 - 1e-6


def gaussian(size=1, shift=1.0, seed=0):
    """Return N(0, 1) in all coordinates, of which the first moves by ``shift`` with the record."""
    generator = torch.Generator().manual_seed(seed)

    def release(present):
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        noise[0] += shift * present
        return noise

    return release


def randomised_response(epsilon, seed=0):
    generator = torch.Generator().manual_seed(seed)
    truth = 1 / (1 + math.exp(-epsilon))

    def release(present):
        honest = float(torch.rand(1, generator=generator)) < truth
        return float(present == honest)

    return release


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("size", [1, 30])
def test_gaussian_noise_is_bounded_from_below_and_closely(shift, size):
    result = distinguishing_audit(
        gaussian(size, shift), trials=4000, delta=1e-5, confidence=SURE, assumes="gaussian"
    )
    assert not result.contradicts(gaussian_epsilon(1e-5, shift))
    # 2000 trials: 6% for the deviation, 2.5% for 30 coordinates at a shift of 0.5 (30/2000 of
    # noise beside 0.25/2 of signal, halved by the root), 4.89 sqrt(2/2000) for the difference and
    # 4 deviations, sqrt(2/2000), of luck.
    assert result.mu > 0.915 * shift - 8.89 * math.sqrt(2 / 2000)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomised_response_is_bounded_from_below_and_closely(epsilon):
    result = distinguishing_audit(
        randomised_response(epsilon), trials=4000, delta=0.0, confidence=SURE
    )
    assert not result.contradicts(epsilon)
    assert result.epsilon_lower > epsilon / 3


def test_wrong_alarms_are_as_rare_as_is_said():
    """200 audits of 40 trials at 0.8, of which more than 70 are wrong once in a million."""
    runs, wrong = 200, binom.ppf(1 - 1e-6, 200, 0.2)
    alarms = {"gaussian": 0, "nothing": 0}
    for seed in range(runs):
        common = {"trials": 40, "confidence": 0.8}
        exact = distinguishing_audit(
            gaussian(2, 1.0, seed), delta=0.05, assumes="gaussian", **common
        )
        free = distinguishing_audit(randomised_response(0.1, seed), delta=0.0, **common)
        alarms["gaussian"] += exact.contradicts(gaussian_epsilon(0.05, 1.0))
        alarms["nothing"] += free.contradicts(0.1)
    assert all(count <= wrong for count in alarms.values()), alarms


@pytest.mark.parametrize(
    ("shift", "count", "chance"),
    [
        pytest.param(0.0, 200, 0.15, id="only the means can be off"),
        pytest.param(50.0, 8, 0.15, id="the deviation is what can be off"),
        pytest.param(1.5, 8, 0.3, id="both"),
    ],
)
def test_a_bound_on_mu_fails_as_rarely_as_is_said(shift, count, chance):
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(2000, 2, count, generator=generator, dtype=torch.float64)
    samples[:, 1] += shift
    failures = sum(mu_below(without, present, 0.3) > shift for without, present in samples)
    assert 0 < failures <= binom.ppf(1 - 1e-6, 2000, chance)


def test_rates_of_all_and_none_have_a_closed_form():
    true, false = _rates(torch.tensor([50, 0]), torch.tensor([0, 50]), 50, error=0.1)
    limit = 0.05 ** (1 / 50)
    torch.testing.assert_close(true, torch.tensor([limit, 0.0], dtype=torch.float64))
    torch.testing.assert_close(false, torch.tensor([1 - limit, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("assumes", ["gaussian", "nothing"])
def test_a_direction_that_was_fitted_to_noise_shows_nothing(assumes):
    """400 coordinates, 40 trials to learn from: they separate perfectly, and mean nothing."""
    result = distinguishing_audit(
        gaussian(400, 0.0), trials=80, delta=0.0, confidence=SURE, assumes=assumes
    )
    assert result.epsilon_lower == 0 if assumes == "nothing" else result.mu == 0


def test_noise_that_two_parts_share_is_subtracted():
    generator = torch.Generator().manual_seed(0)

    def release(present):
        noise = torch.randn(20, generator=generator)
        record = torch.zeros(20)
        record[0] = float(present)
        return torch.cat([noise, noise + record])

    result = distinguishing_audit(release, trials=400, delta=1e-5, assumes="gaussian")
    assert result.contradicts(gaussian_epsilon(1e-5, 1.0))  # of each part alone


def test_a_coordinate_without_noise_decides():
    noisy = gaussian(5, 1.0)

    def release(present):
        return torch.cat([noisy(present), torch.tensor([0.01 * present])])

    result = distinguishing_audit(release, trials=400, delta=1e-5, assumes="gaussian")
    assert result.mu > 1e6


def test_no_noise_at_all_shows_the_most_that_there_is():
    exact = distinguishing_audit(
        lambda present: 2.0 * present, trials=20, delta=1e-5, assumes="gaussian"
    )
    assert exact.epsilon_lower == math.inf
    free = distinguishing_audit(lambda present: 2.0 * present, trials=20, delta=0.0)
    # 10 trials of each: both rates are 0.025^(1/10) and its complement.
    limit = 0.025 ** (1 / 10)
    assert math.isclose(free.epsilon_lower, math.log(limit / (1 - limit)))


def test_nothing_released_shows_nothing():
    for assumes in ("gaussian", "nothing"):
        result = distinguishing_audit(lambda present: 3.0, trials=20, delta=0.0, assumes=assumes)
        assert result.epsilon_lower == 0


def test_units_of_the_coordinates_do_not_matter():
    units = torch.logspace(-6, 6, 8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    without, present = torch.randn(2, 300, 8, generator=generator, dtype=torch.float64)
    present += 0.3
    plain = fisher_direction(without, present)
    scaled = fisher_direction(without * units, present * units)
    torch.testing.assert_close(scaled * units, plain)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_statistic_of_ones_own_may_point_either_way(sign):
    result = distinguishing_audit(
        gaussian(3, 3.0),
        trials=1000,
        delta=1e-5,
        assumes="gaussian",
        statistic=lambda seen: sign * seen[:, 0],
    )
    assert 2.5 < result.mu < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 19}, "trials must be >= 20"),
        ({"delta": -0.1}, "delta must be in"),
        ({"confidence": math.nan}, "confidence must be in"),
        ({"assumes": "luck"}, "assumes must be"),
        ({"release": lambda present: math.nan}, "finite"),
        ({"release": lambda present: torch.zeros(1 + present)}, "same shape"),
        ({"statistic": lambda seen: seen}, r"statistic must map \[20, d\]"),
    ],
)
def test_bad_input_is_named(options, message):
    arguments = {"release": gaussian(2), "trials": 20, "delta": 1e-5} | options
    with pytest.raises(ValueError, match=message):
        distinguishing_audit(arguments.pop("release"), **arguments)
