"""Eigendecompositions: as accurate as LAPACK's on easy and difficult matrices, in any grouping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.roots import EIGH_METHODS, eigh
from python_tests.conftest import running_on
from python_tests.ops import root_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("eigh",)

# One and odd, around the lanes of a vector, and around the sizes that change the algorithm.
SIZES = [1, 2, 3, 8, 17, 33, 64, 65]
COMPILED = [method for method in EIGH_METHODS if method != "auto"]


@pytest.fixture(params=["reference", "cpp", *(f"cpp {method}" for method in COMPILED)])
def solver(request: pytest.FixtureRequest) -> Any:
    """Return ``eigh`` on the reference, and on the compiled backend with every method."""
    backend, _, method = request.param.partition(" ")
    with running_on(backend, OPERATIONS):
        yield lambda matrices: eigh(matrices, method=method or "auto")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_as_accurate_as_lapack(solver: Any, n: int, dtype: torch.dtype) -> None:
    matrices = cases.second_moment(n, 2 * n, dtype, batch=13)
    check(solver, matrices)


def check(solver: Any, matrices: Tensor | list[Tensor]) -> None:
    """Decompose in one call and hold every result to the tolerance."""
    values, vectors = solver(matrices)
    cases.check_eigh(list(values), list(vectors), list(matrices))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("n", [2, 5, 21, 64, 70])
def test_difficult_matrices(solver: Any, n: int, dtype: torch.dtype) -> None:
    check(solver, list(cases.difficult(n, dtype).values()))


@pytest.mark.parametrize("n", [2, 3, 7, 16, 33, 64, 70])
def test_float64_eigenvalues_that_are_known(solver: Any, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    spectra = [torch.randint(-100, 100, (n,), generator=generator).double() for _ in range(9)]
    spectra += [torch.ones(n).double(), torch.arange(n).double() % 2, torch.arange(n).double()]
    matrices = [cases.exactly_rotated(s, seed)[1] for seed, s in enumerate(spectra)]
    exact = torch.cat([s.sort().values for s in spectra])
    plain = torch.cat([torch.linalg.eigh(m).eigenvalues for m in matrices])
    assert_as_accurate(torch.cat(list(solver(matrices).values)), plain, exact)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_subnormal_elements(solver: Any, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    diagonal = torch.tensor([3.0, 1.0, -2.0, 5.0], dtype=dtype) * tiny
    assert diagonal.all()
    assert torch.equal(solver(torch.diag(diagonal)).values, diagonal.sort().values)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_instruction_set(cpp: str, dtype: torch.dtype) -> None:
    matrices = [*cases.second_moment(33, 20, dtype, batch=19), *cases.second_moment(6, 9, dtype, 5)]
    check(lambda m: eigh(m, method="ql"), matrices)


def test_diagonal_matrices_are_exact(solver: Any) -> None:
    diagonal = torch.tensor([3.0, -1.0, 0.0, 7.0, 2.0, 2.0, -5.0])
    values, vectors = solver(torch.diag(diagonal))
    assert torch.equal(values, diagonal.sort().values)
    assert torch.equal(vectors.abs().sum(0), torch.ones(7))
    assert torch.equal(torch.diag(diagonal) @ vectors, vectors * values)


@pytest.mark.parametrize("exponent", [-100, 100])
@pytest.mark.parametrize("n", [5, 40, 70])
def test_huge_and_tiny_elements_change_nothing(solver: Any, n: int, exponent: int) -> None:
    matrix = cases.second_moment(n, n, torch.float32)
    values, vectors = solver(matrix)
    scaled_values, scaled_vectors = solver(torch.ldexp(matrix, torch.tensor(exponent)))
    assert torch.equal(scaled_values, torch.ldexp(values, torch.tensor(exponent)))
    assert torch.equal(scaled_vectors, vectors)


def test_elements_of_very_different_sizes(solver: Any) -> None:
    steps = torch.linspace(-30, 0, 12)
    check(solver, [torch.diag(10.0**steps), cases.with_spectrum(10.0**steps, torch.float32)])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_list_of_many_sizes_is_its_matrices_one_by_one(
    solver: Any, threads: int, dtype: torch.dtype
) -> None:
    sizes = [3, 70, 1, 3, 0, 16, 3, 90, 16, 70]
    matrices = [cases.second_moment(n, 2 * n, dtype, seed=i) for i, n in enumerate(sizes)]
    values, vectors = solver(matrices)
    assert [list(v.shape) for v in vectors] == [[n, n] for n in sizes]
    cases.check_eigh(values, vectors, matrices)


def test_a_batch_in_a_list_and_alone(solver: Any) -> None:
    batch = cases.second_moment(9, 12, torch.float32, batch=11)
    alone, in_list = solver(batch), solver([batch[0], batch])
    assert in_list.values[0].shape == (9,) and in_list.vectors[0].shape == (9, 9)
    for values, vectors in (alone, (in_list.values[1], in_list.vectors[1])):
        assert values.shape == (11, 9) and vectors.shape == (11, 9, 9)
        cases.check_eigh(list(values), list(vectors), list(batch))
    cases.check_eigh([in_list.values[0]], [in_list.vectors[0]], [batch[0]])


@pytest.mark.parametrize("n", [12, 70])
def test_strides_do_not_matter(solver: Any, n: int) -> None:
    base = torch.full((2 * n, 3 * n), 7.0)
    view = base[1 : 2 * n : 2, 2 : 3 * n : 3]
    view.copy_(cases.second_moment(n, n, torch.float32))
    assert all(map(torch.equal, solver(view), solver(view.clone())))
    assert all(map(torch.equal, solver(view.T), solver(view.clone())))


@pytest.mark.parametrize("n", [7, 70])
def test_slight_asymmetry_is_averaged(solver: Any, n: int) -> None:
    matrix = cases.second_moment(n, 2 * n, torch.float64)
    skewed = matrix.clone()
    skewed.triu_(1).mul_(1 + 2.0**-14).add_(matrix.tril())
    average = (skewed + skewed.T) / 2
    assert not torch.equal(average, matrix)
    values, vectors = solver(skewed)
    cases.check_eigh([values], [vectors], [average])


def test_nothing_to_decompose(solver: Any) -> None:
    assert solver([]) == ([], [])
    values, vectors = solver(torch.empty(4, 0, 0))
    assert values.shape == (4, 0) and vectors.shape == (4, 0, 0)
    values, vectors = solver(torch.empty(0, 5, 5))
    assert values.shape == (0, 5) and vectors.shape == (0, 5, 5)


def test_what_is_given_is_not_written(solver: Any) -> None:
    matrices = [cases.second_moment(n, 5, torch.float32) for n in (4, 70)]
    before = [matrix.clone() for matrix in matrices]
    solver([matrix.requires_grad_() for matrix in matrices])
    assert all(map(torch.equal, matrices, before))


@given(
    n=st.integers(1, 40),
    count=st.integers(1, 11),
    rank=st.integers(1, 60),
    dtype=st.sampled_from(cases.DTYPES),
    method=st.sampled_from(EIGH_METHODS),
)
def test_any_shape_and_rank(
    n: int, count: int, rank: int, dtype: torch.dtype, method: Any, cpp: str
) -> None:
    # Two more of full rank: what is asked for must not hang on the luck of one small matrix.
    some = cases.second_moment(n, rank, dtype, batch=count)
    others = cases.second_moment(40, 80, dtype, batch=2)
    check(lambda m: eigh(m, method=method), [*some, *others])
