"""Inverse roots: as accurate as the plain form by ``torch.linalg.eigh``, by every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.factor import Full
from dpkernels.ops.roots import (
    eigh,
    inverse_root,
    inverse_root_factors,
    low_rank_inverse_root,
    reference,
)
from python_tests.conftest import running_on
from python_tests.ops import root_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("inverse_root",)
POWERS = [-0.5, -1.0, -0.25, -0.9]


@pytest.fixture(params=["reference", "cpp auto", "cpp eigh", "cpp tridiagonal"])
def solver(request: pytest.FixtureRequest) -> Any:
    """Return ``inverse_root`` on the reference, and on the compiled backend with every method."""
    backend, _, method = request.param.partition(" ")
    with running_on(backend, OPERATIONS):
        yield lambda matrices, **how: inverse_root(matrices, method=method or "auto", **how)


def check(actual: list[Tensor], matrices: list[Tensor], power: float, damping: float) -> None:
    """Hold all roots to the error of the plain form; the largest over all matrices counts."""
    plain = [cases.power_of(m, power, damping) for m in matrices]
    exact = [cases.power_of(m.double(), power, damping) for m in matrices]
    flat = [torch.cat([x.flatten() for x in xs]) for xs in (actual, plain, exact)]
    assert_as_accurate(*flat)
    assert all(torch.equal(x, x.mT) for x in actual) or power == 0


@pytest.mark.parametrize("power", POWERS)
def test_as_accurate_as_the_plain_form(solver: Any, power: float) -> None:
    # Around one panel, one block and one strip of the tridiagonal method, and below three.
    sizes = [1, 2, 3, 35, 67, 195]
    matrices = [cases.second_moment(n, 2 * n, torch.float32, seed=n) for n in sizes]
    check(solver(matrices, power=power, damping=1e-2), matrices, power, 1e-2)


def check_known_roots(sizes: list[int], root: int, seed: int, **how: Any) -> None:
    """Hold float64 roots to matrices whose roots have no rounding error.

    A + 1 has eigenvalues (2^k)^root, so that its power -1 / root has 2^-k, and A has the same in
    any basis that is ``exactly_rotated``.
    """
    matrices, plain, exact = [], [], []
    for index, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed + index)
        found = 2.0 ** torch.randint(0, 12 // root + 1, (n,), generator=generator).double()
        q, matrix = cases.exactly_rotated(found**root - 1, seed + index)
        matrices.append(matrix)
        plain.append(cases.power_of(matrix, -1 / root, 1.0))
        exact.append((q / found) @ q.T)
    actual = inverse_root(matrices, power=-1 / root, damping=1.0, **how)
    assert all(torch.equal(x, x.mT) for x in actual)
    assert_as_accurate(*(torch.cat([x.flatten() for x in xs]) for xs in (actual, plain, exact)))


@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize("method", ["reference", "auto", "eigh", "tridiagonal"])
def test_float64_roots_that_are_known(method: Any, root: int) -> None:
    backend, method = ("reference", "auto") if method == "reference" else ("cpp", method)
    with running_on(backend, OPERATIONS):
        check_known_roots([1, 2, 3, 35, 67, 195], root, seed=0, method=method)


@pytest.mark.parametrize("damping", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("power", [-0.5, -1.0])
def test_rank_deficient_matrices(solver: Any, power: float, damping: float) -> None:
    sizes = [5, 64, 65, 150]
    matrices = [cases.second_moment(n, n // 3, torch.float32, seed=n) for n in sizes]
    check(solver(matrices, power=power, damping=damping), matrices, power, damping)


def test_several_threads_for_one_matrix(cpp: str, threads: int) -> None:
    # Above 384 a matrix that is alone gets all threads, until what is left of it is smaller.
    matrix = cases.second_moment(390, 400, torch.float32)
    check([inverse_root(matrix, damping=1e-3)], [matrix], -0.5, 1e-3)


@pytest.mark.parametrize("n", [6, 70])
def test_positive_and_unusual_powers(solver: Any, n: int, request: Any) -> None:
    if "tridiagonal" in request.node.name:
        pytest.skip("takes powers from -1 to 0 only, which another test holds it to")
    matrix = cases.second_moment(n, 2 * n, torch.float32)
    for power in (0.5, 1.0, 2.0, -1.5, -2.0):
        check([solver(matrix, power=power, damping=0.1)], [matrix], power, 0.1)
    identity = solver(matrix, power=0.0, damping=0.0)
    check([identity], [matrix], 0.0, 0.0)


@pytest.mark.parametrize("n", [7, 100])
@pytest.mark.parametrize("exponent", [-100, 100])
def test_huge_and_tiny_matrices(solver: Any, n: int, exponent: int) -> None:
    matrix = cases.second_moment(n, n, torch.float32)
    factor = 2.0**exponent
    root = solver(matrix, power=-0.5, damping=0.125)
    scaled = solver(matrix * factor, power=-0.5, damping=0.125 * factor)
    # Powers of two change exponents only; the eigenvalues' power is rounded once.
    exact = cases.power_of(matrix.double(), -0.5, 0.125)
    assert_as_accurate(scaled * factor**0.5, root, exact)


@pytest.mark.parametrize("n", [9, 80])
@pytest.mark.parametrize("damping", [1e-20, 1e20])
def test_damping_beside_which_the_matrix_is_everything_or_nothing(
    solver: Any, n: int, damping: float
) -> None:
    matrix = cases.with_spectrum(torch.linspace(1, 2, n), torch.float32)
    check([solver(matrix, power=-0.5, damping=damping)], [matrix], -0.5, damping)


@pytest.mark.parametrize("n", [4, 90])
def test_zero_and_diagonal_matrices(solver: Any, n: int) -> None:
    diagonal = torch.diag(torch.linspace(0, 3, n))
    for matrix in (torch.zeros(n, n), diagonal):
        check([solver(matrix, power=-0.5, damping=0.25)], [matrix], -0.5, 0.25)


@pytest.mark.parametrize("n", [6, 90])
def test_slightly_negative_eigenvalues_count_as_zero(solver: Any, n: int) -> None:
    values = torch.linspace(-1e-4, 1, n)
    matrices = [cases.with_spectrum(values, torch.float32, seed) for seed in range(8)]
    check(solver(matrices, power=-0.5, damping=1e-5), matrices, -0.5, 1e-5)


@pytest.mark.parametrize("n", [6, 90, 150])
def test_negative_eigenvalues_above_the_damping_count_as_zero(solver: Any, n: int) -> None:
    # A + damping I is positive definite here: what counts as 0 is not what fails.
    values = torch.linspace(-5e-3, 1, n)
    matrices = [cases.with_spectrum(values, torch.float32, seed) for seed in range(8)]
    check(solver(matrices, power=-0.5, damping=1e-2), matrices, -0.5, 1e-2)


@pytest.mark.parametrize("n", [5, 80])
def test_a_singular_matrix_needs_damping(solver: Any, n: int) -> None:
    good = cases.with_spectrum(torch.linspace(1, 2, n), torch.float32)
    check([solver(good, power=-1.0, damping=0.0)], [good], -1.0, 0.0)
    for bad in (torch.zeros(n, n), cases.second_moment(n, n // 2, torch.float32)):
        with pytest.raises(ValueError, match=f"matrix 1 .*{n} x {n}.* is singular .*damping > 0"):
            solver([good, bad], power=-0.5, damping=0.0)
        with pytest.raises(ValueError, match=r"matrix 1 .* is singular .*damping > 0"):
            solver([good, bad], power=-1.0, damping=0.0)
        assert inverse_root(bad, power=0.5, damping=0.0).isfinite().all()


def test_each_matrix_has_its_own_damping(solver: Any) -> None:
    matrices = [cases.second_moment(n, 9, torch.float32) for n in (4, 70, 4)]
    dampings = [0.5, 0.25, 2.0]
    for root, matrix, damping in zip(
        solver(matrices, power=-0.5, damping=dampings), matrices, dampings, strict=True
    ):
        check([root], [matrix], -0.5, damping)


def test_a_batch_is_its_matrices_one_by_one(solver: Any) -> None:
    for n, many in ((6, 100), (70, 40)):  # so many that luck does not count
        batch = cases.second_moment(n, n, torch.float32, batch=many)
        roots = solver(batch, power=-0.5, damping=0.1)
        assert roots.shape == batch.shape
        check(list(roots), list(batch), -0.5, 0.1)
    assert solver(torch.empty(3, 0, 0), damping=1.0).shape == (3, 0, 0)
    assert solver([], damping=1.0) == []


@given(
    n=st.integers(1, 90),
    rank=st.integers(1, 120),
    alpha=st.floats(0.05, 1.0),
    exponent=st.floats(-4, 1),
)
def test_any_root_by_tridiagonal_form(
    n: int, rank: int, alpha: float, exponent: float, cpp: str
) -> None:
    damping = 10.0**exponent
    # A second one of full size: what is asked for must not hang on the luck of a small one.
    matrices = [cases.second_moment(m, r, torch.float32) for m, r in ((n, rank), (60, 30))]
    roots = inverse_root(matrices, power=-alpha, damping=damping, method="tridiagonal")
    check(roots, matrices, -alpha, damping)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("root", [1, 2, 4, 3])
def test_newton_schulz_finds_the_same_root(root: int, dtype: torch.dtype) -> None:
    matrices = [cases.second_moment(n, 2 * n, dtype) for n in (1, 7, 40)]
    found = inverse_root(matrices, power=-1 / root, damping=1e-2, method="newton_schulz")
    for x, matrix in zip(found, matrices, strict=True):
        identity = torch.eye(len(matrix), dtype=torch.float64)
        shifted = matrix.double() + 1e-2 * identity
        assert torch.equal(x, x.mT)
        # A root is judged by what it is to do: X^p (A + damping I) = I, to the residual at which
        # the iteration may stop.
        product = torch.linalg.matrix_power(x.double(), root) @ shifted
        assert (product - identity).abs().max() <= torch.finfo(dtype).eps ** 0.5


def test_newton_schulz_says_when_it_does_not_converge() -> None:
    good, bad = torch.eye(4), torch.diag(torch.tensor([1.0, 2.0, -0.5]))
    with pytest.raises(RuntimeError, match="did not converge for matrix 1 of the list"):
        inverse_root([good, bad], damping=0.0, method="newton_schulz")
    with pytest.raises(RuntimeError, match="did not converge"):
        inverse_root(torch.zeros(3, 3), damping=0.0, method="newton_schulz")


@pytest.mark.parametrize("rank", [0, 1, 5, 12, 99])
def test_low_rank_keeps_the_largest_eigenpairs(rank: int) -> None:
    matrix = cases.second_moment(12, 30, torch.float64)
    (factor,) = low_rank_inverse_root([matrix], rank, damping=0.1)
    kept = min(rank, 12)
    values, vectors = torch.linalg.eigh(matrix)
    tail = values[: 12 - kept].mean() if kept < 12 else torch.tensor(0.9)
    approximated = torch.cat((tail.expand(12 - kept), values[12 - kept :]))
    exact = (vectors * (approximated + 0.1).rsqrt()) @ vectors.T
    assert factor.vectors.shape == (12, kept)
    assert_as_accurate(
        factor.dense().float(), exact.float(), exact
    )  # a few float64 roundings are nothing beside one in float32


def test_low_rank_does_not_depend_on_the_scale() -> None:
    matrix = cases.second_moment(6, 30, torch.float64)
    for rank in (2, 6):
        (factor,) = low_rank_inverse_root([matrix], rank, damping=0.0)
        (scaled,) = low_rank_inverse_root([matrix * 2.0**100], rank, damping=0.0)
        assert torch.equal(scaled.values, factor.values * 2.0**-50)


def test_roots_of_eigenpairs_are_those_of_the_matrices(cpp: str) -> None:
    # On CUDA the pairs come from the kernel of eigh, the rest from here.
    matrices = [cases.second_moment(n, 2 * n, torch.float32, batch=2) for n in (5, 70)]
    values, vectors = eigh(matrices)
    roots = reference.power_of_pairs(values, vectors, -0.5, [0.1, 0.1])
    check([x for batch in roots for x in batch], [x for b in matrices for x in b], -0.5, 0.1)


def test_factors_are_sides_of_a_preconditioner() -> None:
    matrices = [cases.second_moment(n, 9, torch.float32) for n in (5, 70)]
    factors = inverse_root_factors(matrices, damping=0.1)
    assert all(isinstance(factor, Full) for factor in factors)
    assert all(
        torch.equal(factor.dense(), root)
        for factor, root in zip(factors, inverse_root(matrices, damping=0.1), strict=True)
    )


def test_the_root_of_the_eigenpairs_is_the_root() -> None:
    matrix = cases.second_moment(33, 40, torch.float32)
    values, vectors = eigh(matrix)
    rebuilt = (vectors * (values + 0.01).rsqrt()) @ vectors.mT
    exact = cases.power_of(matrix.double(), -0.5, 0.01)
    assert_as_accurate(inverse_root(matrix, damping=0.01, method="eigh"), rebuilt, exact)
