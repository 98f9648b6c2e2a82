"""What one record can change: norms that are never low, bounded sums, records left out."""

from __future__ import annotations

from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops import glm
from dpkernels.ops.glm import FeatureCovariance, Records
from python_tests.ops.glm_cases import Problem, problem, record_gradients, record_hessians

OPERATIONS = ("glm_record_norms", "glm_clipped_sums_", "glm_feature_covariance")
BOUNDS = {"gradient_bound": 0.7, "hessian_bound": 0.3}
# PRIVACY, rule 3: what a clipped contribution may exceed its bound by.
SLACK = 1 + 1e-6
EPS = 2.0**-52

getcontext().prec = 400


def decimal_norms(logits: list[int], label: int) -> tuple[float, float]:
    """Return ``|p - e_y|^2`` and ``|diag p - p p^T|_F^2`` in 400 digits, then rounded."""
    e = [Decimal(logit).exp() for logit in logits]
    p = [value / sum(e) for value in e]
    gradient = sum((pc - (c == label)) ** 2 for c, pc in enumerate(p))
    hessian = sum((pa * ((a == b) - pb)) ** 2 for a, pa in enumerate(p) for b, pb in enumerate(p))
    return float(gradient), float(hessian)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "logits",
    [[0, 0], [0, 1, 2], [20, 0, 0], [0, 40], [100, 0, 3], [300, 0], [3, 3, 3, 3], [0, -50, -50, 0]],
    ids=str,
)
def test_norms_keep_their_digits_where_the_prediction_is_certain(
    backend: str, logits: list[int], dtype: torch.dtype
) -> None:
    theta = torch.tensor(logits, dtype=dtype).unsqueeze(1)
    for label in range(len(logits)):
        records = Records.ragged(torch.ones(1, 1, dtype=dtype), torch.tensor([label]), [0, 1])
        norms = glm.record_norms(records, theta)
        wanted = decimal_norms(logits, label)
        for actual, exact in zip(norms, wanted, strict=True):
            # exp and a handful of operations, squared; 1 - p would lose every digit from 40 on.
            assert abs(actual.item() - exact) <= 32 * EPS * exact


def single_records(x: Tensor, labels: Tensor) -> Records:
    """Every record is a client of its own, so that a sum is one contribution."""
    return Records.ragged(x, labels, list(range(len(x) + 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_contribution_exceeds_its_bound(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    scales = torch.tensor([0.0, 1e-42, 1e-30, 1e-3, 1.0, 50.0, 1e6, 1e15], dtype=torch.float64)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    x = (x * scales.unsqueeze(1)).to(dtype)
    theta = torch.randn(3, 5, generator=generator).to(dtype)
    records = single_records(x, torch.arange(8) % 3)
    result = glm.clipped_sums(records, theta, **BOUNDS)
    assert result.sq_norms.nonfinite() == 0
    gradient = result.gradients.double().flatten(1).norm(dim=1)
    hessian = result.hessians.double().flatten(1).norm(dim=1)
    assert (gradient <= BOUNDS["gradient_bound"] * SLACK).all()
    assert (hessian <= BOUNDS["hessian_bound"] * SLACK).all()
    covariances = FeatureCovariance.factor(records, bound=0.3, gamma=1.0)
    lower = covariances.factors.double()
    contribution = (lower @ lower.mT - torch.eye(5)).flatten(1).norm(dim=1)
    # The factor's own rounding: a few ulps of a matrix of norm sqrt(5) + 0.3.
    assert (contribution <= 0.3 * SLACK + 16 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_factors_clip_what_float64_autograd_finds(backend: str, scale: float) -> None:
    data = problem(3, 5, [1] * 5, shared=True)
    data = Problem(data.x * scale, data.labels, data.offsets, data.theta)
    result = glm.clipped_sums(data.records, data.theta, **BOUNDS)
    x, theta = data.x.double(), data.theta.double()
    gradients = record_gradients(x, data.labels, theta).norm(dim=1)
    hessians = record_hessians(x, data.labels, theta).flatten(1).norm(dim=1)
    for sums, norms, bound in (
        (result.gradients, gradients, BOUNDS["gradient_bound"]),
        (result.hessians, hessians, BOUNDS["hessian_bound"]),
    ):
        wanted = norms.clamp(max=bound)
        found = sums.double().flatten(1).norm(dim=1)
        assert ((found - wanted).abs() <= 1e-6 * wanted).all(), "clipped too much or too little"


@given(
    classes=st.integers(2, 4),
    features=st.integers(1, 4),
    count=st.integers(1, 8),
    scale=st.floats(0.01, 100),
    seed=st.integers(0, 999),
)
def test_neighbouring_data_sets_differ_by_at_most_the_bounds(
    cpp: str, classes: int, features: int, count: int, scale: float, seed: int
) -> None:
    data = problem(classes, features, [count], torch.float64, shared=True, seed=seed)
    x = data.x * scale
    whole = glm.clipped_sums(Records.ragged(x, data.labels, [0, count]), data.theta, **BOUNDS)
    fewer = Records.ragged(x[1:], data.labels[1:], [0, count - 1])
    without = glm.clipped_sums(fewer, data.theta, **BOUNDS)
    assert (whole.gradients - without.gradients).norm() <= BOUNDS["gradient_bound"] * SLACK
    assert (whole.hessians - without.hessians).norm() <= BOUNDS["hessian_bound"] * SLACK


@pytest.mark.parametrize(
    ("value", "place"), [(torch.nan, 0), (torch.inf, 5), (-torch.inf, 2)], ids=str
)
def test_a_record_that_is_not_finite_contributes_zero(
    backend: str, value: float, place: int
) -> None:
    data = problem(3, 6, [8, 4])
    broken, zeroed = data.x.clone(), data.x.clone()
    broken[2, place], zeroed[2] = value, 0.0
    actual = glm.clipped_sums(
        Records.ragged(broken, data.labels, data.offsets), data.theta, **BOUNDS
    )
    wanted = glm.clipped_sums(
        Records.ragged(zeroed, data.labels, data.offsets), data.theta, **BOUNDS
    )
    assert torch.equal(actual.gradients, wanted.gradients)
    assert torch.equal(actual.hessians, wanted.hessians)
    assert actual.sq_norms.nonfinite() == 1 and wanted.sq_norms.nonfinite() == 0
    covariance = FeatureCovariance.factor(
        Records.ragged(broken, data.labels, data.offsets), bound=1.0, gamma=1.0
    )
    without = FeatureCovariance.factor(
        Records.ragged(zeroed, data.labels, data.offsets), bound=1.0, gamma=1.0
    )
    assert torch.equal(covariance.factors, without.factors)
    assert covariance.nonfinite() == 1 and without.nonfinite() == 0


def test_weights_that_are_not_finite_leave_out_their_client(backend: str) -> None:
    data = problem(3, 4, [5, 6])
    theta = data.theta.clone()
    theta[0, 1, 2] = torch.nan
    result = glm.clipped_sums(data.records, theta, **BOUNDS)
    wanted = glm.clipped_sums(data.records, data.theta, **BOUNDS)
    assert not result.gradients[0].any() and not result.hessians[0].any()
    assert torch.equal(result.hessians[1], wanted.hessians[1])
    assert result.sq_norms.nonfinite() == 5
