"""``tsvd`` refuses bad input with the reason, and works under opcheck and torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import dpkernels
from dpkernels.ops import tsvd
from python_tests.conftest import running_on
from python_tests.ops import tsvd_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = cases.OPERATIONS
NAN, INF = math.nan, math.inf

operators = torch.ops.dpkernels

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "soft_threshold": lambda tensors: tsvd.soft_threshold(tensors, 1.0),
    "singular_values": tsvd.singular_values,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ([], "tensors is an empty list; pass at least one"),
        (torch.ones(3, 4), r"tensors must be \[d, h, K\].*got \[3, 4\] float32.*stack the clients"),
        (torch.ones(3, 4, 2, 2), r"tensors must be \[d, h, K\].*got \[3, 4, 2, 2\]"),
        (torch.ones(3, 4, 2).half(), "tensors must be .*float32 or float64, got .*float16"),
        (torch.ones(3, 4, 2).long(), "tensors must be .*float32 or float64, got .*int64"),
        (torch.ones(3, 4, 2) + 0j, "tensors must be .*float32 or float64, got .*complex64"),
        (torch.ones(3, 4, 0), r"at least one client, got \[3, 4, 0\]"),
        ([torch.ones(3, 4, 2), torch.ones(3, 4, 2).double()], "share dtype and device.*float64"),
        ([torch.ones(3, 4, 2), torch.ones(3, 4, 2, device="meta")], "share dtype.*meta"),
    ],
)
def test_tensors(name: str, tensors: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
        FUNCTIONS[name](tensors)


@pytest.mark.parametrize(
    ("thresholds", "match"),
    [
        (-1.0, "thresholds must be a finite number >= 0, got -1"),
        (NAN, "thresholds must be a finite number >= 0, got nan"),
        ([1.0, INF], "thresholds must be a finite number >= 0, got inf"),
        ([1.0], "thresholds has 1 numbers for 2 tensors; pass one for all, or one for each"),
        ([], "thresholds has 0 numbers for 2 tensors"),
        ((1.0, 1.0, 1.0), "thresholds has 3 numbers for 2 tensors"),
    ],
)
def test_thresholds(thresholds: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^soft_threshold: {match}"):
        tsvd.soft_threshold([torch.ones(3, 4, 2), torch.ones(2, 2, 2)], thresholds)


# Infinities of both signs cancel in some slices, and the sums of 3e38 are not finite in float32.
BAD_VALUES = {"nan": [NAN], "infinity": [INF], "both": [INF, -INF], "overflow": [3e38, 3e38]}


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_that_are_not_finite_are_refused_by_layer(
    backend: str, name: str, kind: str
) -> None:
    values = torch.tensor(BAD_VALUES[kind])
    for bad, shape in enumerate([(5, 4, 3), (2, 7, 2), (101, 3, 4)]):
        tensors = [cases.clients(5, 4, 3), cases.clients(2, 7, 2), cases.clients(101, 3, 4)]
        tensors[bad][shape[0] - 1, shape[1] - 1, : len(values)] = values
        with pytest.raises(ValueError, match=rf"{name}: tensors\[{bad}\] has values that are not"):
            FUNCTIONS[name](tensors)


def test_the_gradient_stops_here(backend: str) -> None:
    x = cases.clients(5, 4, 3).requires_grad_()
    assert not tsvd.soft_threshold(x, 1.0).tensors.requires_grad
    assert not tsvd.singular_values(x).requires_grad


def test_operators_called_directly_refuse_what_they_cannot_take(cpp: str) -> None:
    x = cases.clients(4, 3, 2)
    for bad in (x.double(), x[:0], x[0]):
        with pytest.raises(ValueError, match=r"tensors must be \[d, h, K\] float32"):
            operators.tsvd_soft_threshold([bad], [1.0])
        with pytest.raises(ValueError, match=r"tensors must be \[d, h, K\] float32"):
            operators.tsvd_singular_values([bad])
    with pytest.raises(ValueError, match="one number for each"):
        operators.tsvd_soft_threshold([x, x], [1.0])
    for bad_threshold in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="thresholds must be > 0"):
            operators.tsvd_soft_threshold([x], [bad_threshold])


@pytest.mark.parametrize("layout", ["clients last", "clients first", "a part"])
def test_opcheck(layout: str) -> None:
    tensors = [cases.LAYOUTS[layout](cases.clients(*shape)) for shape in ((7, 3, 4), (3, 5, 5))]
    torch.library.opcheck(operators.tsvd_soft_threshold.default, (tensors, [2.0, 3.0]))
    torch.library.opcheck(operators.tsvd_singular_values.default, (tensors,))


@pytest.fixture(params=["reference", "cpp"])
def compilable(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the backends that can be compiled for CPU tensors, with nothing compiled before."""
    torch._dynamo.reset()
    with running_on(request.param, OPERATIONS):
        yield request.param
    torch._dynamo.reset()


def fold(tensors: list[Tensor]) -> Any:
    """Threshold layers, one of them by 0, and one of what comes out again; norms of both."""
    first = tsvd.soft_threshold([2 * x for x in tensors], [2.0, 0.0])
    second = tsvd.soft_threshold(first.tensors[0], 1.0)
    return first, second, tsvd.singular_values(tensors), tsvd.nuclear_norm(tensors)


def test_no_graph_break_and_the_same_result(compilable: str) -> None:
    compiled = torch.compile(fold, fullgraph=True, backend="aot_eager")
    for count in (4, 6, 7):
        tensors = [cases.clients(7, 5, count), cases.clients(3, 8, count).transpose(0, 1)]
        found, eager = tree_leaves(compiled(tensors)), tree_leaves(fold(tensors))
        with dpkernels.use_backend("reference"):
            exact = tree_leaves(fold([x.double() for x in tensors]))
        assert len(found) == len(eager) == len(exact) == 9
        for a, b, c in zip(found, eager, exact, strict=True):
            assert a.stride() == b.stride()
            if a.dtype == torch.int64:
                assert torch.equal(a, b)
            else:
                # The nuclear norm is a float64 sum of float32 numbers.
                assert_as_accurate(a.float(), b.float(), c)


def test_values_that_are_not_finite_are_refused_under_compile(compilable: str) -> None:
    compiled = torch.compile(fold, fullgraph=True, backend="aot_eager")
    tensors = [cases.clients(7, 5, 4), cases.clients(8, 3, 4)]
    compiled(tensors)
    tensors[0][0, 0, 0] = NAN
    with pytest.raises((ValueError, RuntimeError), match=r"tensors\[0\] has values that are not"):
        compiled(tensors)
