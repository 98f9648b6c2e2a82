"""delta and epsilon of Gaussian noise, beside the same formula in 60 digits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_epsilon_below

mpmath = pytest.importorskip("mpmath")  # comes with torch, through sympy

MUS = st.floats(-6.0, 4.0).map(lambda power: 10.0**power)
DELTAS = st.floats(-20.0, -0.05).map(lambda power: 10.0**power)


def exact_delta(epsilon, mu):
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        # erfc keeps its digits in the tail, where a difference from 1 would lose them.
        phi = [mpmath.erfc((epsilon / mu + sign * mu / 2) / mpmath.sqrt(2)) / 2 for sign in (-1, 1)]
        return phi[0] - mpmath.exp(epsilon) * phi[1]


@given(mu=MUS, epsilon=st.floats(-6.0, 6.0).map(lambda power: 10.0**power))
def test_delta_is_never_too_small_and_close(mu, epsilon):
    found, exact = gaussian_delta(epsilon, mu), exact_delta(epsilon, mu)
    assert found >= exact
    # What is stated beside the code, to both sides.
    t, s = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    tail = mpmath.erfc(t / mpmath.sqrt(2)) / 2
    slack = tail * (1 + max(t, 0) * s) + mpmath.npdf(t) * (1 + s)
    assert found - exact <= 2**-48 * slack + 1e-300


@given(mu=MUS, delta=DELTAS)
def test_epsilon_is_bounded_from_both_sides(mu, delta):
    above, below = gaussian_epsilon(delta, mu), gaussian_epsilon_below(delta, mu)
    assert exact_delta(above, mu) <= delta
    assert below == 0 or exact_delta(below, mu) >= delta
    # Both differ from the truth by a bisection to 1e-12 and by what the roundings of delta do to
    # epsilon: at most 1e-8 where delta does not cancel to nothing.
    if delta >= 1e-6 * mu:
        assert above - below <= 1e-8 * (1 + above)


@pytest.mark.parametrize(
    ("delta", "mu", "epsilon"),
    [
        (1e-5, 0.0, 0.0),
        (1.0, 3.0, 0.0),
        (0.0, 1.0, math.inf),
        (1e-5, math.inf, math.inf),
        (0.5, 1.0, 0.0),
    ],
)
def test_the_ends(delta, mu, epsilon):
    assert gaussian_epsilon(delta, mu) == epsilon
    assert gaussian_epsilon_below(delta, mu) == epsilon


@pytest.mark.parametrize("mu", [1e-300, 1e-9, 1e9, 1e16, 1e150, 1e200])
def test_extreme_noise_keeps_its_side(mu):
    above, below = gaussian_epsilon(1e-5, mu), gaussian_epsilon_below(1e-5, mu)
    assert 0 <= below <= above
    if mu > 1e8:  # epsilon is mu^2 / 2 but for something of the order of mu
        assert below >= 0.49 * mu * mu


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (gaussian_delta, (-1.0, 1.0), "epsilon"),
        (gaussian_delta, (math.nan, 1.0), "epsilon"),
        (gaussian_delta, (1.0, math.nan), "mu"),
        (gaussian_epsilon, (1.5, 1.0), "delta"),
        (gaussian_epsilon, (math.nan, 1.0), "delta"),
        (gaussian_epsilon_below, (0.1, -1.0), "mu"),
    ],
)
def test_bad_input_is_named(function, arguments, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        function(*arguments)
