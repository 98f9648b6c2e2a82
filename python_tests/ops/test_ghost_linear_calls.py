"""Linear layers: bad input is refused with the reason; the plan; compilation; Triton's splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops import ghost
from dpkernels.ops.factor import Diagonal, Full, LowRank
from dpkernels.ops.ghost import triton_linear
from dpkernels.ops.ghost.linear_plan import Sizes, stores_gradients
from python_tests.conftest import running_on
from python_tests.ops import ghost_linear_cases as cases
from python_tests.tolerance import assert_never_low

OPERATIONS = cases.OPERATIONS
operators = torch.ops.dpkernels

A, D = torch.ones(3, 2, 5), torch.ones(3, 2, 4)


@pytest.mark.parametrize(
    ("activations", "errors", "arguments", "match"),
    [
        (torch.ones(3), D, {}, r"activations must be \[B, \*, I\].*got \[3\] float32"),
        (A.long(), D, {}, "activations must be .*int64"),
        (A, torch.ones(3, 3, 4), {}, r"errors must be \[3, 2, 'O'\].*got \[3, 3, 4\]"),
        (A, D.double(), {}, "errors must be .*float32.*got .*float64"),
        (A, D.to("meta"), {}, "errors must be .*on cpu.*got .*meta"),
        (A, D, {"formula": "ghost"}, "no formula 'ghost'; there are auto, rank_one, gram"),
        (A, D, {"formula": "rank_one"}, "'rank_one' needs one position.*got 2.*use 'gram'"),
        (A, D, {"left": Full(torch.eye(5))}, "left must act on vectors of 4 elements, got 5"),
        (A, D, {"right": Full(torch.eye(4))}, "right must act on vectors of 5 or 6 .*got 4"),
        (A, D, {"right": Diagonal(torch.ones(7))}, "right must act on vectors of 5 or 6 .*got 7"),
        (A, D, {"left": Full(torch.eye(4).double())}, "left must be .*float32.*got .*float64"),
        (
            A,
            D,
            {"left": LowRank(torch.ones(4, 1), torch.ones(1).double(), 1.0)},
            "left must be .*float32.*float64",
        ),
        (
            A,
            D,
            {"right": Full(torch.eye(6)), "bias": False},
            r"right has size 6 = I \+ 1, which includes the bias, but bias is False",
        ),
    ],
)
def test_bad_input_of_norms(
    backend: str, activations: Tensor, errors: Tensor, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=f"linear_norms: .*{match}"):
        ghost.linear_norms(activations, errors, **arguments)


ONES = torch.ones(3)
BAD_SUMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "factors": (lambda: {"factors": torch.ones(4)}, r"factors must be \[3\].*got \[4\]"),
    "wide": (lambda: {"factors": ONES.double()}, "factors must be .*float32.*clip_factors"),
    "shape": (lambda: {"out": torch.ones(5, 4)}, r"out must be contiguous \[4, 5\].*got \[5, 4\]"),
    "dtype": (lambda: {"out": torch.ones(4, 5).half()}, "out must be .*float32.*got .*float16"),
    "strides": (lambda: {"out": torch.ones(5, 4).t()}, r"out must be contiguous.*strides \[1, 4\]"),
    "bias": (lambda: {"bias_out": torch.ones(5)}, r"bias_out must be contiguous \[4\].*got \[5\]"),
    "nothing": (lambda: {"accumulate": True}, "accumulate=True needs out"),
    "no bias": (
        lambda: {"accumulate": True, "out": torch.ones(4, 5)},
        "accumulate=True needs bias_out",
    ),
    "grad": (lambda: {"out": torch.ones(4, 5, requires_grad=True)}, "out requires grad"),
}


@pytest.mark.parametrize("formula", cases.FORMULAS)
@pytest.mark.parametrize("name", BAD_SUMS)
def test_bad_input_of_sums(backend: str, name: str, formula: str) -> None:
    make, match = BAD_SUMS[name]
    norms = ghost.linear_norms(A, D, formula=formula)
    arguments = {"factors": ONES, **make()}
    before = {k: v.detach().clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    with pytest.raises(ValueError, match=f"weighted_sum: {match}"):
        norms.weighted_sum(arguments.pop("factors"), **arguments)
    assert all(torch.equal(v, before[k]) for k, v in arguments.items() if isinstance(v, Tensor))


def test_outputs_share_no_memory(backend: str) -> None:
    a, d, both = torch.ones(3, 2, 5), torch.ones(3, 2, 4), torch.zeros(5, 5)
    norms = ghost.linear_norms(a, d, formula="gram")
    for out, bias_out in ((a.view(-1)[:20].view(4, 5), None), (both[:4], both[3, :4])):
        with pytest.raises(ValueError, match=r"weighted_sum: (bias_)?out shares memory"):
            norms.weighted_sum(ONES, out=out, bias_out=bias_out)
    with pytest.raises(ValueError, match=r"bias_out was passed, but .* bias=False"):
        ghost.linear_norms(a, d, bias=False).weighted_sum(ONES, bias_out=torch.zeros(4))


def test_operators_called_directly_refuse_what_they_cannot_read(cpp: str) -> None:
    out = torch.zeros(4, 5)
    with pytest.raises(ValueError, match="activations and errors must be"):
        operators.ghost_linear_sq_norms(A, D[:2], False, True)
    with pytest.raises(ValueError, match="out must be a contiguous"):
        operators.ghost_linear_weighted_sum_(out[:, :4], None, A, D, ONES, None, False)
    with pytest.raises(ValueError, match="factors must be"):
        operators.ghost_linear_weighted_sum_(out, None, A, D, ONES[:2], None, False)
    with pytest.raises(ValueError, match="shares memory"):
        operators.ghost_linear_weighted_sum_(out, out[0, :4], A, D, ONES, None, False)
    assert not out.any()


@pytest.mark.parametrize(
    ("shapes", "formula"),
    [
        (((256, 784), (256, 512)), "rank_one"),
        (((16, 256, 768), (16, 256, 768)), "gram"),
        (((16, 8, 128, 64), (16, 8, 128, 64)), "materialised"),
    ],
)
def test_the_plan_takes_the_fewest_flops(shapes: Any, formula: str) -> None:
    plan = ghost.linear_plan(*shapes)
    assert plan.formula == formula and plan.reason
    assert plan.flops == plan.alternatives[formula] == min(plan.alternatives.values())
    assert plan.bytes >= 4 * sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize(("positions", "features", "outputs"), [(1, 5, 4), (3, 40, 30), (90, 9, 8)])
def test_auto_runs_what_the_plan_says(positions: int, features: int, outputs: int) -> None:
    a, d = cases.inputs((2, positions), features, outputs, torch.float32)
    for size in (features, features + 1):
        right = cases.factor("full", size, torch.float32)
        plan = ghost.linear_plan(a.shape, d.shape, right=right)
        norms = ghost.linear_norms(a, d, right=right)
        assert norms.formula == plan.formula
        if norms.stored:
            stored = sum(x.numel() for x in norms.saved)
            assert stored <= (a.numel() + d.numel()) / 2 + d.shape[0] * outputs


def test_counts_of_the_plan() -> None:
    plan = ghost.linear_plan((8, 10), (8, 6), right=Full(torch.eye(11)), left=Full(torch.eye(6)))
    assert plan.alternatives["rank_one"] == 2 * 8 * (11**2 + 6**2) + 2 * 8 * 17 + 2 * 8 * 66
    low = LowRank(torch.ones(10, 3), torch.ones(3), 1.0)
    plan = ghost.linear_plan((8, 2, 10), (8, 2, 6), right=low, left=Diagonal(torch.ones(6)))
    assert plan.alternatives["gram"] == 16 * (4 * 30 + 6) + 16 * 3 * 16 + 2 * 16 * 60
    assert plan.alternatives["materialised"] == 16 * (4 * 30 + 6) + 4 * 16 * 60
    # Factors go onto the gradient where there are more positions than rows and columns.
    plan = ghost.linear_plan((1, 100, 10), (1, 100, 6), left=Full(torch.eye(6)))
    assert plan.alternatives["materialised"] == 10 * 2 * 36 + 2 * 100 * 60 + 4 * 60
    assert stores_gradients(Sizes(1, 100, 10, 6)) and not stores_gradients(Sizes(1, 2, 10, 6))


def test_bytes_of_the_plan() -> None:
    # Vectors are read for the norms and for the sum; nothing is kept but what factors make of them.
    plain = ghost.linear_plan((8, 2, 10), (8, 2, 6))
    assert plain.bytes == 4 * (2 * 16 * 16 + 60) and plain.kept_bytes == 0
    right = Full(torch.eye(11))
    plan = ghost.linear_plan((8, 2, 10), (8, 2, 6), right=right)
    assert plan.kept_bytes == 4 * 16 * 11
    assert plan.bytes == 4 * (16 * 17 + 3 * 16 * 17 + 121 + 66)
    # Gradients are written, read for the norms, read for the sum.
    stored = ghost.linear_plan((2, 100, 10), (2, 100, 6), element_bytes=2)
    assert stored.bytes == 2 * 200 * 16 + 4 * (3 * 120 + 60)
    assert stored.kept_bytes == 4 * 2 * 6 * 11
    assert ghost.linear_plan((2, 100, 10), (2, 100, 6), bias=False).kept_bytes == 4 * 2 * 60


@pytest.mark.parametrize("positions", [1, 2, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_plan_keeps_is_what_is_saved(positions: int, dtype: torch.dtype) -> None:
    a, d = cases.inputs((3, positions), 9, 8, dtype)
    for left, right in ((None, None), ("full", None), (None, "full"), ("diagonal", "low_rank")):
        for size in (9, 10):
            sides = {
                "left": cases.factor(left, 8, torch.float32),
                "right": cases.factor(right, size, torch.float32),
            }
            plan = ghost.linear_plan(a.shape, d.shape, **sides, element_bytes=a.element_size())
            saved = ghost.linear_norms(a, d, **sides).saved
            mine = {a.untyped_storage().data_ptr(), d.untyped_storage().data_ptr()}
            kept = [x for x in saved if x.untyped_storage().data_ptr() not in mine]
            assert sum(x.nbytes for x in kept) == plan.kept_bytes


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_opcheck() -> None:
    check = torch.library.opcheck
    for dtype in (torch.bfloat16, torch.float64):
        a, d = cases.inputs((3, 4), 5, 6, dtype)
        sums = cases.sum_dtype(dtype)
        factors, bias = torch.rand(3, dtype=sums), torch.zeros(6, dtype=sums)
        for gram in (False, True):
            check(
                operators.ghost_linear_sq_norms.default,
                (a, d, True, gram),
            )
        for width, bias_out in ((5, None), (5, bias), (4, bias)):
            out = torch.zeros(6, width, dtype=sums)
            check(
                operators.ghost_linear_weighted_sum_.default,
                (out, bias_out, a, d, factors, None, True),
            )


@pytest.mark.parametrize(
    ("name", "formula"), [("reference", "auto"), ("cpp", "gram"), ("cpp", "materialised")]
)
def test_no_graph_break_and_the_same_result(fresh_compiler: None, name: str, formula: str) -> None:
    sides = {"left": Full(torch.eye(6) * 2), "right": Full(torch.eye(6) / 3)}

    def step(a: Tensor, d: Tensor, out: Tensor) -> Any:
        result = ghost.linear_clip_and_sum(a * 2, d, 1.0, formula=formula, out=out)
        again = ghost.linear_clip_and_sum(a, d, 0.5, formula=formula, **sides)
        return *result, *again

    with running_on(name, OPERATIONS):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for batch in (4, 7):
            a, d = cases.inputs((batch, 3), 5, 6, torch.float32)
            out, wanted = torch.zeros(6, 5), torch.zeros(6, 5)
            torch.testing.assert_close(compiled(a, d, out), step(a, d, wanted), rtol=0, atol=0)
            assert torch.equal(out, wanted) and out.any()


def test_the_triton_product_is_split_and_every_part_is_added() -> None:
    a, d = torch.ones(9, 30, 3), torch.ones(9, 30, 2)
    tiles, rows = 1, a.shape[0] * a.shape[1]
    assert triton_linear._programs(a.device) // tiles > 1 < rows // triton_linear._BLOCK
    out, bias = torch.full((2, 3), 5.0), torch.full((2,), 5.0)
    triton_linear.weighted_sum_(out, bias, a, d, torch.ones(9), None, True)
    assert torch.equal(out, torch.full((2, 3), 275.0)) and torch.equal(bias, out[:, 0])


@pytest.mark.parametrize("positions", [31, 32, 33, 97])
def test_triton_gram_around_the_edge_of_a_block(positions: int) -> None:
    a, d = cases.inputs((3, positions), 33, 3, torch.float32)
    found, _ = triton_linear.sq_norms(a, d, False, True)
    terms = (a.double().norm(dim=2) * d.double().norm(dim=2)).sum(1)
    exact = cases.exact(a, d).sq_norms(False)
    assert_never_low(found, exact, positions, terms, torch.float32)
