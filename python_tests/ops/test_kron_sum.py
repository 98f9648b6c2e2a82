"""``sum_i G_i X A_i``: what the formula says, for lists of layers, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.kron_sum import DiagonalFisher, KronFisher, kron_sum
from python_tests.conftest import running_on
from python_tests.ops.kron_cases import numbers
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("kron_sum_",)

Shapes = list[tuple[int, int]]


def problem(
    clients: int, shapes: Shapes, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Return gs, as_, x and centers for layers of these shapes."""
    gs = [numbers(clients, o, o, dtype=dtype, bits=6) for o, _ in shapes]
    as_ = [numbers(clients, i, i, dtype=dtype, bits=5) for _, i in shapes]
    xs = [numbers(o, i, dtype=dtype) for o, i in shapes]
    centers = [numbers(clients, o, i, dtype=dtype) for o, i in shapes]
    return gs, as_, xs, centers


def plain_sum(g: Tensor, a: Tensor, x: Tensor, centers: Tensor | None) -> Tensor:
    """The same computation in the dtype of the inputs: the clients add up in one long product."""
    halves = [g_i @ (x if centers is None else x - centers[i]) for i, g_i in enumerate(g)]
    return torch.cat(halves, 1) @ a.flatten(0, 1) if halves else torch.zeros_like(x)


def exact_sum(g: Tensor, a: Tensor, x: Tensor, centers: Tensor | None) -> Tensor:
    """The sum over clients, one by one, in float64."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for i in range(len(g)):
        difference = x.double() if centers is None else x.double() - centers[i].double()
        total += g[i].double() @ difference @ a[i].double()
    return total


def check(actual: Any, gs: Any, as_: Any, xs: Any, centers: Any) -> None:
    for layer, (g, a, x) in enumerate(zip(gs, as_, xs, strict=True)):
        center = None if centers is None else centers[layer]
        exact = exact_sum(g, a, x, center)
        assert_as_accurate(actual[layer], plain_sum(g, a, x, center), exact)


SHAPES: Shapes = [(6, 26), (16, 33), (40, 17), (1, 35), (33, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("clients", "centered"), [(1, True), (3, False), (2, True)])
def test_layers_in_one_call(backend: str, clients: int, centered: bool, dtype: torch.dtype) -> None:
    # One number of a 1 x 35 layer may be exact by luck in float32; all of float64 is exact.
    shapes = SHAPES if dtype == torch.float64 else SHAPES[:3]
    gs, as_, xs, centers = problem(clients, shapes, dtype)
    given_centers = centers if centered else None
    check(kron_sum(gs, as_, xs, given_centers), gs, as_, xs, given_centers)


def test_one_layer_is_a_list_of_one(backend: str) -> None:
    (g,), (a,), (x,), (w,) = problem(2, [(5, 9)])
    (together,) = kron_sum([g], [a], [x], [w])
    alone = kron_sum(g, a, x, w)
    assert isinstance(alone, Tensor) and torch.equal(alone, together)


def test_sizes_of_zero(backend: str) -> None:
    gs, as_, xs, centers = problem(2, [(0, 4), (4, 0), (3, 4)])
    outs = kron_sum(gs, as_, xs, centers)
    assert [list(out.shape) for out in outs] == [[0, 4], [4, 0], [3, 4]]
    check(outs[2:], gs[2:], as_[2:], xs[2:], centers[2:])
    gs, as_, xs, centers = problem(0, [(3, 4)])
    assert torch.equal(kron_sum(gs, as_, xs, centers)[0], torch.zeros(3, 4))
    assert kron_sum([], [], []) == []


def test_matrices_need_not_be_symmetric(backend: str) -> None:
    # The problem's matrices are not; transposing one changes the result.
    (g,), (a,), (x,), _ = problem(2, [(5, 9)], torch.float64)
    assert not torch.equal(kron_sum(g.mT, a, x), kron_sum(g, a, x))
    check([kron_sum(g.mT, a.mT, x)], [g.mT], [a.mT], [x], None)


def test_strides_do_not_matter(backend: str) -> None:
    gs, as_, xs, centers = problem(2, [(5, 9)], torch.float64)
    wanted = kron_sum(gs, as_, xs, centers)[0]
    strided = [t.mT.contiguous().mT for t in (gs[0], as_[0], xs[0], centers[0])]
    assert torch.equal(kron_sum(*strided), wanted)
    doubled = [torch.stack((t, t), -1)[..., 0] for t in (gs[0], as_[0], xs[0], centers[0])]
    assert torch.equal(kron_sum(*doubled), wanted)


def test_buffers_are_written_or_added_to(backend: str) -> None:
    gs, as_, xs, centers = problem(3, [(5, 9), (8, 4)], torch.float64)
    wanted = kron_sum(gs, as_, xs, centers)
    outs = [torch.full_like(x, float("nan")) for x in xs]
    found = kron_sum(gs, as_, xs, centers, out=outs)
    assert all(a is b for a, b in zip(found, outs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    kron_sum(gs, as_, xs, centers, out=outs, accumulate=True)
    assert all(torch.equal(a, 2 * b) for a, b in zip(outs, wanted, strict=True))


@given(
    clients=st.integers(0, 6),
    shapes=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4),
    centered=st.booleans(),
)
def test_any_shapes_compiled(cpp: str, clients: int, shapes: Shapes, centered: bool) -> None:
    gs, as_, xs, centers = problem(clients, shapes, torch.float64)
    given_centers = centers if centered else None
    check(kron_sum(gs, as_, xs, given_centers), gs, as_, xs, given_centers)


def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int) -> None:
    gs, as_, xs, centers = problem(5, [(6, 26), (120, 257), (84, 121), (10, 85)])
    several = kron_sum(gs, as_, xs, centers)
    check(several, gs, as_, xs, centers)
    torch.set_num_threads(1)
    one = kron_sum(gs, as_, xs, centers)
    assert all(torch.equal(a, b) for a, b in zip(several, one, strict=True))


def fisher(clients: int, shapes: Shapes) -> tuple[Any, Any, Any, Any]:
    """Return a problem with symmetric positive matrices, as Fishers are."""
    gs, as_, xs, centers = problem(clients, shapes, torch.float64)
    gs, as_ = ([t @ t.mT for t in ts] for ts in (gs, as_))
    return gs, as_, xs, centers


def test_it_is_half_the_gradient_of_the_objective(backend: str) -> None:
    gs, as_, xs, centers = fisher(3, [(4, 6), (5, 3)])
    weights = [x.clone().requires_grad_() for x in xs]
    loss = sum(
        (d @ torch.kron(g[i], a[i]) @ d)
        for g, a, w, c in zip(gs, as_, weights, centers, strict=True)
        for i in range(3)
        for d in [(w - c[i]).flatten()]
    )
    loss.backward()
    objective = KronFisher(gs, as_, centers)
    torch.testing.assert_close(objective.value(xs), loss.detach())
    halves = [w.grad / 2 for w in weights]
    torch.testing.assert_close(objective.gradient(xs), halves)
    torch.testing.assert_close(kron_sum(gs, as_, xs, centers), halves)
    outs = [torch.full_like(x, float("nan")) for x in xs]
    assert objective.gradient(xs, out=outs)[0] is outs[0]
    torch.testing.assert_close(outs, halves)


def test_the_cached_form_takes_one_layer_too(backend: str) -> None:
    (g,), (a,), (x,), (w,) = fisher(2, [(4, 6)])
    found = KronFisher(g, a, w).gradient(x)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, kron_sum(g, a, x, w))


def test_the_diagonal_form_is_its_sum_over_clients() -> None:
    f, w = numbers(3, 4, 5, dtype=torch.float64).square(), numbers(3, 4, 5, dtype=torch.float64)
    x = numbers(4, 5, dtype=torch.float64)
    wanted = (f * (x - w)).sum(0)
    torch.testing.assert_close(DiagonalFisher(f, w).gradient(x), wanted)
    torch.testing.assert_close(DiagonalFisher([f, f], [w, w]).gradient([x, x]), [wanted, wanted])
    with pytest.raises(ValueError, match="DiagonalFisher: fs and centers must have the same"):
        DiagonalFisher(f, w[:2])


G, A, X, W = torch.ones(2, 3, 3), torch.ones(2, 4, 4), torch.ones(3, 4), torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((G, A, X[0]), {}, r"x must be \[O, I\].*flatten a convolution"),
        ((G, A, X.half()), {}, "x must be .*float16"),
        ((G[0], A, X), {}, r"gs must be \[3, 3, 3\].*got \[3, 3\]"),
        ((A, A, X), {}, r"gs must be \[2, 3, 3\].*got \[2, 4, 4\]"),
        ((G, A[:1], X), {}, r"as_ must be \[2, 4, 4\].*got \[1, 4, 4\]"),
        ((G, A.double(), X), {}, "as_ must be .*float32.*float64"),
        ((G, A, X, W[:1]), {}, r"centers must be \[2, 3, 4\].*got \[1, 3, 4\]"),
        (([G, G], [A], [X]), {}, r"one tensor for each layer, got \[2, 1, 1\]"),
        (([G, G], [A, G], [X, X]), {}, "as_ of layer 1 must be"),
        ((G, A, X), {"accumulate": True}, "accumulate=True needs out"),
        ((G, A, X), {"out": torch.ones(4, 3)}, r"out must be \[3, 4\]"),
        ((G, A, X), {"out": torch.ones(4, 3).T}, "out must be contiguous.*strides"),
        ((G, A, X), {"out": X}, "out shares memory"),
        (([G], [A], [X]), {"out": [X, X]}, "out must have a tensor for each of 1 layers, got 2"),
        ((G, A, X), {"out": torch.ones(3, 4).requires_grad_()}, "out requires grad"),
    ],
)
def test_bad_input(backend: str, arguments: Any, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^kron_sum: .*{match}"):
        kron_sum(*arguments, **options)


def test_bad_steps() -> None:
    objective = KronFisher(G, A, W)
    with pytest.raises(ValueError, match=r"^KronFisher.gradient: x must be \[3, 4\]"):
        objective.gradient(X.T)
    with pytest.raises(ValueError, match=r"^KronFisher.gradient: out must be \[3, 4\]"):
        objective.gradient(X, out=X.T.contiguous())
    with pytest.raises(ValueError, match="out shares memory"):
        objective.gradient(X, out=X)
    with pytest.raises(ValueError, match=r"^KronFisher.value: x must be \[3, 4\].*got \[4\]"):
        objective.value(X[0])
    diagonal = DiagonalFisher(W, W)
    # Shapes that would broadcast.
    with pytest.raises(ValueError, match=r"^DiagonalFisher.gradient: x must be \[3, 4\]"):
        diagonal.gradient(X[:1])
    with pytest.raises(ValueError, match="a tensor for each of 1 layers, got 2"):
        diagonal.gradient([X, X])


def test_no_clients_and_no_layers() -> None:
    assert torch.equal(KronFisher(G[:0], A[:0], W[:0]).gradient(X), torch.zeros(3, 4))
    nothing = KronFisher([], [], [])
    assert nothing.gradient([]) == [] and nothing.value([]).item() == 0


def test_opcheck() -> None:
    gs, as_, xs, centers = problem(2, [(5, 9), (8, 4)])
    outs = [torch.zeros_like(x) for x in xs]
    for given_centers, accumulate in (([], False), (centers, True)):
        arguments = (outs, gs, as_, xs, given_centers, accumulate)
        torch.library.opcheck(torch.ops.dpkernels.kron_sum_.default, arguments)


@pytest.mark.parametrize("name", ["reference", "cpp"])
def test_no_graph_break(name: str) -> None:
    torch._dynamo.reset()
    gs, as_, xs, centers = problem(2, [(5, 9), (8, 4)])

    def step(xs: list[Tensor]) -> Any:
        return kron_sum(gs, as_, [x * 2 for x in xs], centers)

    with running_on(name, OPERATIONS):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(xs), step(xs), rtol=0, atol=0)


def test_direct_calls_of_the_compiled_operator_are_checked() -> None:
    operator = torch.ops.dpkernels.kron_sum_
    with running_on("cpp", OPERATIONS):
        for gs, xs in (([A], [X]), ([G, G], [X]), ([G.double()], [X]), ([G], [X[0]])):
            with pytest.raises(ValueError, match="kron_sum_: "):
                operator([torch.ones(3, 4)], gs, [A], xs, [], False)
        with pytest.raises(ValueError, match="shares memory"):
            operator([X], [G], [A], [X], [], False)
