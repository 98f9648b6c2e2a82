"""The operators of the layers under ``opcheck`` and ``torch.compile``, and bad input refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops.factor import Diagonal, Full
from dpkernels.ops.ghost import (
    conv_clip_and_sum,
    conv_norms,
    conv_plan,
    embedding_clip_and_sum,
    scale_shift_clip_and_sum,
)
from python_tests.conftest import running_on

OPERATIONS = (
    "ghost_conv_norms",
    "ghost_embedding_sq_norms",
    "ghost_embedding_weighted_sum_",
    "ghost_scale_shift_grads",
    "row_sq_norms",
    "weighted_row_sum_",
    "clip_factors",
)

operators = torch.ops.dpkernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["reference", "cpp"])
def compilable(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the backends that can be compiled for CPU tensors."""
    with running_on(request.param, OPERATIONS):
        yield request.param


@pytest.mark.parametrize(("batch", "dtype"), [(0, torch.float32), (3, torch.bfloat16)])
def test_opcheck_of_the_conv_operator(batch: int, dtype: torch.dtype) -> None:
    x, d = torch.randn(batch, 4, 5, 6).to(dtype), torch.randn(batch, 2, 3, 3).to(dtype)
    geometry = ([3, 3], [2, 2], [1, 1], [1, 1], 2)
    check = torch.library.opcheck
    check(operators.ghost_conv_norms.default, (x, d, *geometry, True, None, "gram", False))
    scale = torch.rand(19, dtype=torch.float64)
    for keep, bias in ((True, True), (True, False), (False, True)):
        arguments = (x, d, *geometry, bias, scale, "materialised", keep)
        check(operators.ghost_conv_norms.default, arguments)


@pytest.mark.parametrize(("batch", "dtype"), [(0, torch.float32), (3, torch.float64)])
def test_opcheck_of_the_embedding_operators(batch: int, dtype: torch.dtype) -> None:
    indices, d = torch.randint(0, 5, (batch, 4)), torch.randn(batch, 4, 3, dtype=dtype)
    for scale in (None, torch.rand(5, dtype=torch.float64)):
        torch.library.opcheck(operators.ghost_embedding_sq_norms.default, (indices, d, scale, 5, 2))
        out, factors = torch.zeros(5, 3, dtype=dtype), torch.rand(batch, dtype=dtype)
        torch.library.opcheck(
            operators.ghost_embedding_weighted_sum_.default,
            (out, indices, d, factors, scale, -1, True),
        )


@pytest.mark.parametrize(("batch", "dtype"), [(0, torch.float32), (3, torch.float16)])
def test_opcheck_of_the_scale_and_shift_operator(batch: int, dtype: torch.dtype) -> None:
    x, d = torch.randn(batch, 4, 5).to(dtype), torch.randn(batch, 4, 5).to(dtype)
    for first, bias in ((False, True), (True, False)):
        scale = torch.rand(4 if first else 5, dtype=torch.float64)
        arguments = (x, d, first, bias, scale, None)
        torch.library.opcheck(operators.ghost_scale_shift_grads.default, arguments)


def conv_kept(x: Tensor) -> Any:
    """Gradients kept, diagonal right factor."""
    right = Diagonal(torch.linspace(0.5, 2.0, 28))
    result = conv_clip_and_sum(x, x[:, :2] * 2, 1.0, kernel_size=3, padding=1, right=right)
    return result.weight, result.bias, result.sq_norms, result.factors


def conv_again(x: Tensor) -> Any:
    """Gram formula, errors weighted for a second pass, dense left factor, buffer from outside."""
    left = Full(torch.eye(2) + 0.1)
    out, bias = torch.ones(2, 3, 3, 3), torch.ones(2)
    conv_clip_and_sum(x, x[:, :2] * 2, 1.0, kernel_size=3, padding=1, left=left, formula="gram",
                      out=out, bias_out=bias, accumulate=True)  # fmt: skip
    return out, bias


def conv_single(x: Tensor) -> Any:
    """One position."""
    result = conv_clip_and_sum(x, x[:, :2, :1, :1] * 2, 1.0, kernel_size=(4, 5))
    return result.weight, result.bias, result.sq_norms


def embedded(x: Tensor) -> Any:
    """An embedding of as many tokens as there are rows."""
    indices = torch.arange(4).expand(x.shape[0], 4) % 3
    result = embedding_clip_and_sum(indices, x[:, 0], 1.0, num_embeddings=3, padding_idx=1)
    return result.weight, result.sq_norms


def scaled(x: Tensor) -> Any:
    """Channels last, then first."""
    last = scale_shift_clip_and_sum(x, x + 1, 1.0)
    first = scale_shift_clip_and_sum(x, x + 1, 1.0, channel_axis=1, bias=False)
    return last.weight, last.bias, first.weight


@pytest.mark.parametrize("function", [conv_kept, conv_again, conv_single, embedded, scaled])
def test_no_graph_break_and_the_same_result(
    compilable: str, function: Callable[[Tensor], Any]
) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for batch in (3, 4):
        x = torch.randn(batch, 3, 4, 5)
        torch.testing.assert_close(compiled(x), function(x))


def test_bad_convolutions_are_refused_with_the_reason() -> None:
    x, d = torch.randn(2, 4, 6, 6), torch.randn(2, 6, 4, 4)
    eye = Full(torch.eye(6))
    refused: list[tuple[str, Callable[[], Any]]] = [
        (r"errors must be \[2, 6, 5, 5\]", lambda: conv_norms(x, d, kernel_size=2)),
        ("1 to 3 spatial axes", lambda: conv_norms(x[0, 0], d[0, 0], kernel_size=3)),
        ("1 to 3 spatial axes", lambda: conv_norms(x, d[:1], kernel_size=3)),
        ("one dtype", lambda: conv_norms(x, d.double(), kernel_size=3)),
        ("groups must divide", lambda: conv_norms(x, d, kernel_size=3, groups=3)),
        ("kernel_size must be one number", lambda: conv_norms(x, d, kernel_size=(3, 3, 3))),
        ("stride must be one number >= 1", lambda: conv_norms(x, d, kernel_size=3, stride=0)),
        ("pad the activations first",
         lambda: conv_norms(x, d, kernel_size=3, padding="same")),  # type: ignore[arg-type]
        ("no formula 'fast'", lambda: conv_norms(x, d, kernel_size=3, formula="fast")),
        ("one output position, there are 16",
         lambda: conv_norms(x, d, kernel_size=3, formula="rank_one")),
        ("'materialised' takes right factors",
         lambda: conv_norms(x, d, kernel_size=3, right=Full(torch.eye(36)), formula="gram")),
        ("left must act on vectors of 6", lambda: conv_norms(
            x, d, kernel_size=3, left=Full(torch.eye(5)))),
        ("right must act on vectors of 36 or 37",
         lambda: conv_plan((2, 4, 6, 6), (2, 6, 4, 4), kernel_size=3, right=eye)),
        ("but bias=False", lambda: conv_norms(
            x, d, kernel_size=3, right=Full(torch.eye(37)), bias=False)),
        ("leave grouped convolutions", lambda: conv_norms(
            x, d, kernel_size=3, groups=2, left=eye)),
        ("factors must be", lambda: conv_norms(x, d, kernel_size=3).weighted_sum(torch.ones(3))),
        ("with bias=False", lambda: conv_norms(x, d, kernel_size=3, bias=False).weighted_sum(
            torch.ones(2), bias_out=torch.ones(6))),
        ("out must be contiguous", lambda: conv_norms(x, d, kernel_size=3).weighted_sum(
            torch.ones(2), out=torch.ones(6, 4, 3))),
        ("needs out", lambda: conv_norms(x, d, kernel_size=3).weighted_sum(
            torch.ones(2), accumulate=True)),
        ("max_norm", lambda: conv_clip_and_sum(x, d, -1.0, kernel_size=3)),
    ]  # fmt: skip
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_operators_called_directly_check_their_memory(cpp: str) -> None:
    x, d = torch.randn(2, 4, 6, 6), torch.randn(2, 6, 4, 4)
    geometry = ([3, 3], [1, 1], [0, 0], [1, 1], 1)
    tail = (True, None, "materialised", False)
    with pytest.raises(ValueError, match="size that this convolution gives"):
        operators.ghost_conv_norms(x, d[..., :3], *geometry, *tail)
    with pytest.raises(ValueError, match="share B"):
        operators.ghost_conv_norms(x[:1], d, *geometry, *tail)
    scale = torch.ones(36, dtype=torch.float64)
    with pytest.raises(ValueError, match="one number for each column"):
        operators.ghost_conv_norms(x, d, *geometry, True, scale, "materialised", False)
    indices, errors = torch.tensor([[0, 7]]), torch.randn(1, 2, 3)
    with pytest.raises(IndexError, match=r"\[0, 7\)"):
        operators.ghost_embedding_sq_norms(indices, errors, None, 7, -1)
    with pytest.raises(IndexError, match=r"\[0, 5\)"):
        operators.ghost_embedding_weighted_sum_(
            torch.zeros(5, 3), indices, errors, torch.ones(1), None, -1, False
        )
    with pytest.raises(ValueError, match="shares memory"):
        operators.ghost_embedding_weighted_sum_(
            errors[0], 0 * indices, errors, torch.ones(1), None, -1, False
        )
    with pytest.raises(ValueError, match="one 3-D shape"):
        operators.ghost_scale_shift_grads(errors, errors[:, 1:], False, True, None, None)
