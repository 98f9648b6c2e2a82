"""The inverse after a rank-one change: against the inverse itself, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.sherman_morrison import rank_one_inverse_update_
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("rank_one_inverse_update_",)


def problem(n: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a well-conditioned ``[n, n]`` inverse, u, and v where it is not symmetric."""
    generator = torch.Generator().manual_seed(n)
    noise = torch.randn(n, n, generator=generator) / (2 * max(n, 1) ** 0.5)
    inverse = 2 * torch.eye(n) + (noise + noise.T) / 2
    u, v = torch.randn(2, n, generator=generator) / max(n, 1) ** 0.5
    if not symmetric:
        inverse += noise.triu(1)
    return inverse.to(dtype), u.to(dtype), None if symmetric else v.to(dtype)


def plain_update(inverse: Tensor, u: Tensor, v: Tensor | None) -> Tensor:
    p, q = inverse @ u, inverse.T @ (u if v is None else v)
    return inverse - torch.outer(p, q) / (1 + torch.dot(u if v is None else v, p))


def check_update(actual: Tensor, inverse: Tensor, u: Tensor, v: Tensor | None) -> None:
    exact = plain_update(inverse.double(), u.double(), None if v is None else v.double())
    assert_as_accurate(actual, plain_update(inverse, u, v), exact)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 33])
def test_the_formula(backend: str, n: int, symmetric: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        inverse, u, v = problem(n, symmetric, dtype)
        actual = inverse.clone()
        denominator = rank_one_inverse_update_(actual, u, v)
        if dtype == torch.float32:
            check_update(actual, inverse, u, v)
        else:  # float32 keeps what two float64 computations of the same thing agree in
            exact = plain_update(inverse, u, v)
            assert_as_accurate(actual.float(), exact.float(), exact)
        terms = (u if v is None else v).double() * (inverse.double() @ u.double())
        # Each term is a product of n rounded ones.
        rounding = (n + 1) * torch.finfo(dtype).eps * (1 + terms.abs().sum().item())
        assert abs(denominator.item() - (1 + terms.sum().item())) <= rounding
        assert not symmetric or torch.equal(actual, actual.T)


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_is_the_inverse_of_the_sum(backend: str, symmetric: bool) -> None:
    inverse, u, v = problem(19, symmetric, torch.float32)
    wide, left, right = inverse.double(), u.double(), (u if v is None else v).double()
    exact = torch.linalg.inv(torch.linalg.inv(wide) + torch.outer(left, right))
    plain = plain_update(inverse, u, v)
    rank_one_inverse_update_(inverse, u, v)
    assert_as_accurate(inverse, plain, exact)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_matrix_wider_than_a_block(backend: str, symmetric: bool) -> None:
    inverse, u, v = problem(260, symmetric, torch.float32)
    actual = inverse.clone()
    rank_one_inverse_update_(actual, u, v)
    check_update(actual, inverse, u, v)
    assert not symmetric or torch.equal(actual, actual.T)


@given(n=st.integers(1, 90), symmetric=st.booleans())
def test_any_size(cpp: str, n: int, symmetric: bool) -> None:
    inverse, u, v = problem(n, symmetric, torch.float32)
    actual = inverse.clone()
    rank_one_inverse_update_(actual, u, v)
    check_update(actual, inverse, u, v)


def test_columns_may_come_first_and_vectors_be_strided(backend: str) -> None:
    inverse, u, v = problem(40, False, torch.float32)
    assert v is not None
    actual = inverse.T.contiguous().T
    rank_one_inverse_update_(actual, torch.stack((u, v), 1)[:, 0], torch.stack((u, v), 1)[:, 1])
    assert actual.stride() == (1, 40)
    check_update(actual, inverse, u, v)


@pytest.mark.parametrize("symmetric", [True, False])
def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int, symmetric: bool) -> None:
    results = []
    for count in (threads, 1):
        torch.set_num_threads(count)
        inverse, u, v = problem(515, symmetric, torch.float32)
        rank_one_inverse_update_(inverse, u, v)
        results.append(inverse)
    assert torch.equal(*results)


def test_a_negative_denominator_is_no_obstacle(backend: str) -> None:
    # A symmetric inverse that is not positive definite: 1 + u^T H u = 1 - 4.
    inverse = torch.diag(torch.tensor([-1.0, 2.0]))
    assert rank_one_inverse_update_(inverse, torch.tensor([2.0, 0.0])).item() == -3.0
    assert_as_accurate(
        inverse,
        torch.diag(torch.tensor([1 / 3, 2.0])),
        torch.diag(torch.tensor([1 / 3, 2.0])).double(),
    )


@pytest.mark.parametrize("off", [0.0, 1e-9])
def test_a_singular_sum_is_refused(backend: str, off: float) -> None:
    inverse = torch.eye(5)
    u, v = torch.zeros(5), torch.zeros(5)
    u[2], v[2] = 1.0 + off, -1.0
    with pytest.raises(ValueError, match=r"singular to rounding: 1 .* H u = .*was left as it was"):
        rank_one_inverse_update_(inverse, u, v)
    assert abs(rank_one_inverse_update_(inverse, u, v, check=False).item()) <= 1e-6
    assert torch.equal(inverse, torch.eye(5))
    negative = -torch.eye(5)
    with pytest.raises(ValueError, match="singular to rounding"):
        rank_one_inverse_update_(negative, u)
    assert torch.equal(negative, -torch.eye(5))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("where", ["inverse", "u"])
def test_what_is_not_finite_is_refused(backend: str, where: str, symmetric: bool) -> None:
    inverse, u, v = problem(7, symmetric, torch.float32)
    if where == "u":
        u[3] = math.inf
    else:
        inverse[2, 3] = inverse[3, 2] = math.nan
    before = inverse.clone()
    with pytest.raises(ValueError, match=r"not finite .*was left as it was"):
        rank_one_inverse_update_(inverse, u, v)
    torch.testing.assert_close(inverse, before, rtol=0, atol=0, equal_nan=True)


EYE, ONES = torch.eye(3), torch.ones(3)


@pytest.mark.parametrize(
    ("inverse", "u", "v", "match"),
    [
        (ONES, ONES, None, r"inverse must be \[n, n\].*got \[3\]"),
        (EYE[:2], ONES, None, r"inverse must be \[n, n\].*got \[2, 3\]"),
        (EYE.half(), ONES.half(), None, "inverse must be .*float16"),
        (
            torch.eye(6)[::2, ::2],
            ONES,
            None,
            r"contiguous by rows or by columns.*strides \[12, 2\]",
        ),
        (EYE, ONES[:2], None, r"u must be \[3\] torch.float32 on cpu, got \[2\]"),
        (EYE, ONES, ONES.double(), r"v must be \[3\] torch.float32.*float64"),
        (EYE, ONES, EYE, r"v must be \[3\].*got \[3, 3\]"),
        (EYE, EYE[0], None, "inverse shares memory"),
        (torch.eye(3).requires_grad_(), ONES, None, "inverse requires grad"),
    ],
)
def test_bad_input(backend: str, inverse: Tensor, u: Tensor, v: Tensor | None, match: str) -> None:
    before = inverse.detach().clone()
    with pytest.raises(ValueError, match=f"^rank_one_inverse_update_: .*{match}"):
        rank_one_inverse_update_(inverse, u, v)
    assert torch.equal(inverse.detach(), before)
