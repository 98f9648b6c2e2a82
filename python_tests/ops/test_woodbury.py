"""Solves with a window of gradients: against the dense system, in one go and kept current."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels import backend as backends
from dpkernels.ops.sherman_morrison import GradientWindow, woodbury_solve
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("window_gram", "window_project", "window_combine_")

RHO = 0.7
SHAPES = [(1, 1), (1, 7), (3, 5), (5, 33), (17, 40)]


def problem(k: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return two windows ``[k, d]`` and a gradient ``[d]``; rows have norms of about 1."""
    generator = torch.Generator().manual_seed(100 * k + d)
    rows = torch.randn(2 * k + 1, d, generator=generator) / max(d, 1) ** 0.5
    rows = rows.to(dtype)
    return rows[:k].clone(), rows[k : 2 * k].clone(), rows[-1].clone()


def dense_solve(u: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Return the solution of the ``[d, d]`` system, float64."""
    u, v, g = u.double(), v.double(), g.double()
    return torch.linalg.solve(RHO * torch.eye(len(g), dtype=torch.float64) + u.T @ v, g)


def plain_solve(u: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Return Woodbury's formula in plain PyTorch, in the windows' own dtype."""
    system = RHO * torch.eye(len(u), dtype=u.dtype) + v @ u.T
    return (g - u.T @ torch.linalg.solve(system, v @ g)) / RHO


def check_solve(actual: Tensor, u: Tensor, v: Tensor, g: Tensor, exact: Tensor) -> None:
    """Assert accuracy; of float64, what float32 keeps of it."""
    plain = plain_solve(u, v, g)
    assert_as_accurate(actual.float(), plain.float(), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_it_solves_the_dense_system(backend: str, k: int, d: int, dtype: torch.dtype) -> None:
    u, v, g = problem(k, d, dtype)
    check_solve(woodbury_solve(u, g, rho=RHO), u, u, g, dense_solve(u, u, g))
    check_solve(woodbury_solve(u, g, rho=RHO, v=v), u, v, g, dense_solve(u, v, g))


@pytest.mark.parametrize(("k", "d"), [(3, 9001), (64, 20_000), (70, 300), (9, 100_003)])
def test_long_and_tall_windows(cpp: str, k: int, d: int) -> None:
    u, v, g = problem(k, d)
    for left in (u, v):
        actual = woodbury_solve(u, g, rho=RHO, v=None if left is u else v)
        check_solve(actual, u, left, g, plain_solve(u.double(), left.double(), g.double()))


@given(k=st.integers(1, 12), d=st.integers(1, 50), general=st.booleans())
def test_any_window(cpp: str, k: int, d: int, general: bool) -> None:
    u, v, g = problem(k, d)
    left = v if general else u
    actual = woodbury_solve(u, g, rho=RHO, v=v if general else None)
    check_solve(actual, u, left, g, dense_solve(u, left, g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_row_is_the_sherman_morrison_formula(backend: str, dtype: torch.dtype) -> None:
    (w,), _, g = problem(1, 29, dtype)

    def formula(w: Tensor, g: Tensor) -> Tensor:
        return g / RHO - w * (torch.dot(w, g) / (RHO**2 + RHO * torch.dot(w, w)))

    exact = formula(w.double(), g.double())
    actual = woodbury_solve(w.unsqueeze(0), g, rho=RHO)
    assert_as_accurate(actual.float(), formula(w, g).float(), exact)


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small integers: every sum of their products is exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def run(operation: str, *arguments: object) -> Tensor:
    """Call an operator on the backend that is set."""
    known = backends._operations[operation]
    first = next(x for x in arguments if isinstance(x, Tensor))
    result: Tensor = backends.select(known, first.device, first.dtype)(*arguments)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("k", "d"), [(1, 0), (1, 1), (4, 7), (18, 300), (5, 1025), (66, 70)])
def test_products_of_integers_are_exact(backend: str, k: int, d: int, dtype: torch.dtype) -> None:
    u, v, g = (whole_numbers(*s, dtype=dtype) for s in ((k, d), (k + 1, d), (d,)))
    v, wide = v[1:], [u.double(), v[1:].double(), g.double()]
    products = torch.cat((wide[0], wide[2].unsqueeze(0))).T
    assert torch.equal(run("window_gram", u, None, g), wide[0] @ products)
    assert torch.equal(run("window_gram", u, v, g), wide[1] @ products)
    assert torch.equal(run("window_project", u, g), wide[0] @ wide[2])
    weights, out = whole_numbers(k, dtype=torch.float64), torch.full((d,), math.nan, dtype=dtype)
    run("window_combine_", out, u, g, weights, 0.25)
    assert torch.equal(out.double(), (wide[2] - weights @ wide[0]) / 4)


def test_strides_do_not_change_the_result(backend: str) -> None:
    u, v, g = problem(4, 30)
    base = torch.zeros(9, 70)
    views = [base[:4, 3:33], base.view(-1)[1:601].view(30, 20).t()[:4], base[4:8, 5:65:2]]
    strided = torch.zeros(60)[::2].copy_(g)
    for view in views:
        view.copy_(u)
        actual = woodbury_solve(view, strided, rho=RHO, v=v.t().contiguous().t())
        check_solve(actual, u, v, g, dense_solve(u, v, g))
        check_solve(woodbury_solve(view, strided, rho=RHO), u, u, g, dense_solve(u, u, g))


def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int) -> None:
    u, v, g = problem(6, 50_001)
    several = [woodbury_solve(u, g, rho=RHO), woodbury_solve(u, g, rho=RHO, v=v)]
    torch.set_num_threads(1)
    assert torch.equal(several[0], woodbury_solve(u, g, rho=RHO))
    assert torch.equal(several[1], woodbury_solve(u, g, rho=RHO, v=v))


def test_a_result_goes_where_it_is_wanted(backend: str) -> None:
    u, _, g = problem(3, 20)
    out = torch.full((20,), math.nan)
    assert woodbury_solve(u, g, rho=RHO, out=out) is out
    assert torch.equal(out, woodbury_solve(u, g, rho=RHO))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_window_that_is_kept_current(backend: str, dtype: torch.dtype) -> None:
    window = GradientWindow(3, 40, rho=RHO, dtype=dtype)
    rows = problem(8, 40, dtype)[0]
    for step in range(8):
        window.push(rows[step])
        kept = rows[max(0, step - 2) : step + 1]
        assert len(window) == len(kept)
        for g in (rows[step], rows[0] + 1):
            check_solve(window.solve(g), kept, kept, g, dense_solve(kept, kept, g))


def test_the_gram_matrix_is_that_of_the_rows(backend: str) -> None:
    window = GradientWindow(4, 37, rho=RHO)
    for g in whole_numbers(11, 37):
        window.push(g)
        wide = window.rows.double()
        assert torch.equal(window.gram, wide @ wide.T)
        assert g.tolist() in window.rows.tolist()


def test_an_empty_window_divides_by_rho(backend: str) -> None:
    g, out = torch.linspace(-1, 1, 9), torch.full((9,), math.nan)
    window = GradientWindow(2, 9, rho=0.5)
    assert torch.equal(window.solve(g, out=out), 2 * g) and len(window) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_kept_out(backend: str, bad: float) -> None:
    window = GradientWindow(2, 9, rho=0.5)
    for g in whole_numbers(3, 9):
        window.push(g)
    before = (window.rows.clone(), window.gram.clone(), window.solve(torch.ones(9)))
    with pytest.raises(ValueError, match=r"^GradientWindow.push: g is not finite.*left as it was"):
        window.push(torch.tensor([bad, *[1.0] * 8]))
    after = (window.rows, window.gram, window.solve(torch.ones(9)))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_systems_that_cannot_be_solved(backend: str) -> None:
    g = torch.ones(3)
    twice = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"not positive definite.*norm is 3 and rho = 1e-30.*"):
        woodbury_solve(twice, g, rho=1e-30)
    window = GradientWindow(2, 3, rho=1e-30)
    window.push(g)
    with pytest.raises(ValueError, match=r"^GradientWindow.push: .*not positive definite"):
        window.push(g)
    assert len(window) == 1
    u, v = torch.zeros(1, 3), torch.zeros(1, 3)
    u[0, 1], v[0, 1] = 1.0, -RHO * (1 + 1e-9)
    with pytest.raises(ValueError, match=r"V U.T is singular to rounding.*raise rho"):
        woodbury_solve(u, g, rho=RHO, v=v)
    u[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"^woodbury_solve: u or v are not finite"):
        woodbury_solve(u, g, rho=RHO, v=v)
    with pytest.raises(ValueError, match=r"^woodbury_solve: .*look for NaN"):
        woodbury_solve(u, g, rho=RHO)


W, G = torch.ones(2, 3), torch.ones(3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"u": G}, r"u must be \[k, d\].*got \[3\]"),
        ({"u": W[:0]}, r"k >= 1, got \[0, 3\]"),
        ({"u": W.half(), "g": G.half()}, "u must be .*float16"),
        ({"g": W[0, :2]}, r"g must be \[3\] torch.float32 on cpu, got \[2\]"),
        ({"g": G.double()}, "g must be .*float64"),
        ({"v": W[:1]}, r"v must be \[2, 3\] .* like u, got \[1, 3\]"),
        ({"rho": 0.0}, "rho must be a finite number > 0"),
        ({"rho": math.nan}, "rho must be a finite number > 0"),
        ({"out": G[:2]}, r"out must be \[3\] contiguous.*got \[2\]"),
        ({"out": torch.ones(6)[::2]}, r"out must be .*strides \[2\]"),
        ({"out": G}, "out shares memory"),
        ({"out": torch.ones(3).requires_grad_()}, "out requires grad"),
    ],
)
def test_bad_input(backend: str, arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=f"^woodbury_solve: .*{match}"):
        woodbury_solve(**{"u": W, "g": G, "rho": RHO, **arguments})  # type: ignore[arg-type]
    assert (W == 1).all() and (G == 1).all()


def test_bad_windows(backend: str) -> None:
    with pytest.raises(ValueError, match=r"^GradientWindow: size must be >= 1"):
        GradientWindow(0, 3, rho=RHO)
    with pytest.raises(ValueError, match=r"^GradientWindow: dtype must be float32 or float64"):
        GradientWindow(2, 3, rho=RHO, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^GradientWindow: rho must be a finite number > 0"):
        GradientWindow(2, 3, rho=-1.0)
    window = GradientWindow(2, 3, rho=RHO)
    with pytest.raises(ValueError, match=r"^GradientWindow.push: g must be \[3\]"):
        window.push(torch.ones(4))
    with pytest.raises(ValueError, match=r"^GradientWindow.solve: g must be .*float64"):
        window.solve(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^GradientWindow.solve: out shares memory"):
        window.solve(G, out=G)
