"""The operators of Sherman-Morrison under ``opcheck`` and ``torch.compile``: no graph break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops.sherman_morrison import (
    rank_one_inverse_update_,
    sofim_step_,
    woodbury_solve,
)
from python_tests.conftest import running_on

OPERATIONS = (
    "sofim_step_",
    "rank_one_inverse_update_",
    "window_gram",
    "window_project",
    "window_combine_",
)

operators = torch.ops.dpkernels


@pytest.fixture(params=["reference", "cpp"])
def compilable(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the backends that can be compiled for CPU tensors; forget what was compiled."""
    torch._dynamo.reset()
    with running_on(request.param, OPERATIONS):
        yield request.param
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    check = torch.library.opcheck
    shapes = [(3, 4), (0,), (5,)]
    params, momentum, grads = ([torch.randn(s, dtype=dtype) for s in shapes] for _ in range(3))
    check(operators.sofim_step_.default, (params, momentum, grads, 0.9, 0.5, 0.1))
    inverse, u, v = (
        torch.eye(5, dtype=dtype),
        torch.rand(5, dtype=dtype),
        torch.rand(5, dtype=dtype),
    )
    check(operators.rank_one_inverse_update_.default, (inverse, u, None, 1e-6))
    check(operators.rank_one_inverse_update_.default, (inverse, u, v, 1e-6))
    window, g = torch.randn(3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    check(operators.window_gram.default, (window, None, g))
    check(operators.window_gram.default, (window, window + 1, g))
    check(operators.window_project.default, (window, g))
    weights = torch.randn(3, dtype=torch.float64)
    check(operators.window_combine_.default, (torch.empty_like(g), window, g, weights, 0.5))


def step(x: Tensor) -> Any:
    """A step over two tensors that are made in the graph, one used afterwards."""
    params, momentum = [x + 1, x[0] * 2], [x * 0.5, x[0] * 0]
    result = sofim_step_(params, momentum, [x, x[1].clone()], beta=0.9, rho=0.5, lr=0.1)
    return result.values, params[0] * 3, params[1], momentum


def update(x: Tensor) -> Any:
    """Both forms of the rank-one update."""
    inverse = torch.eye(x.shape[1])
    first = rank_one_inverse_update_(inverse, x[0])
    return first, rank_one_inverse_update_(inverse, x[0], x[1]), inverse * 2


def solve(x: Tensor) -> Any:
    """Both forms of the solve."""
    return woodbury_solve(x, x[0] + 1, rho=0.5), woodbury_solve(x, x[0] + 1, rho=0.5, v=x * 0.3)


@pytest.mark.parametrize("function", [step, update, solve])
def test_no_graph_break_and_the_same_result(
    compilable: str, function: Callable[[Tensor], Any]
) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for d in (6, 9):
        x = torch.linspace(-1, 1, 3 * d).view(3, d).contiguous()
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)


def test_a_refused_step_changes_nothing_under_compile(compilable: str) -> None:
    def nan_step(theta: Tensor, m: Tensor, g: Tensor) -> Tensor:
        return sofim_step_(theta, m, g, beta=0.9, rho=0.5, lr=0.1).values

    theta, m = torch.ones(4), torch.ones(4)
    compiled = torch.compile(nan_step, fullgraph=True, backend="aot_eager")
    values = compiled(theta, m, torch.tensor([1.0, torch.nan, 1.0, 1.0]))
    assert values[2] == 0 and (theta == 1).all() and (m == 1).all()


def test_bad_input_raises_under_compile(compilable: str) -> None:
    def wrong(x: Tensor) -> Any:
        return sofim_step_(x.clone(), x.clone(), x[:1], beta=0.9, rho=0.5, lr=0.1).values

    with pytest.raises(Exception, match=r"grads\[0\] must be"):
        torch.compile(wrong, backend="aot_eager")(torch.ones(3, 4))


def test_operators_called_directly_refuse_shared_memory(cpp: str) -> None:
    x = torch.ones(12)
    with pytest.raises(ValueError, match="shares memory"):
        operators.sofim_step_([x[:5]], [x[4:9]], [torch.ones(5)], 0.9, 0.5, 0.1)
    with pytest.raises(ValueError, match="shares memory"):
        operators.rank_one_inverse_update_(x[:9].view(3, 3), x[6:9], None, 1e-6)
    window, weights = x[:8].view(2, 4), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="shares memory"):
        operators.window_combine_(x[6:10], window, torch.ones(4), weights, 1.0)
    assert (x == 1).all()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sofim_step_", ([torch.ones(3)], [torch.ones(3)], [torch.ones(4)], 0.9, 0.5, 0.1)),
        ("sofim_step_", ([torch.ones(3)], [], [torch.ones(3)], 0.9, 0.5, 0.1)),
        ("rank_one_inverse_update_", (torch.eye(3), torch.ones(4), None, 1e-6)),
        ("rank_one_inverse_update_", (torch.ones(2, 3), torch.ones(2), None, 1e-6)),
        ("window_gram", (torch.ones(2, 3), torch.ones(3, 3), torch.ones(3))),
        ("window_project", (torch.ones(2, 3), torch.ones(4))),
        ("window_combine_", (torch.ones(3), torch.ones(2, 3), torch.ones(3), torch.ones(2), 1.0)),
    ],
)
def test_operators_called_directly_refuse_wrong_shapes(cpp: str, name: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        getattr(operators, name)(*arguments)
