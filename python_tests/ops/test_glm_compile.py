"""The ``glm`` operators under ``opcheck`` and ``torch.compile``, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops import glm
from dpkernels.ops.glm import FeatureCovariance, Records
from python_tests.conftest import running_on
from python_tests.ops.glm_cases import problem

OPERATIONS = (
    "glm_record_norms",
    "glm_clipped_sums_",
    "glm_feature_covariance",
    "glm_solve",
    "glm_newton",
    "glm_newton_cg",
)
operators = torch.ops.dpkernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["reference", "cpp"])
def compilable(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the backends that can be compiled for CPU tensors."""
    with running_on(request.param, OPERATIONS):
        yield request.param


@pytest.mark.parametrize(
    ("counts", "dtype"), [([4, 0, 3], torch.float32), ([0, 0], torch.float64)], ids=str
)
def test_opcheck(counts: list[int], dtype: torch.dtype) -> None:
    data = problem(3, 5, counts, dtype, shared=True)
    records, theta, check = data.records, data.theta.unsqueeze(0), torch.library.opcheck
    shared = (records.x, records.labels, records.spans, records.most, theta)
    clients = len(counts)
    v = torch.ones(clients, 3, 5, dtype=dtype)
    gammas = torch.ones(clients, dtype=torch.float64)
    check(operators.glm_record_norms.default, shared)
    gradients, squares = v.clone(), torch.ones(clients, 15, 15, dtype=dtype)
    for outs in ((gradients, None), (None, squares), (gradients, squares)):
        check(operators.glm_clipped_sums_.default, (*outs, *shared, 1.0, 2.0))
    check(operators.glm_feature_covariance.default, (records.x, records.spans, records.most, 1.0))
    hessians = torch.eye(15, dtype=dtype).expand(clients, 15, 15)
    check(operators.glm_solve.default, (hessians, v.reshape(clients, 15), gammas))
    system = (records.x, records.spans, records.most, theta, 1.0, v, gammas)
    check(operators.glm_newton.default, system)
    check(operators.glm_newton_cg.default, (*system, 1e-5, 2))


def sums(records: Records, theta: Tensor, v: Tensor) -> Any:
    """Everything that is summed, and the norms alone."""
    both = glm.clipped_sums(records, theta * 2, gradient_bound=1.0, hessian_bound=2.0)
    norms = glm.record_norms(records, theta)
    written = glm.clipped_hessian_sum(records, theta, 1.0, out=torch.zeros_like(both.hessians))
    return both.gradients, both.hessians, both.sq_norms.nonfinite(), norms.gradient, written


def steps(records: Records, theta: Tensor, v: Tensor) -> Any:
    """Both Newton steps from records, and one from given Hessians."""
    exact = glm.newton_step(records, theta, v, hessian_bound=1.0, gamma=0.5, scale=0.5)
    hessians = glm.clipped_hessian_sum(records, theta, 1.0)
    iterated = glm.newton_step_cg(records, theta, v, hessian_bound=1.0, gamma=0.5, max_iterations=2)
    return exact.solutions, glm.solve(hessians, v, 0.5), iterated.solutions, iterated.iterations


def covariance(records: Records, theta: Tensor, v: Tensor) -> Any:
    """The feature-covariance step."""
    return FeatureCovariance.factor(records, bound=1.0, gamma=0.5).solve(v)


@pytest.mark.parametrize("function", [sums, steps, covariance])
def test_no_graph_break_and_the_same_result(compilable: str, function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    data = problem(3, 5, [4, 3])
    arguments = (data.records, data.theta, torch.ones(2, 3, 5))
    torch.testing.assert_close(compiled(*arguments), function(*arguments), rtol=0, atol=0)


RECORDS = problem(3, 4, [5, 6], shared=True)
X, LABELS, THETA, V = RECORDS.x, RECORDS.labels, RECORDS.theta, torch.zeros(2, 3, 4)
STEP = {"hessian_bound": 1.0, "gamma": 1.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Records.ragged(X.half(), LABELS, [0, 11]), r"x must be \[N, d\] float32 or"),
        (lambda: Records.ragged(X[0], LABELS, [0, 11]), r"x must be \[N, d\]"),
        (lambda: Records.ragged(X, LABELS[1:], [0, 11]), r"labels must be \[11\] int64"),
        (lambda: Records.ragged(X, LABELS.int(), [0, 11]), "labels must be"),
        (lambda: Records.ragged(X, LABELS - 3, [0, 11]), "labels must be classes 0, 1"),
        (lambda: Records.ragged(X, LABELS, [0, 12]), "from 0 to at most 11"),
        (lambda: Records.ragged(X, LABELS, [0, 5, 4]), "not decreasing"),
        (lambda: Records.ragged(X, LABELS, [-1, 5]), "offsets must be"),
        (lambda: Records.ragged(X, LABELS, []), "offsets must be"),
        (lambda: Records.padded(X, LABELS), r"x must be \[clients, B, d\]"),
        (
            lambda: Records.padded(X[None], LABELS[None], torch.tensor([12])),
            r"counts must be \[1\] int64 from 0 to 11",
        ),
    ],
)
def test_records_that_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: glm.record_norms(r, THETA[:, 1:]), r"theta must be \[C, 4\] or \[2, C, 4\]"),
        (lambda r: glm.record_norms(r, THETA.double()), "theta must be"),
        (lambda r: glm.record_norms(r, THETA.expand(3, 3, 4)), "theta must be"),
        (lambda r: glm.record_norms(r, THETA[:2]), "theta has 2 classes, but .* label 2"),
        (lambda r: glm.clipped_gradient_sum(r, THETA, 0.0), "gradient_bound must be a finite"),
        (lambda r: glm.clipped_hessian_sum(r, THETA, torch.inf), "hessian_bound must be a finite"),
        (lambda r: glm.newton_step(r, THETA, V[:1], **STEP), r"v must be \[2, 3, 4\]"),
        (lambda r: glm.newton_step(r, THETA, V, hessian_bound=1.0, gamma=0.0), "gamma must be"),
        (lambda r: glm.newton_step(r, THETA, V, **STEP, scale=-1.0), "scale must be a finite"),
        (
            lambda r: glm.newton_step(
                r, THETA, V, hessian_bound=1.0, gamma=torch.tensor([1.0, -1.0]).double()
            ),
            "gamma must be finite numbers > 0, got -1.0 for client 1",
        ),
        (
            lambda r: glm.newton_step(r, THETA, V, hessian_bound=1.0, gamma=torch.ones(2)),
            r"gamma must be a number or \[2\] float64",
        ),
        (lambda r: glm.newton_step_cg(r, THETA, V, **STEP, tolerance=-1.0), "tolerance must be"),
        (
            lambda r: glm.newton_step_cg(r, THETA, V, **STEP, max_iterations=-1),
            "max_iterations must be",
        ),
        (lambda r: FeatureCovariance.factor(r, bound=0.0, gamma=1.0), "bound must be a finite"),
        (
            lambda r: FeatureCovariance.factor(r, bound=1.0, gamma=1.0).solve(V[:, :, :2]),
            r"v must be \[2, C, 4\]",
        ),
        (lambda r: glm.solve(torch.zeros(2, 3, 4), V, 1.0), r"hessians must be \[clients, n, n\]"),
        (lambda r: glm.solve(torch.eye(12).half()[None], V[:1], 1.0), "hessians must be float32"),
        (lambda r: glm.solve(torch.eye(12)[None], V, 1.0), r"v must be \[1, 12\]"),
    ],
)
def test_arguments_that_are_refused(call: Callable[[Records], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(RECORDS.records)


def test_operators_called_directly_stay_inside_their_tensors() -> None:
    with running_on("cpp", OPERATIONS):
        records, theta = RECORDS.records, THETA.unsqueeze(0)
        outside = torch.tensor([[0, 12]])
        with pytest.raises(ValueError, match="client 0 has 0 to 12 of 11"):
            operators.glm_record_norms(records.x, records.labels, outside, 12, theta)
        with pytest.raises(ValueError, match="theta must be"):
            operators.glm_record_norms(
                records.x, records.labels, records.spans, records.most, theta[..., 1:]
            )
        gammas = torch.ones(2, dtype=torch.float64)
        with pytest.raises(ValueError, match="v must have the shape"):
            operators.glm_solve(torch.zeros(2, 4, 4), torch.zeros(2, 3), gammas)
        with pytest.raises(ValueError, match="gammas must be"):
            operators.glm_solve(torch.zeros(2, 4, 4), torch.zeros(2, 4), gammas[:1])
