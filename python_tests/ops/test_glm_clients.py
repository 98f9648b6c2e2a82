"""One client's numbers are its own: the same bits alone, among others, and in any thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.ops import glm
from dpkernels.ops.glm import FeatureCovariance, damping
from python_tests.ops.glm_cases import (
    GRADIENT_BOUND,
    HESSIAN_BOUND,
    Problem,
    autograd_sums,
    problem,
    solved,
)
from python_tests.tolerance import assert_as_accurate

OPERATIONS = (
    "glm_record_norms",
    "glm_clipped_sums_",
    "glm_feature_covariance",
    "glm_newton",
    "glm_newton_cg",
)
# Few classes, and enough that a client with few records needs no Hessian for its Newton step; one
# over a block of 128 records, over a vector of features and of records; clients large enough beside
# the others that their blocks are shared out, and so many that whole clients are.
SHAPES = [
    (3, 19, [129, 0, 7, 33]),
    (10, 8, [20, 1, 0, 17, 25] * 8),
    (13, 17, [40, 16, 3]),
    (26, 5, [9, 12, 30, 2]),
]


def right_hand_sides(data: Problem) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(data.clients, *data.theta.shape[-2:], generator=generator).to(data.x.dtype)


def results(data: Problem, v: Tensor) -> list[Tensor]:
    """Return everything that is computed for each client, clients first."""
    records, theta = data.records, data.theta
    cg = glm.newton_step_cg(records, theta, v, hessian_bound=HESSIAN_BOUND, gamma=3.0)
    newton = glm.newton_step(records, theta, v, hessian_bound=HESSIAN_BOUND, gamma=3.0)
    return [
        glm.clipped_gradient_sum(records, theta, GRADIENT_BOUND),
        glm.clipped_hessian_sum(records, theta, HESSIAN_BOUND),
        newton.solutions,
        cg.solutions,
        cg.iterations,
        cg.residuals,
        FeatureCovariance.factor(records, bound=0.5, gamma=0.1).factors,
    ]


def norms(data: Problem, v: Tensor) -> list[Tensor]:
    """Return everything that is computed for each record."""
    step = glm.newton_step(data.records, data.theta, v, hessian_bound=HESSIAN_BOUND, gamma=3.0)
    return [*glm.record_norms(data.records, data.theta), step.hessian_sq_norms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_client_alone_has_the_bits_that_it_has_among_others(
    cpp: str, shape: tuple[int, int, list[int]], dtype: torch.dtype
) -> None:
    data = problem(*shape, dtype)
    v = right_hand_sides(data)
    together, of_records = results(data, v), norms(data, v)
    for client in range(min(data.clients, 5)):
        x, labels, theta = data.client(client)
        alone = Problem(x, labels, [0, len(x)], theta)
        rhs = v[client : client + 1]
        for found, wanted in zip(results(alone, rhs), together, strict=True):
            assert torch.equal(found[0], wanted[client])
        rows = slice(data.offsets[client], data.offsets[client + 1])
        for found, wanted in zip(norms(alone, rhs), of_records, strict=True):
            assert torch.equal(found, wanted[rows])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    cpp: str, threads: int, shape: tuple[int, int, list[int]]
) -> None:
    data = problem(*shape, shared=True)
    v = right_hand_sides(data)
    several = [*results(data, v), *norms(data, v)]
    torch.set_num_threads(1)
    for found, wanted in zip(several, [*results(data, v), *norms(data, v)], strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("gamma", [30.0, 3.0, 0.3, 0.01])
@pytest.mark.parametrize("shape", [(10, 8, [20, 1, 0, 25]), (13, 17, [30, 3])], ids=str)
def test_newton_steps_of_few_records_are_as_accurate_as_those_of_torch(
    cpp: str, shape: tuple[int, int, list[int]], gamma: float
) -> None:
    """Whether the curvature is small beside gamma, which needs no Hessian, or large."""
    data = problem(*shape)
    v = right_hand_sides(data)
    step = glm.newton_step(data.records, data.theta, v, hessian_bound=HESSIAN_BOUND, gamma=gamma)
    exact = solved(autograd_sums(data.to(torch.float64))[1], v.double(), gamma)
    assert_as_accurate(step.solutions, solved(autograd_sums(data)[1], v, gamma), exact)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_record_that_is_not_finite_is_like_one_of_zeros(
    cpp: str, shape: tuple[int, int, list[int]], value: float
) -> None:
    data = problem(*shape)
    broken, zeroed = data.x.clone(), data.x.clone()
    broken[3, 2], zeroed[3] = value, 0.0
    v = right_hand_sides(data)
    for found, wanted in zip(
        *(results(Problem(x, data.labels, data.offsets, data.theta), v) for x in (broken, zeroed)),
        strict=True,
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("classes", [2, 10])
def test_nearly_certain_predictions_keep_the_accuracy_of_newton_steps(
    cpp: str, classes: int
) -> None:
    """Every probability is near 0 or 1, so the Hessian is far smaller than what it is made of."""
    data = problem(classes, 8, [20, 12])
    data = Problem(data.x, data.labels, data.offsets, data.theta * 30)
    v = right_hand_sides(data)
    for gamma in (0.1, 1.0):
        step = glm.newton_step(
            data.records, data.theta, v, hessian_bound=HESSIAN_BOUND, gamma=gamma
        )
        exact = solved(autograd_sums(data.to(torch.float64))[1], v.double(), gamma)
        assert_as_accurate(step.solutions, solved(autograd_sums(data)[1], v, gamma), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_hand_sides_are_divided_in_parts_as_they_are_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    v = torch.randn(7, 3, 5, dtype=dtype)
    scales = torch.rand(7, dtype=torch.float64) + 0.01
    given, wanted = v.clone(), damping.divided(v, scales)
    for elements in (1, 31, 104):
        monkeypatch.setattr(damping, "_DIVIDED", elements)
        assert torch.equal(damping.divided(v, scales), wanted)
        assert torch.equal(v, given), "the caller's numbers were written to"
