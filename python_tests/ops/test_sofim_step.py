"""The step of DP-FedSOFIM: the dense formula, one vector or a list, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops.sherman_morrison import sofim_step_
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("sofim_step_",)

BETA, RHO, LR = 0.9, 0.5, 0.3
NAN, INF = math.nan, math.inf
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
]

Tensors = list[Tensor]


def tensors(
    shapes: Sequence[int | tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensors, Tensors, Tensors]:
    """Return parameters, momentum and gradients of these shapes, the same in every call."""
    generator = torch.Generator().manual_seed(
        sum(map(math.prod, map(torch.Size, map(size, shapes))))
    )
    draws = [[torch.randn(size(s), generator=generator) for s in shapes] for _ in range(3)]
    params, momentum = ([x.to(dtype) for x in xs] for xs in draws[:2])
    return params, momentum, [g.to(grad_dtype or dtype) for g in draws[2]]


def size(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else shape


def plain_step(
    params: Tensors, momentum: Tensors, grads: Tensors, dtype: torch.dtype, beta: float = BETA
) -> tuple[Tensor, Tensor]:
    """Return parameters and momentum after a step, flat, in plain PyTorch of ``dtype``."""
    theta, m, g = (
        torch.cat([x.flatten().to(dtype) for x in xs]) for xs in (params, momentum, grads)
    )
    m = torch.lerp(m, g, 1 - beta)
    b = LR * torch.dot(m, g) / (RHO**2 + RHO * torch.dot(m, m))
    return theta - (LR / RHO) * g + b * m, m


def check_step(
    before: tuple[Tensors, Tensors, Tensors], params: Tensors, momentum: Tensors, beta: float = BETA
) -> None:
    """Assert that ``params`` and ``momentum`` are what a step makes of ``before``."""
    plain = plain_step(*before, params[0].dtype, beta)
    exact = plain_step(*before, torch.float64, beta)
    for actual, p, e in zip((params, momentum), plain, exact, strict=True):
        assert_as_accurate(torch.cat([x.flatten() for x in actual]), p, e)


def step_and_check(
    shapes: Sequence[int | tuple[int, ...]], dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    before = tensors(shapes, dtype, grad_dtype)
    params, momentum = ([x.clone() for x in xs] for xs in before[:2])
    sofim_step_(params, momentum, before[2], beta=BETA, rho=RHO, lr=LR)
    check_step(before, params, momentum)


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
@pytest.mark.parametrize("n", [1, 7, 33, 1024, 5001])
def test_one_vector(backend: str, n: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    step_and_check([n], dtype, grad_dtype)


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
@pytest.mark.parametrize("n", [16384, 16385, 100_003])
def test_vectors_longer_than_a_block(
    cpp: str, n: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    step_and_check([n], dtype, grad_dtype)


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_list_is_one_vector(backend: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    step_and_check([(3, 5), (), 0, 1025, (2, 0, 3), (4, 1, 2)], dtype, grad_dtype)


@given(shapes=st.lists(st.integers(0, 70), min_size=1, max_size=4), beta=st.floats(0, 0.99))
def test_any_list(cpp: str, shapes: list[int], beta: float) -> None:
    before = tensors(shapes)
    params, momentum = ([x.clone() for x in xs] for xs in before[:2])
    sofim_step_(params, momentum, before[2], beta=beta, rho=RHO, lr=LR)
    check_step(before, params, momentum, beta)


def test_the_step_is_that_of_the_dense_inverse(backend: str) -> None:
    (params,), (momentum,), (g,) = tensors([17], torch.float64)
    moved, m = params.clone(), momentum.clone()
    result = sofim_step_(moved, m, g, beta=BETA, rho=RHO, lr=LR)
    mean = BETA * momentum + (1 - BETA) * g
    fisher = RHO * torch.eye(17, dtype=torch.float64) + torch.outer(mean, mean)
    dense = params - LR * torch.linalg.solve(fisher, g)
    # float32 keeps what two float64 computations of the same thing agree in.
    assert_as_accurate(moved.float(), dense.float(), dense)
    assert_as_accurate(m.float(), mean.float(), mean)
    assert result.momentum_dot_grad == pytest.approx(torch.dot(mean, g).item(), rel=1e-12)
    assert result.momentum_sq_norm == pytest.approx(torch.dot(mean, mean).item(), rel=1e-12)
    assert result.applied


def test_no_elements_at_all_are_a_step(backend: str) -> None:
    result = sofim_step_(torch.ones(0), torch.ones(0), torch.ones(0), beta=BETA, rho=RHO, lr=LR)
    assert result.applied and result.values.tolist() == [0.0, 0.0, 1.0]


def test_strides_do_not_change_the_step(backend: str) -> None:
    before = tensors([(6, 5)])
    bases = [torch.full((20, 30), 7.0) for _ in range(3)]
    views = [bases[0][2:8, 3:8], bases[1].t()[1:19:3, 1:11:2], bases[2][:12:2, 4:9]]
    for view, source in zip(views, before, strict=True):
        view.copy_(source[0])
    sofim_step_(*views, beta=BETA, rho=RHO, lr=LR)
    check_step(before, [views[0]], [views[1]])
    assert torch.equal(views[2], before[2][0])
    for base, view in zip(bases, views, strict=True):
        view.fill_(7.0)
        assert (base == 7.0).all(), "something beside the view was written"


def test_channels_last_goes_without_a_copy(backend: str) -> None:
    before = tensors([(2, 3, 4, 5)])
    last = [x[0].contiguous(memory_format=torch.channels_last).clone() for x in before]
    sofim_step_(*last, beta=BETA, rho=RHO, lr=LR)
    check_step(before, last[:1], last[1:2])
    # One of the three in another order.
    mixed = [last[0].copy_(before[0][0]), before[1][0].clone(), last[2]]
    sofim_step_(*mixed, beta=BETA, rho=RHO, lr=LR)
    check_step(before, mixed[:1], mixed[1:2])


def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int) -> None:
    shapes = [70_003, 5, 40_000]
    results = []
    for count in (threads, 1):
        torch.set_num_threads(count)
        params, momentum, grads = tensors(shapes)
        values = sofim_step_(params, momentum, grads, beta=BETA, rho=RHO, lr=LR).values
        results.append([*params, *momentum, values])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["grads", "momentum"])
def test_what_is_not_finite_changes_nothing(backend: str, where: str, bad: float) -> None:
    params, momentum, grads = tensors([40, 3, 1030])
    (grads if where == "grads" else momentum)[2][1029] = bad
    before = [x.clone() for x in [*params, *momentum]]
    with pytest.raises(ValueError, match=r"sofim_step_: grads or momentum are not finite.*nothing"):
        sofim_step_(params, momentum, grads, beta=BETA, rho=RHO, lr=LR)
    result = sofim_step_(params, momentum, grads, beta=BETA, rho=RHO, lr=LR, check=False)
    assert not result.applied and not math.isfinite(result.momentum_sq_norm)
    for now, then in zip([*params, *momentum], before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_a_coefficient_that_overflows_changes_nothing(backend: str) -> None:
    g = torch.tensor([1e10])
    momentum = g * (2.0**-20 - 1)  # beta = 1/2 leaves M = 2^-21 G: M.G / |M|^2 = 2^21
    theta = torch.tensor([3.0])
    result = sofim_step_(theta, momentum, g, beta=0.5, rho=1e-30, lr=1e3, check=False)
    assert math.isfinite(result.momentum_dot_grad) and not result.applied
    assert theta.item() == 3.0 and momentum.item() == (g * (2.0**-20 - 1)).item()


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_small_and_large_gradients(backend: str, scale: float) -> None:
    params, momentum, grads = tensors([300])
    before = (params, [momentum[0] * scale], [grads[0] * scale])
    moved, m = params[0].clone(), before[1][0].clone()
    sofim_step_(moved, m, before[2][0], beta=BETA, rho=RHO, lr=LR)
    exact = plain_step(*before, torch.float64)
    # float32 dot products overflow here: plain PyTorch takes them in float64 and rounds the result.
    assert_as_accurate(moved, exact[0].float(), exact[0])
    assert_as_accurate(m, torch.lerp(before[1][0], before[2][0], 1 - BETA), exact[1])


X = torch.ones(3, 2)
GOOD = {"beta": BETA, "rho": RHO, "lr": LR}


@pytest.mark.parametrize(
    ("params", "momentum", "grads", "match"),
    [
        ([], [], [], "lists of one length, at least 1, got 0, 0 and 0"),
        ([X], [X, X], [X], "lists of one length.*1, 2 and 1"),
        (X.half(), X.half(), X.half(), "params must be float32 or float64, got torch.float16"),
        (X, X.double(), X, r"momentum\[0\] must be \[3, 2\] torch.float32.*float64"),
        (X, X, X.double(), "grads must be torch.float32 or torch.bfloat16.*got torch.float64"),
        (X.double(), X.double(), X, "grads must be torch.float64 beside.*got torch.float32"),
        (X, X[:2], X, r"momentum\[0\] must be \[3, 2\].*got \[2, 2\]"),
        ([X, X], [X, X], [X, X.t()], r"grads\[1\] must be \[3, 2\].*got \[2, 3\]"),
        (X, X, X.to("meta"), r"grads\[0\] must be .* on cpu.*on meta"),
        ([X, X.double()], [X, X], [X, X], r"params\[1\] must be .*float32.*float64"),
    ],
)
def test_bad_tensors(backend: str, params, momentum, grads, match: str) -> None:
    def copies(xs):
        return [x.clone() for x in xs] if isinstance(xs, list) else xs.clone()

    with pytest.raises(ValueError, match=f"^sofim_step_: .*{match}"):
        sofim_step_(copies(params), copies(momentum), copies(grads), **GOOD)


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"beta": -0.1}, "beta must be"),
        ({"beta": NAN}, "beta must be"),
        ({"rho": 0.0}, "rho must be a finite number > 0"),
        ({"rho": INF}, "rho must be a finite number > 0"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
        ({"lr": NAN}, "lr must be a finite number >= 0"),
        ({"lr": 1e10, "rho": 1e-30}, "lr / rho must be a finite number of torch.float32"),
    ],
)
def test_bad_numbers(backend: str, numbers: dict[str, float], match: str) -> None:
    theta, m = X.clone(), X.clone()
    with pytest.raises(ValueError, match=f"^sofim_step_: {match}"):
        sofim_step_(theta, m, X, **{**GOOD, **numbers})
    assert torch.equal(theta, X) and torch.equal(m, X)


def test_memory_that_cannot_be_written(backend: str) -> None:
    buffer = torch.ones(20)
    with torch.inference_mode():
        inference = torch.ones(6)
    refused = [
        (buffer[:6], buffer[5:11], torch.ones(6), "params and momentum shares memory"),
        (buffer[:6], buffer[10:16], buffer[4:10], "params shares memory"),
        (torch.ones(6), buffer[:6], buffer[:6], "momentum shares memory"),
        (torch.ones(1).expand(6), torch.ones(6), torch.ones(6), "params .*several elements"),
        (torch.ones(6), torch.ones(6).requires_grad_(), torch.ones(6), "momentum requires grad"),
        (inference, torch.ones(6), torch.ones(6), "params is an inference tensor"),
    ]
    for params, momentum, grads, match in refused:
        with pytest.raises(ValueError, match=f"^sofim_step_: {match}"):
            sofim_step_(params, momentum, grads, **GOOD)
    assert (buffer == 1).all()
