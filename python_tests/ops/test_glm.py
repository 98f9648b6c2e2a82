"""Norms and clipped sums of softmax-regression records against autograd, on every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import hessian

from dpkernels.ops import glm
from dpkernels.ops.glm import Records
from python_tests.ops.glm_cases import (
    GRADIENT_BOUND,
    HESSIAN_BOUND,
    Problem,
    autograd_sq_norms,
    autograd_sums,
    loss,
    plain_sums,
    problem,
    wide_sums,
)
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("glm_record_norms", "glm_clipped_sums_")

# Classes, features, records of each client: one of everything, an empty client; of Triton's blocks
# of 16 records, 32 features and 16 classes one more than some.
SHAPES = [
    (2, 1, [1]),
    (3, 5, [4, 0, 7]),
    (5, 7, [18, 2]),
    (2, 33, [17, 1]),
    (17, 3, [5]),
]
DTYPES = [torch.float32, torch.float64]


def sums(data: Problem) -> glm.ClippedSums:
    bounds = {"gradient_bound": GRADIENT_BOUND, "hessian_bound": HESSIAN_BOUND}
    return glm.clipped_sums(data.records, data.theta, **bounds)


def check_sums(data: Problem) -> None:
    """Hold both sums to the truth, with the error of the closed forms in PyTorch.

    The truth is autograd in float64; for float64 records, whose rounding autograd shares, the
    closed forms in wider numbers.
    """
    actual, plain = sums(data), plain_sums(data)
    wide = data.x.dtype == torch.float64
    exact = wide_sums(data) if wide else autograd_sums(data.to(torch.float64))
    assert_as_accurate(actual.gradients, plain[0], exact[0])
    assert_as_accurate(actual.hessians, plain[1], exact[1])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[1], torch.float64)],
    ids=str,
)
def test_clipped_sums_are_those_of_autograd(
    backend: str, shape: tuple[int, int, list[int]], dtype: torch.dtype
) -> None:
    check_sums(problem(*shape, dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_are_those_of_autograd(backend: str, shape: tuple[int, int, list[int]]) -> None:
    data = problem(*shape, shared=True)
    norms = glm.record_norms(data.records, data.theta)
    exact, plain = autograd_sq_norms(data.to(torch.float64)), autograd_sq_norms(data)
    for actual, wanted, same_dtype in zip(norms, exact, plain, strict=True):
        assert actual.dtype == torch.float64
        assert_as_accurate(actual.float(), same_dtype, wanted)


def test_the_layout_is_that_of_torch_func_hessian(backend: str) -> None:
    data = problem(3, 4, [6], torch.float64, shared=True)
    x, labels, theta = data.client(0)

    def total(flat: Tensor) -> Tensor:
        weights = flat.reshape(theta.shape)
        return sum(loss(weights, *pair) for pair in zip(x, labels, strict=True))

    exact = hessian(total)(theta.flatten())
    actual = glm.clipped_hessian_sum(data.records, theta, 1e9)[0]
    probabilities = torch.softmax(x @ theta.mT, 1)
    curvature = (
        torch.diag_embed(probabilities) - probabilities.unsqueeze(2) * probabilities[:, None]
    )
    plain = torch.einsum("nab,ni,nj->aibj", curvature, x, x).reshape(exact.shape)
    assert_as_accurate(actual, plain, exact)
    assert torch.equal(actual, actual.T)


def test_one_sum_alone_is_the_same(backend: str) -> None:
    data = problem(4, 6, [9, 3])
    both = sums(data)
    gradient = glm.clipped_gradient_sum(data.records, data.theta, GRADIENT_BOUND)
    assert torch.equal(gradient, both.gradients)
    assert torch.equal(
        glm.clipped_hessian_sum(data.records, data.theta, HESSIAN_BOUND), both.hessians
    )
    assert torch.equal(both.sq_norms.hessian, glm.record_norms(data.records, data.theta).hessian)


def test_shared_weights_are_the_same_weights_for_every_client(backend: str) -> None:
    data = problem(3, 5, [4, 6], shared=True)
    repeated = Problem(data.x, data.labels, data.offsets, data.theta.expand(2, 3, 5))
    assert torch.equal(sums(data).hessians, sums(repeated).hessians)
    assert torch.equal(sums(data).gradients, sums(repeated).gradients)


def test_padded_records_are_the_ragged_ones(backend: str) -> None:
    counts = [5, 0, 3]
    data = problem(3, 4, counts)
    x, labels = torch.full((3, 6, 4), torch.nan), torch.full((3, 6), -1)
    for client, count in enumerate(counts):
        x[client, :count], labels[client, :count], _ = data.client(client)
    padded = Records.padded(x, labels, torch.tensor(counts))
    bounds = {"gradient_bound": GRADIENT_BOUND, "hessian_bound": HESSIAN_BOUND}
    actual, wanted = glm.clipped_sums(padded, data.theta, **bounds), sums(data)
    assert torch.equal(actual.gradients, wanted.gradients)
    assert torch.equal(actual.hessians, wanted.hessians)
    inside = torch.arange(6) < torch.tensor(counts).unsqueeze(1)
    for found, norms in zip(actual.sq_norms, wanted.sq_norms, strict=True):
        assert torch.equal(found.reshape(3, 6)[inside], norms)
        assert not found.reshape(3, 6)[~inside].any(), "padding has a norm"
    assert actual.sq_norms.nonfinite() == 0


def test_strides_do_not_change_the_result(backend: str) -> None:
    data = problem(3, 6, [7, 4])
    wanted = sums(data)
    wide = torch.full((11, 20), torch.nan)
    wide[:, 3:9] = data.x
    for x in (wide[:, 3:9], data.x.t().contiguous().t(), wide[:, 3:9].flip(0).flip(0)):
        strided = Problem(x, data.labels, data.offsets, data.theta.mT.contiguous().mT)
        assert torch.equal(sums(strided).hessians, wanted.hessians)
        assert torch.equal(sums(strided).gradients, wanted.gradients)


def test_the_bias_is_the_weight_of_a_constant_feature(backend: str) -> None:
    data = problem(3, 4, [5, 6])
    with_bias = Records.ragged(data.x, data.labels, data.offsets, bias=True)
    theta = torch.cat((data.theta, torch.randn(2, 3, 1)), 2)
    augmented = torch.cat((data.x, torch.ones(11, 1)), 1)
    explicit = Problem(augmented, data.labels, data.offsets, theta)
    assert with_bias.features == 5
    actual = glm.clipped_hessian_sum(with_bias, theta, HESSIAN_BOUND)
    assert torch.equal(actual, sums(explicit).hessians)
    check_sums(explicit)


@pytest.mark.parametrize("counts", [[], [0], [0, 0]])
def test_no_records_sum_to_zero(backend: str, counts: list[int]) -> None:
    data = problem(3, 4, counts, shared=True)
    result = sums(data)
    assert torch.equal(result.gradients, torch.zeros(len(counts), 3, 4))
    assert torch.equal(result.hessians, torch.zeros(len(counts), 12, 12))
    assert all(norms.shape == (0,) for norms in result.sq_norms)


def test_one_class_has_no_curvature(backend: str) -> None:
    data = problem(1, 4, [5])
    result = sums(data)
    assert not result.gradients.any() and not result.hessians.any()


# The compiled kernels alone: more records than one product takes, more features than one tile of
# its mirror, several blocks of both.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 19, [600, 257]), (2, 70, [40]), (12, 9, [130])], ids=str)
def test_large_clients(cpp: str, shape: tuple[int, int, list[int]], dtype: torch.dtype) -> None:
    check_sums(problem(*shape, dtype))


@given(
    classes=st.integers(1, 6),
    features=st.integers(1, 9),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(
    cpp: str, classes: int, features: int, counts: list[int], shared: bool, seed: int
) -> None:
    check_sums(problem(classes, features, counts, shared=shared, seed=seed))


def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int) -> None:
    data = problem(5, 12, [150, 3, 70, 0, 64])
    several = sums(data)
    torch.set_num_threads(1)
    alone = sums(data)
    assert torch.equal(several.hessians, alone.hessians)
    assert torch.equal(several.gradients, alone.gradients)
    assert all(torch.equal(a, b) for a, b in zip(several.sq_norms, alone.sq_norms, strict=True))
