"""Clipped sums of stacked clients: those of the engine and of single samples, and within bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkernels.federated.local import chain_of, clipped_sums
from python_tests.federated.test_local import COUNTS, FEATURES, problem_of
from python_tests.federated.test_model_problem import single_gradients


def every(problem):
    return problem.cohort(torch.arange(problem.clients))


@pytest.mark.parametrize("at_a_time", [1, 7, 512])
@pytest.mark.parametrize("own", [False, True], ids=["one theta", "own thetas"])
@pytest.mark.parametrize("name", ["plain", "deep", "linear"])
def test_clipped_sums_are_those_of_the_engine_and_of_single_samples(name, own, at_a_time):
    problem = problem_of(name, physical_batch_size=at_a_time)
    theta, cohort = problem.initial(), every(problem)
    if own:
        noise = torch.randn(len(COUNTS), *problem.shape, generator=torch.Generator().manual_seed(2))
        theta = theta + 0.1 * noise.double()
    single = []
    for i, rows in enumerate(cohort.held):
        problem.set(theta[i] if own else theta)
        single.append(single_gradients(problem, rows).double())
    bound = torch.cat(single).norm(dim=1).median().item()  # half of the records are clipped
    found = problem.clipped_gradient_sums(cohort, theta, bound)
    for i, gradients in enumerate(single):
        factors = (bound / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
        torch.testing.assert_close(found[i], (gradients * factors).sum(0), rtol=1e-9, atol=1e-12)
    engine = problem._clipped_by_engine(cohort, theta, bound)
    torch.testing.assert_close(found, engine, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["plain", "deep", "dropping", "mlp"])
def test_clients_in_turn_get_the_same_sums(name):
    problem = problem_of(name)
    cohort, theta = every(problem), problem.initial()
    torch.manual_seed(4)
    together = problem.clipped_gradient_sums(cohort, theta, 0.5)
    torch.manual_seed(4)
    for i in range(len(cohort)):
        alone = problem.clipped_gradient_sums(problem.only(cohort, i), theta, 0.5)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1e-8, 1.0, 1e8, 1e19, 1e30, 3e38]),
    bound=st.sampled_from([1e-6, 0.3, 1.0, 1e4]),
    name=st.sampled_from(["plain", "deep", "linear"]),
    seed=st.integers(0, 1000),
)
def test_no_record_adds_more_than_the_bound(scale, bound, name, seed):
    problem = problem_of(name, (1,) * 8, dtype=torch.float32)
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(seed)) * scale
    problem._x = x
    sums = problem.clipped_gradient_sums(every(problem), problem.initial(), bound)
    assert sums.isfinite().all()
    assert sums.double().norm(dim=1).max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    # The deep model begins with tanh, which brings infinity back to 1.
    [("plain", torch.nan), ("plain", torch.inf), ("plain", -torch.inf), ("deep", torch.nan)],
)
def test_a_record_that_is_not_finite_adds_exactly_zero(name, value):
    problem = problem_of(name, dtype=torch.float32)
    cohort, theta = every(problem), problem.initial()
    row = int(cohort.held[3][4])
    problem._x[row, 2] = value
    found = problem.clipped_gradient_sums(cohort, theta, 0.5)
    without = [rows[rows != row] for rows in cohort.held]
    left = problem.clipped_gradient_sums(type(cohort)(cohort.ids, without), theta, 0.5)
    torch.testing.assert_close(found, left, rtol=1e-6, atol=1e-7)


def test_parameters_that_are_not_finite_make_every_record_add_zero():
    problem = problem_of("plain", dtype=torch.float32)
    theta = problem.initial()
    theta[3] = torch.nan
    found = problem.clipped_gradient_sums(every(problem), theta, 0.5)
    assert torch.equal(found, torch.zeros_like(found))


def test_dropout_masks_are_in_the_gradients():
    problem = problem_of("mlp")
    cohort, chain = every(problem), chain_of(problem.model, (FEATURES,))
    one, same, other = (
        clipped_sums(
            chain,
            problem._x,
            problem._y,
            cohort.held,
            problem.initial(),
            1.0,
            at_a_time=512,
            seeds=[seed] * len(cohort),
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert (one - other).abs().max() > 1e-3
