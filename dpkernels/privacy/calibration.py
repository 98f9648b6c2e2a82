"""How much noise, how many steps, how large a batch: what keeps within (epsilon, delta).

Whatever is returned was checked: by the accountant named, its epsilon is not over the one given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.accountants.accountant import check_delta, check_epsilon, check_steps
from dpkernels.privacy.accountants.exposure import exposure
from dpkernels.privacy.mechanism import (
    Adjacency,
    Drawn,
    Poisson,
    Sampling,
    Statement,
    View,
    gaussian_step,
)

# Noise multipliers that are searched. Below the least, a step that sees a record tells all of it;
# beyond the largest, nothing is learnt.
_LEAST, _MOST = 1e-2, 1e7
_MOST_STEPS = 1 << 30
# The noise returned is at most this much more than needed, and epsilon at most 1% too small.
_TOLERANCE = 1e-3
# What a step's noise may leave out, so that a run with it keeps to the budget too: that of 2^30
# elements, for each of which ``ops.noise`` leaves out 2^-96.
UNREACHABLE = 2.0**-66

Plan = Sequence[tuple[Statement, int]]  # what is released, and in how many steps


def epsilon_after(
    noise_multiplier: float,
    delta: float,
    steps: int,
    sampling: Sampling,
    *,
    accountant: str,
    adjacency: Adjacency | None = None,
    unit: str = "record",
    view: View = "aggregate",
    sampled: Drawn | None = None,
    unreachable: float = UNREACHABLE,
) -> float:
    """Return epsilon at ``delta`` of ``steps`` equal steps.

    noise_multiplier, adjacency, unit, view, sampled: as in ``gaussian_step``.
    unreachable: of a step's noise, as in ``GaussianQuery``; enough for 2^30 elements if not given.

    Raises ValueError for arguments out of range, and facts that ``Statement`` refuses.
    """
    step = gaussian_step(
        noise_multiplier,
        sampling,
        adjacency=adjacency,
        unit=unit,
        view=view,
        sampled=sampled,
        unreachable=unreachable,
    )
    return _spent([(step, steps)], delta, accountant)


def _spent(planned: Plan, delta: float, accountant: str) -> float:
    """Return epsilon at ``delta`` of all that is planned."""
    spent = make_accountant(accountant)
    for statement, steps in planned:
        spent.compose(statement, steps)
    return spent.epsilon(delta)


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    steps: int,
    sampling: Sampling,
    *,
    accountant: str = "pld",
    adjacency: Adjacency | None = None,
    unit: str = "record",
    view: View = "aggregate",
    sampled: Drawn | None = None,
    unreachable: float = UNREACHABLE,
) -> float:
    """Return the least noise multiplier, to 0.1%, with which ``steps`` steps keep to the budget.

    adjacency, unit, view, sampled: as in ``gaussian_step``.
    unreachable: of a step's noise, at least ``PrivateTraining.unreachable_mass``. That of 2^30
        elements, if not given, is of no account up to epsilon = 9. Far beyond, e^epsilon times it
        may be more than delta, and the noise is more than a smaller model needs.

    The noise multiplier is the noise over the clipping norm, 0.01 at least. Raises ValueError for
    arguments out of range, facts that ``Statement`` refuses, or if no noise is enough.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_steps(steps, 1)
    step = gaussian_step(
        1.0,
        sampling,
        adjacency=adjacency,
        unit=unit,
        view=view,
        sampled=sampled,
        unreachable=unreachable,
    )
    return _least_scale(epsilon, delta, [(step, steps)], accountant, 1.0)


def calibrate_noise_scale(
    epsilon: float, delta: float, planned: Plan, *, accountant: str = "pld"
) -> float:
    """Return the least factor, to 0.1%, on the noise of a whole plan that keeps to the budget.

    planned: (statement, steps) of all that is to be released, such as a covariance once and then
        the rounds of a training. Their noise says how the budget is shared: every query keeps its
        part, noise_std times the factor (``Statement.with_noise``). What a query's noise leaves
        out, ``unreachable``, is taken as it stands.

    Without amplification T_i steps of noise multipliers sigma_i cost mu = sqrt(sum T_i/sigma_i^2),
    and the factor is mu over the mu of the budget; that takes about a millisecond. The step with
    the least noise has a noise multiplier of 0.01 at least.

    Raises ValueError for arguments out of range, a query without noise, statements that no
    accountant composes (of two views, units or adjacencies), or if no noise is enough; NotPrivate
    for a statement that is void.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    if not planned:
        raise ValueError("planned must name what is released, and in how many steps, got nothing")
    for place, (statement, steps) in enumerate(planned):
        check_steps(steps, 1)
        for number, query in enumerate(statement.queries):
            if query.noise_std == 0:
                raise ValueError(
                    f"planned: query {number} of statement {place} has no noise (noise_std is 0), "
                    "which no factor changes; state the noise that it is to have beside the others"
                )
    least = min(statement.noise_multiplier for statement, _ in planned)
    return _least_scale(epsilon, delta, planned, accountant, 1 / least)


def _least_scale(
    epsilon: float, delta: float, planned: Plan, accountant: str, whole: float
) -> float:
    """Return the least factor on the noise of ``planned``, to 0.1%, that keeps to the budget.

    whole: the factor that makes the least noise multiplier about 1; the search is relative to it.
    """
    if accountant == "pld" and not exposure(planned).sampled:
        accountant = "gaussian"  # which is what pld computes without amplification

    def spent(scale: float) -> float:
        scaled = [(statement.with_noise(scale), steps) for statement, steps in planned]
        return _spent(scaled, delta, accountant)

    start, factor = whole, 2.0
    if accountant == "pld":
        # A privacy loss distribution takes long to build: begin near where the search ends.
        with contextlib.suppress(ValueError):
            start = _least_scale(epsilon, delta, planned, "rdp", whole)
            factor = 1.05
    low, high = _bracket(spent, epsilon, start, factor, (_LEAST * whole, _MOST * whole))
    if high[1] > epsilon:
        plan = ", ".join(f"{steps} steps with {step.sampling}" for step, steps in planned)
        raise ValueError(
            f"epsilon: {epsilon} cannot be kept at delta = {delta} for {plan}: the {accountant} "
            f"accountant gives {high[1]:g} even with noise multiplier {high[0] / whole:g}; take a "
            "larger delta or epsilon, or fewer steps"
        )
    return _narrow(spent, epsilon, low, high)


Point = tuple[float, float]  # a factor on the noise, and what it spends


def _bracket(
    spent: Callable[[float], float],
    epsilon: float,
    start: float,
    factor: float,
    bounds: tuple[float, float],
) -> tuple[Point, Point]:
    """Return a point over the budget and one within it, from ``start`` in growing strides."""
    point = (start, spent(start))
    over = point[1] > epsilon
    while True:
        scale = point[0] * factor if over else point[0] / factor
        scale = min(max(scale, bounds[0]), bounds[1])
        following = (scale, spent(scale))
        if (following[1] > epsilon) != over or scale in bounds:
            return (point, following) if over else (following, point)
        point, factor = following, factor * factor


def _narrow(spent: Callable[[float], float], epsilon: float, low: Point, high: Point) -> float:
    """Return the upper end of the bracket, narrowed by false positions in the logs (Illinois)."""
    if low[1] <= epsilon:
        return low[0]
    weights = [1.0, 1.0]
    while high[0] > (1 + _TOLERANCE) * low[0] or high[1] < 0.99 * epsilon:
        x = [math.log(low[0]), math.log(high[0])]
        if x[1] - x[0] < 1e-9:  # a jump: epsilon is far below the budget on one side of it
            break
        share = 0.5
        if high[1] > 0 and low[1] < math.inf:
            above = weights[0] * math.log(low[1] / epsilon)
            below = weights[1] * math.log(epsilon / high[1])
            # Off the ends by a third of the tolerance, so that the bracket closes from both sides.
            margin = min(0.5, _TOLERANCE / 3 / (x[1] - x[0]))
            share = min(max(above / (above + below), margin), 1 - margin)
        scale = math.exp(x[0] + share * (x[1] - x[0]))
        point = (scale, spent(scale))
        if point[1] > epsilon:
            low, weights = point, [1.0, weights[1] / 2]
        else:
            high, weights = point, [weights[0] / 2, 1.0]
    return high[0]


def calibrate_steps(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling: Sampling,
    *,
    accountant: str = "pld",
    adjacency: Adjacency | None = None,
    unit: str = "record",
    view: View = "aggregate",
    sampled: Drawn | None = None,
) -> int:
    """Return the largest number of steps that keeps to the budget.

    adjacency, unit, view, sampled: as in ``gaussian_step``.

    Raises ValueError for arguments out of range, facts that ``Statement`` refuses, or if one step
    is too much.
    """
    check_epsilon(epsilon)
    check_delta(delta)

    step = gaussian_step(
        noise_multiplier,
        sampling,
        adjacency=adjacency,
        unit=unit,
        view=view,
        sampled=sampled,
        unreachable=UNREACHABLE,
    )

    def within(steps: int) -> bool:
        return _spent([(step, steps)], delta, accountant) <= epsilon

    if not within(1):
        raise ValueError(
            f"noise_multiplier: with {noise_multiplier} and {sampling} one step spends more than "
            f"epsilon = {epsilon} at delta = {delta}; take more noise or a larger epsilon"
        )
    steps = _largest(within, 2, _MOST_STEPS)
    if steps == _MOST_STEPS:
        raise ValueError(
            f"epsilon: {steps} steps spend less than {epsilon} at delta = {delta} with noise "
            f"multiplier {noise_multiplier} and {sampling}; any number of steps is within reach"
        )
    return steps


def calibrate_batch_size(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    steps: int,
    population: int,
    *,
    accountant: str = "pld",
) -> int:
    """Return the largest expected batch size, Poisson sampled, that keeps to the budget.

    population: how many records batches are drawn from; a number that is public.

    Raises ValueError for arguments out of range, or if batches of one are too much.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_steps(steps, 1)
    if not isinstance(population, int) or population < 1:
        raise ValueError(f"population must be a whole number >= 1, got {population!r}")

    def within(size: int) -> bool:
        sampling = Poisson(size / population)
        spent = epsilon_after(noise_multiplier, delta, steps, sampling, accountant=accountant)
        return spent <= epsilon

    if not within(1):
        raise ValueError(
            f"noise_multiplier: with {noise_multiplier} batches of one record of {population} "
            f"spend more than epsilon = {epsilon} at delta = {delta} in {steps} steps; take more "
            "noise, fewer steps or a larger epsilon"
        )
    start = 1
    if accountant == "pld":
        # The smaller the rate, the longer a privacy loss distribution takes: begin near the end.
        with contextlib.suppress(ValueError):
            start = calibrate_batch_size(
                epsilon, delta, noise_multiplier, steps, population, accountant="rdp"
            )
    return _largest(within, start, population)


def _largest(within: Callable[[int], bool], start: int, most: int) -> int:
    """Return the largest number from 1, which is within, to ``most`` that is within."""
    low, high = 1, start
    while within(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if within(middle):
            low = middle
        else:
            high = middle
    return low
