"""Factors onto vectors and matrices: the product that the formulas say, on every backend."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from dpkernels.ops.kron import apply_factor, apply_kron
from python_tests.conftest import running_on
from python_tests.ops import kron_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("apply_factor_", "apply_kron_")


def check_factor(actual: Tensor, x: Tensor, side: Factor | None, bias: bool) -> None:
    """Assert that ``actual`` is ``x U`` or ``[x, 1] U``, as accurate as plain PyTorch."""
    wide = x.to(cases.sum_dtype(x.dtype))
    wide = cases.augmented(wide) if bias else wide
    assert_as_accurate(actual, cases.applied(wide, side), cases.applied(wide.double(), side))


def check_kron(actual: Tensor, x: Tensor, left: Factor | None, right: Factor | None) -> None:
    wide = x.to(cases.sum_dtype(x.dtype))
    plain, exact = (
        cases.applied_left(cases.applied(t, right), left) for t in (wide, wide.double())
    )
    assert_as_accurate(actual, plain, exact)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", cases.FORMS)
def test_rows_of_every_dtype(backend: str, form: str, bias: bool) -> None:
    for dtype in cases.DTYPES:
        side = cases.factor(form, 19 + bias, cases.sum_dtype(dtype))
        x = cases.numbers(35, 19, dtype=dtype)
        check_factor(apply_factor(x, side, bias=bias), x, side, bias)


@pytest.mark.parametrize("form", cases.FORMS)
def test_rows_of_every_size(backend: str, form: str) -> None:
    for (rows, size), bias in itertools.product([(0, 5), (33, 1), (1, 33)], [False, True]):
        # Exact inputs: a single row might be exact in plain PyTorch by luck.
        side = cases.factor(form, size + bias, torch.float64)
        x = cases.numbers(rows, size, dtype=torch.float64)
        check_factor(apply_factor(x, side, bias=bias), x, side, bias)


@pytest.mark.parametrize("form", cases.FORMS)
def test_float64_keeps_all_its_bits(backend: str, form: str) -> None:
    # 25 bits are one more than float32 has; with factors of 6 bits nothing is ever rounded.
    x = cases.numbers(4, 5, dtype=torch.float64, bits=25)
    for bias in (False, True):
        side = cases.factor(form, 5 + bias, torch.float64)
        wanted = cases.applied(cases.augmented(x) if bias else x, side)
        assert torch.equal(apply_factor(x, side, bias=bias), wanted)


@pytest.mark.parametrize("form", cases.FORMS)
def test_vectors_without_elements_are_their_bias(backend: str, form: str) -> None:
    side = cases.factor(form, 1, torch.float64)
    nothing = torch.empty(4, 0, dtype=torch.float64)
    expected = cases.applied(torch.ones(4, 1, dtype=torch.float64), side)
    assert torch.equal(apply_factor(nothing, side, bias=True), expected)
    assert apply_factor(torch.empty(4, 0), None).shape == (4, 0)


@pytest.mark.parametrize("rank", [0, 1, 16, 17, 40])
def test_any_rank(backend: str, rank: int) -> None:
    for bias in (False, True):
        side = cases.factor("low rank", 40 + bias, rank=rank)
        x = cases.numbers(21, 40)
        check_factor(apply_factor(x, side, bias=bias), x, side, bias)


def test_a_rank_that_does_not_fit_in_registers(backend: str) -> None:
    side = cases.factor("low rank", 131, rank=130)
    x = cases.numbers(9, 131)
    check_factor(apply_factor(x, side), x, side, False)


def strided(x: Tensor) -> list[Tensor]:
    """Return views that equal ``x`` but lie in memory in other ways."""
    every_other = torch.full((x.shape[0], 2 * x.shape[1]), 7.0, dtype=x.dtype)
    every_other[:, ::2] = x
    return [x.T.contiguous().T, every_other[:, ::2], torch.cat((x, x))[: len(x)]]


@pytest.mark.parametrize("form", cases.FORMS)
def test_strides_do_not_matter(backend: str, form: str) -> None:
    side, x = cases.factor(form, 11), cases.numbers(6, 11)
    for view in [*strided(x), x[:1].expand(6, 11)]:
        check_factor(apply_factor(view, side), view, side, False)
    if isinstance(side, Full):
        for matrix in strided(side.matrix):
            check_factor(apply_factor(x, Full(matrix)), x, side, False)
    if isinstance(side, LowRank):
        for vectors in strided(side.vectors):
            given = LowRank(vectors, torch.stack((side.values,) * 2, 1)[:, 0], side.tail)
            check_factor(apply_factor(x, given), x, side, False)


@pytest.mark.parametrize("bias", [False, True])
def test_leading_axes_and_buffers(backend: str, bias: bool) -> None:
    x = cases.numbers(2, 3, 5)
    for form in cases.FORMS:
        side = cases.factor(form, 5 + bias)
        flat = apply_factor(x.flatten(0, 1), side, bias=bias)
        out = torch.full((2, 3, 5 + bias), float("nan"))
        assert apply_factor(x, side, bias=bias, out=out) is out
        assert torch.equal(out.flatten(0, 1), flat)
        vector = apply_factor(x[0, 0], side, bias=bias)
        check_factor(vector.expand(2, -1), x[0, 0].expand(2, -1), side, bias)


@pytest.mark.parametrize("form", cases.FORMS)
def test_in_place(backend: str, form: str) -> None:
    rows, matrices = cases.numbers(4, 7), cases.numbers(3, 4, 7)
    left, right = cases.factor(form, 4), cases.factor(form, 7)
    for x, apply in (
        (rows, lambda x, **out: apply_factor(x, right, **out)),
        (rows.T.contiguous().T, lambda x, **out: apply_factor(x, right, **out)),
        (matrices, lambda x, **out: apply_kron(x, left, right, **out)),
    ):
        wanted = apply(x.clone())
        assert apply(x, out=x) is x
        assert torch.equal(x, wanted)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(cases.FORMS, cases.FORMS)))
def test_matrices_with_every_mix_of_forms(backend: str, left: str, right: str) -> None:
    sides = cases.factor(left, 7), cases.factor(right, 19)
    for count in (1, 5):
        x = cases.numbers(count, 7, 19)
        check_kron(apply_kron(x, *sides), x, *sides)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_matrices_of_every_dtype_and_size(backend: str, dtype: torch.dtype) -> None:
    for shape in [(0, 3, 4), (4, 0, 3), (6, 9, 1), (6, 1, 9), (2, 3, 5, 6), (17, 33)]:
        for form in ("full", "low rank"):
            sides = [cases.factor(form, size, cases.sum_dtype(dtype)) for size in shape[-2:]]
            x = cases.numbers(*shape, dtype=dtype)
            if x.numel() > 60 or dtype == torch.float64:
                check_kron(apply_kron(x, *sides), x, *sides)
            else:
                assert apply_kron(x, *sides).shape == x.shape


def test_on_a_rank_one_gradient_it_is_the_factors_on_its_vectors(backend: str) -> None:
    d, a = (cases.numbers(6, n, dtype=torch.float64, bits=3) for n in (5, 8))
    for forms in itertools.product(cases.FORMS, cases.FORMS):
        left, right = (
            cases.factor(form, n, torch.float64) for form, n in zip(forms, (5, 8), strict=True)
        )
        gradients = apply_kron(torch.einsum("bo,bi->boi", d, a), left, right)
        vectors = apply_factor(d, left), apply_factor(a, right)
        # No number has more than 52 bits on the way: both are exact.
        assert torch.equal(gradients, torch.einsum("bo,bi->boi", *vectors))


@given(
    rows=st.integers(1, 300),
    size=st.integers(1, 90),
    rank=st.integers(1, 40),
    bias=st.booleans(),
)
def test_any_shape_compiled(cpp: str, rows: int, size: int, rank: int, bias: bool) -> None:
    side = cases.factor("low rank", size + bias, torch.float64, rank)
    x = cases.numbers(rows, size, dtype=torch.float64)
    check_factor(apply_factor(x, side, bias=bias), x, side, bias)


def test_large_compiled_inputs_on_any_number_of_threads(cpp: str, threads: int) -> None:
    for bias in (False, True):
        side = cases.factor("low rank", 300 + bias, rank=33)
        x = cases.numbers(401, 300)
        check_factor(apply_factor(x, side, bias=bias), x, side, bias)
    x, sides = cases.numbers(7, 61, 97), (cases.factor("full", 61), cases.factor("full", 97))
    check_kron(apply_kron(x, *sides), x, *sides)


def test_nothing_is_written_but_out(backend: str) -> None:
    base = torch.full((3, 4, 6), 7.0)
    x, side = cases.numbers(4, 6), cases.factor("low rank", 6)
    apply_factor(x, side, out=base[1])
    assert (base[0] == 7).all() and (base[2] == 7).all()
    check_factor(base[1].clone(), x, side, False)


def test_gradients_do_not_flow(backend: str) -> None:
    x = cases.numbers(4, 6).requires_grad_()
    assert not apply_factor(x, cases.factor("full", 6)).requires_grad
    assert not apply_kron(x, cases.factor("full", 4), None).requires_grad


VECTORS = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("x", "side", "options", "match"),
    [
        (torch.tensor(1.0), None, {}, r"x must be \[\.\.\., n\]"),
        (VECTORS.long(), None, {}, "x must be .*float32.*int64"),
        (VECTORS, Diagonal(torch.ones(5)), {}, "factor must take vectors of 6 elements, got.*5"),
        (VECTORS, Full(torch.eye(6)), {"bias": True}, "must take vectors of 7 elements.*a bias"),
        (VECTORS, Full(torch.eye(6).double()), {}, "factor must be torch.float32"),
        (VECTORS.half(), Full(torch.eye(6).half()), {}, "factor must be torch.float32.*float16"),
        (VECTORS, Diagonal(torch.ones(6, device="meta")), {}, "factor must be .*on cpu.*meta"),
        (VECTORS, None, {"out": torch.ones(4, 5)}, r"out must be \[4, 6\].*got \[4, 5\]"),
        (VECTORS, None, {"out": torch.ones(4, 6).double()}, "out must be .*float32.*float64"),
        (VECTORS, None, {"out": torch.ones(6, 4).T}, "out must be contiguous.*strides"),
        (VECTORS, None, {"out": VECTORS.view(4, 6)}, "out shares memory"),
        (VECTORS, Diagonal(VECTORS[0]), {"out": VECTORS}, "out shares memory"),
        (VECTORS, None, {"out": torch.ones(4, 6).requires_grad_()}, "out requires grad"),
    ],
)
def test_bad_vectors(backend: str, x: Tensor, side: Any, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^apply_factor: .*{match}"):
        apply_factor(x, side, **options)


@pytest.mark.parametrize(
    ("x", "left", "right", "match"),
    [
        (torch.ones(4), None, None, r"x must be \[\.\.\., O, I\].*apply_factor"),
        (VECTORS, Full(torch.eye(6)), None, "left must take vectors of 4 elements, got one for 6"),
        (VECTORS, None, Full(torch.eye(4)), "right must take vectors of 6 elements, got one for 4"),
        (VECTORS.double(), None, Full(torch.eye(6)), "right must be torch.float64.*float32"),
    ],
)
def test_bad_matrices(backend: str, x: Tensor, left: Any, right: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^apply_kron: .*{match}"):
        apply_kron(x, left, right)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Full(torch.ones(2, 3)), r"Full: matrix must be \[n, n\], got \[2, 3\]"),
        (lambda: Diagonal(torch.ones(2, 2)), r"Diagonal: values must be \[n\]"),
        (lambda: LowRank(torch.ones(4, 2), torch.ones(3), 1.0), r"vectors must be \[n, r\]"),
    ],
)
def test_bad_factors(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_a_factor_is_its_dense_matrix() -> None:
    x = cases.numbers(5, 6, dtype=torch.float64)
    for form in cases.FORMS[1:]:
        side = cases.factor(form, 6, torch.float64)
        assert side is not None and side.size == 6
        assert torch.equal(x @ side.dense(), cases.applied(x, side))


operators = torch.ops.dpkernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    wide = cases.sum_dtype(dtype)
    matrix, vectors = cases.symmetric(6, wide), cases.numbers(6, 2, dtype=wide)
    sides: list[list[Tensor]] = [[], [matrix], [matrix[0]], [vectors, vectors[0]]]
    x = cases.numbers(5, 4, 6, dtype=dtype)
    for side in sides if dtype == torch.float32 else sides[1::2]:
        bare = [part[:, :] if part.dim() == 2 else part for part in side]
        out = torch.zeros(4, 6, dtype=wide)
        torch.library.opcheck(operators.apply_factor_.default, (out, x[0], bare, 0.5, False))
        torch.library.opcheck(operators.apply_factor_.default, (out, x[0, :, :5], bare, 0.5, True))
        out = torch.zeros(5, 6, 4, dtype=wide)
        arguments = (out, x.mT, bare, 0.5, [], 1.0)
        torch.library.opcheck(operators.apply_kron_.default, arguments)


@pytest.mark.parametrize("name", ["reference", "cpp"])
def test_no_graph_break(name: str) -> None:
    torch._dynamo.reset()
    left, right = cases.factor("full", 5), cases.factor("low rank", 9)
    assert isinstance(left, Full) and isinstance(right, LowRank)

    def flow(x: Tensor, matrix: Tensor, vectors: Tensor, values: Tensor) -> Any:
        low_rank = LowRank(vectors, values, 0.25)
        whole = apply_kron(x, Full(matrix), low_rank)
        return whole, apply_factor(whole, low_rank), apply_factor(x.mT, Diagonal(matrix[0]))

    with running_on(name, OPERATIONS):
        compiled = torch.compile(flow, fullgraph=True, backend="aot_eager")
        for count in (2, 3):
            arguments = (cases.numbers(count, 5, 9), left.matrix, right.vectors, right.values)
            torch.testing.assert_close(compiled(*arguments), flow(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: operators.apply_factor_(torch.ones(2, 4), torch.ones(2, 3), [], 1.0, False),
            "out",
        ),
        (
            lambda: operators.apply_factor_(
                torch.ones(2, 3), torch.ones(2, 3), [torch.ones(2)], 1.0, False
            ),
            "of size 3",
        ),
        (
            lambda: operators.apply_kron_(
                torch.ones(1, 2, 3), torch.ones(1, 2, 3), [torch.ones(2).double()], 1.0, [], 1.0
            ),
            "dtype",
        ),
    ],
)
def test_direct_calls_of_the_compiled_operators_are_checked(call: Any, match: str) -> None:
    with running_on("cpp", OPERATIONS), pytest.raises(ValueError, match=match):
        call()
