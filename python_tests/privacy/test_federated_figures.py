"""Known figures of federated mechanisms: papers' own where they are right, else sound ones."""

from __future__ import annotations

import math

import pytest

from dpkernels.privacy import (
    EveryRecord,
    GaussianQuery,
    Poisson,
    Shuffled,
    Statement,
    WithoutReplacement,
    calibrate_noise_scale,
    gaussian_step,
    make_accountant,
)

DELTA = 1e-5


@pytest.mark.parametrize(
    ("epsilon", "printed"), [(0.5, "526"), (1, "279"), (2, "149"), (5, "66.7"), (10, "37.4")]
)
def test_fedsofim_noise(epsilon, printed):
    """DP-FedSOFIM (63): mu = 2 sqrt(n T) / sigma for n = 20 uploads of noise C sigma / sqrt(n)."""
    clients, rounds = 20, 70
    upload = GaussianQuery(2.0, 1 / math.sqrt(clients))
    planned = [(Statement((upload,), EveryRecord(), "replace-one", view="each_upload"), rounds)]
    sigma = calibrate_noise_scale(epsilon, DELTA, planned)
    last_digit = 0.1 if "." in printed else 1.0
    # Half of the last digit printed, and the 0.1% that a calibration may be above.
    assert abs(sigma - float(printed)) <= last_digit / 2 + 1e-3 * sigma


def fedceo(statement, accountant="pld"):
    spent = make_accountant(accountant)
    spent.compose(statement, 300)
    return spent.epsilon(DELTA)


@pytest.mark.parametrize(("sigma", "printed"), [(1.0, 12.4), (1.5, 6.3), (2.0, 4.2)])
def test_fedceo_with_users_drawn_out_of_sight(sigma, printed):
    """FedCEO: users, 10 of 100 on average in each of 300 rounds, noise of the sum sigma C."""
    step = gaussian_step(sigma, Poisson(0.1), unit="user")
    assert fedceo(step) == pytest.approx(printed, abs=0.05)


@pytest.mark.parametrize(
    ("accountant", "sigma", "printed"),
    [
        ("rdp", 1.0, "71"),
        ("rdp", 1.5, "28"),
        ("rdp", 2.0, "15.7"),
        ("pld", 1.0, "65.9"),
        ("pld", 1.5, "25.9"),
        ("pld", 2.0, "14.5"),
    ],
)
def test_fedceo_with_cohorts_of_fixed_size_drawn_out_of_sight(accountant, sigma, printed):
    """Replacing a user moves the sum by 2 C. Renyi divergences are 8% above what is tight here."""
    step = gaussian_step(sigma, WithoutReplacement(10, 100), unit="user")
    last_digit = 0.1 if "." in printed else 1.0
    assert fedceo(step, accountant) == pytest.approx(float(printed), abs=last_digit / 2)


@pytest.mark.parametrize(("sigma", "printed"), [(1.0, 747), (1.5, 364), (2.0, 223)])
def test_fedceo_with_every_upload_seen(sigma, printed):
    """Noise sigma C / sqrt(10) on each upload; cohorts are shuffled: a user uploads 30 times."""
    upload = gaussian_step(sigma / math.sqrt(10), Shuffled(10), unit="user", view="each_upload")
    assert fedceo(upload) == pytest.approx(printed, abs=0.5)
