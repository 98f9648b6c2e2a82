"""Linear layers with one position for each sample: one operator for norms, one for everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops import clip, ghost
from dpkernels.ops.factor import Factor, Full, LowRank, parts_of
from dpkernels.ops.ghost import reference_linear, triton_rank_one
from dpkernels.ops.ghost.rank_one import rank_one_clip_and_sum
from python_tests.conftest import running_on
from python_tests.ops import ghost_linear_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = (*cases.OPERATIONS, "ghost_linear_rank_one_clip_")
operators = torch.ops.dpkernels

# B, I, O: nothing, single numbers, odd sizes, and enough for tasks to end inside either side.
SIZES = [(0, 4, 5), (3, 1, 4), (3, 4, 0), (5, 7, 3), (64, 150, 40), (64, 20, 180), (300, 90, 90)]


def sides(
    left: bool, right: int, outputs: int, dtype: torch.dtype, kind: str = "full"
) -> dict[str, Any]:
    """Return factors of a kind: on the left if asked for, on the right if the size is not 0."""
    return {
        "left": cases.factor(kind if left else None, outputs, dtype),
        "right": cases.factor(kind if right else None, right, dtype),
    }


def on_threads(threads: int, run: Callable[[], None]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("batch", "inputs", "outputs"), SIZES)
def test_sides_are_shared_out_over_any_number_of_threads(
    cpp: str, batch: int, inputs: int, outputs: int, threads: int
) -> None:
    for dtype in (torch.float32, torch.float64):
        a, d = cases.inputs((batch,), inputs, outputs, dtype)
        for left, right in ((False, 0), (True, 0), (False, inputs), (True, inputs + 1)):
            factors = sides(left, right, outputs, dtype)
            on_threads(threads, partial(cases.check, a, d, **factors))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("batch", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("left", ["low_rank", "full", None])
def test_low_ranks_are_shared_out_over_any_number_of_threads(
    cpp: str, batch: int, inputs: int, outputs: int, threads: int, left: str | None
) -> None:
    for dtype in (torch.float32, torch.float64):
        a, d = cases.inputs((batch,), inputs, outputs, dtype)
        right = cases.factor("low_rank", inputs + 1, dtype)
        other = cases.factor(left, outputs, dtype)

        def check(a: Tensor = a, d: Tensor = d, right=right, other=other) -> None:
            norms = ghost.linear_norms(a, d, left=other, right=right)
            new_a, new_d = (x.squeeze(1) for x in norms.saved)
            assert_transformed(new_a, torch.cat([a, torch.ones_like(a[:, :1])], 1), right)
            assert_transformed(new_d, d, other)
            squares = [x.double().square().sum(1) for x in (new_a, new_d)]
            torch.testing.assert_close(norms.sq_norms, squares[0] * squares[1], rtol=1e-13, atol=0)

        on_threads(threads, check)


@pytest.mark.parametrize("rank", [0, 1, 10])
def test_any_rank_is_taken(backend: str, rank: int) -> None:
    a, d = cases.inputs((20,), 9, 6, torch.float32)
    full = cases.factor("full", 10, torch.float32)
    assert isinstance(full, Full)
    basis = torch.linalg.qr(full.matrix)[0][:, :rank].contiguous()
    right = LowRank(basis, torch.linspace(0.5, 2.0, rank), 0.75)
    norms = ghost.linear_norms(a, d, right=right)
    new_a = norms.saved[0].squeeze(1)
    assert_transformed(new_a, torch.cat([a, torch.ones_like(a[:, :1])], 1), right)
    found = ghost.linear_clip_and_sum(a, d, 2.0, right=right)
    torch.testing.assert_close(found, clipped(a, d, 2.0, right=right), rtol=0, atol=0)


def assert_transformed(found: Tensor, x: Tensor, factor: Factor | None) -> None:
    """Assert that ``found`` is ``x U`` but for two roundings of every product, and five more."""
    if factor is None:
        assert torch.equal(found, x)
        return
    exact = x.double() @ wide(factor).dense()
    roundings = 2 * x.shape[1] + 5
    bound = roundings * torch.finfo(x.dtype).eps * (x.double().abs() @ cases.absolute(wide(factor)))
    # Of float64 numbers the truth itself is rounded.
    assert ((found - exact).abs() <= 2 * bound).all()


def wide(factor: Factor) -> Factor:
    """Return the factor in float64."""
    tensors = {k: v.double() for k, v in vars(factor).items() if isinstance(v, Tensor)}
    return dataclasses.replace(factor, **tensors)


def clipped(a: Tensor, d: Tensor, bound: float, **arguments: Any) -> ghost.LayerSum:
    """Return what the three functions give that ``linear_clip_and_sum`` stands for."""
    norms = ghost.linear_norms(a, d, formula="rank_one", **arguments)
    factors = clip.clip_factors(norms.sq_norms, bound, dtype=cases.sum_dtype(a.dtype))
    return ghost.LayerSum(*norms.weighted_sum(factors), norms.sq_norms, factors)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["full", "low_rank"])
@pytest.mark.parametrize(("left", "right"), [(False, 0), (True, 9), (True, 10), (False, 10)])
def test_one_call_gives_what_three_give(
    backend: str, left: bool, right: int, dtype: torch.dtype, kind: str
) -> None:
    a, d = cases.inputs((20,), 9, 6, dtype)
    a[3], d[5, 2], a[7] = torch.nan, torch.inf, 0.0
    for bias in (True, False) if right < 10 else (True,):
        arguments = {"bias": bias, **sides(left, right, 6, cases.sum_dtype(dtype), kind)}
        wanted = clipped(a, d, 2.0, **arguments)
        found = ghost.linear_clip_and_sum(a, d, 2.0, **arguments)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        assert not found.factors[[3, 5]].any() and (found.factors < 1).sum() > 2
        assert found.weight.isfinite().all() and (found.bias is not None) == bias


def test_buffers_are_written_and_added_to(backend: str) -> None:
    a, d = cases.inputs((20,), 9, 6, torch.float32)
    wanted = clipped(a, d, 2.0)
    out, bias_out = torch.full((6, 9), torch.nan), torch.full((6,), torch.nan)
    found = ghost.linear_clip_and_sum(a, d, 2.0, out=out, bias_out=bias_out)
    assert found.weight is out and found.bias is bias_out
    assert torch.equal(out, wanted.weight) and torch.equal(bias_out, wanted.bias)
    ghost.linear_clip_and_sum(a, d, 2.0, out=out, bias_out=bias_out, accumulate=True)
    assert_as_accurate(out, wanted.weight + wanted.weight, 2 * wanted.weight.double())


def test_one_call_is_what_serves_full_factors_and_low_ranks(cpp: str) -> None:
    a, d = cases.inputs((4,), 5, 3, torch.float32)
    both = (Full(torch.eye(3)), Full(torch.eye(6)))
    assert rank_one_clip_and_sum(a, d, 1.0, True, both, (None, None), False) is not None
    low_rank = (both[0], cases.factor("low_rank", 6, torch.float32))
    assert rank_one_clip_and_sum(a, d, 1.0, True, low_rank, (None, None), False) is not None
    assert rank_one_clip_and_sum(a, d, 0.0, True, both, (None, None), False) is None
    diagonal = (cases.factor("diagonal", 3, torch.float32), None)
    assert rank_one_clip_and_sum(a, d, 1.0, True, diagonal, (None, None), False) is None


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "bound": ({"max_norm": 0.0}, "clip_factors: max_norm must be a finite number > 0"),
    "nan": ({"max_norm": torch.nan}, "clip_factors: max_norm must be a finite number > 0"),
    "errors": ({"errors": torch.ones(3, 4)}, r"linear_norms: errors must be \[4, 'O'\]"),
    "left": ({"left": Full(torch.eye(4))}, "linear_norms: left must act on vectors of 3 elements"),
    "wide": ({"left": Full(torch.eye(3).double())}, "linear_norms: left must be .*float32"),
    "right": (
        {"right": Full(torch.eye(6)), "bias": False},
        "right has size 6 = I .* bias is False",
    ),
    "shape": ({"out": torch.zeros(5, 3)}, r"weighted_sum: out must be contiguous \[3, 5\]"),
    "strides": ({"out": torch.zeros(5, 3).t()}, "weighted_sum: out must be contiguous"),
    "grad": ({"out": torch.zeros(3, 5).requires_grad_()}, "weighted_sum: out requires grad"),
    "bias": ({"bias_out": torch.zeros(4)}, r"weighted_sum: bias_out must be contiguous \[3\]"),
    "no bias": ({"bias_out": torch.zeros(3), "bias": False}, "bias_out was passed, but"),
    "nothing": ({"accumulate": True}, "weighted_sum: accumulate=True needs out"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_refused_is_refused_in_words(backend: str, name: str) -> None:
    changed, match = ARGUMENTS[name]
    a, d = cases.inputs((4,), 5, 3, torch.float32)
    arguments = {"activations": a, "errors": d, "max_norm": 1.0, **changed}
    with pytest.raises(ValueError, match=match):
        ghost.linear_clip_and_sum(**arguments)
    assert not any(changed[key].any() for key in ("out", "bias_out") if key in changed)


def test_outputs_share_no_memory(backend: str) -> None:
    matrix = torch.zeros(5, 5)
    a, d = cases.inputs((4,), 5, 3, torch.float32)
    with pytest.raises(ValueError, match="weighted_sum: out shares memory"):
        ghost.linear_clip_and_sum(a, d, 1.0, out=a[:3])
    both = torch.zeros(18)
    with pytest.raises(ValueError, match="weighted_sum: bias_out shares memory"):
        ghost.linear_clip_and_sum(a, d, 1.0, out=both[:15].view(3, 5), bias_out=both[14:17])
    found = ghost.linear_clip_and_sum(a, d, 1.0, right=Full(matrix), bias=False)
    assert not found.weight.any() and not both.any()


def test_operators_called_directly_refuse_what_they_cannot_read(cpp: str) -> None:
    a, d, out = torch.ones(4, 1, 5), torch.ones(4, 1, 3), torch.zeros(3, 5)
    none = ([], 1.0, [], 1.0)
    with pytest.raises(ValueError, match="activations and errors must be"):
        operators.ghost_linear_rank_one(a, d[:3], *none, False, True)
    vectors, values = torch.ones(6, 2), torch.ones(2)
    wrong: list[list[Tensor]] = [
        [torch.eye(5)],
        [vectors],
        [vectors[:5], values],
        [vectors, values[:1]],
        [vectors, values.double()],
        [vectors, values, values],
    ]
    for right in wrong:
        with pytest.raises(ValueError, match="right and left must be"):
            operators.ghost_linear_rank_one(a, d, right, 1.0, [], 1.0, True, True)
    with pytest.raises(ValueError, match="augment needs right"):
        operators.ghost_linear_rank_one(a, d, *none, True, True)
    run = operators.ghost_linear_rank_one_clip_
    with pytest.raises(ValueError, match="out and bias_out must be contiguous"):
        run(out[:, :4], None, a, d, *none, False, 1.0, False)
    with pytest.raises(ValueError, match="augment needs bias_out"):
        run(out, None, a, d, [torch.eye(6)], 1.0, [], 1.0, True, 1.0, False)
    with pytest.raises(ValueError, match="max_norm must be"):
        run(out, None, a, d, *none, False, torch.inf, False)
    with pytest.raises(ValueError, match="shares memory"):
        run(out, out[0, :3], a, d, *none, False, 1.0, False)
    assert not out.any()


def test_opcheck() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        sums = cases.sum_dtype(dtype)
        a, d = (x.unsqueeze(1) for x in cases.inputs((3,), 5, 6, dtype))
        out, bias = torch.zeros(6, 5, dtype=sums), torch.zeros(6, dtype=sums)
        eye = torch.eye(6, dtype=sums)
        factors: list[tuple[list[Tensor], list[Tensor], bool]] = [([], [], False)]
        if dtype == sums:
            low_rank = [eye[:, :2].contiguous(), eye[0, :2].contiguous()]
            factors += [([eye], [], True), ([eye[:5, :5]], [eye], False), (low_rank, [eye], True)]
        for right, left, augment in factors:
            check, given = torch.library.opcheck, (a, d, right, 0.5, left, 1.0, augment)
            check(operators.ghost_linear_rank_one.default, (*given, True))
            check(operators.ghost_linear_rank_one_clip_.default, (out, bias, *given, 1.0, True))


def test_compiled_code_sees_no_break_and_gives_the_same() -> None:
    torch._dynamo.reset()
    factors = {"left": Full(torch.eye(6) * 2), "right": Full(torch.eye(6) / 3)}

    def step(a: Tensor, d: Tensor) -> Any:
        return *ghost.linear_clip_and_sum(a * 2, d, 1.0, **factors), ghost.linear_norms(a, d)

    with running_on("cpp", OPERATIONS):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        a, d = cases.inputs((4,), 5, 6, torch.float32)
        found, wanted = compiled(a, d), step(a, d)
        torch.testing.assert_close(found[:4], wanted[:4], rtol=0, atol=0)
        assert torch.equal(found[4].sq_norms, wanted[4].sq_norms)


@pytest.mark.parametrize("form", ["full", "low_rank"])
@pytest.mark.parametrize("augment", [True, False])
def test_the_operator_itself_gives_the_same_on_triton(augment: bool, form: str) -> None:
    a, d = (x.unsqueeze(1) for x in cases.inputs((6,), 5, 3, torch.float64))
    right, left = cases.factor(form, 5 + augment, a.dtype), cases.factor("full", 3, a.dtype)
    given = (a, d, *parts_of(right), *parts_of(left), augment, 2.0, True)
    results = []
    for module in (reference_linear, triton_rank_one):
        out, bias = a.new_ones(3, 5), a.new_ones(3)
        results.append((*module.rank_one_clip_(out, bias, *given), out, bias))
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=0)
    assert (results[0][1] < 1).any() and (results[0][2] != 1).all()


def test_the_reference_is_the_definition() -> None:
    a, d = cases.inputs((6,), 5, 3, torch.float64)
    right, left = cases.factor("full", 6, a.dtype), cases.factor("full", 3, a.dtype)
    factors = (*parts_of(right), *parts_of(left))
    new_a, new_d, squares = reference_linear.rank_one(
        a.unsqueeze(1), d.unsqueeze(1), *factors, True, False
    )
    gradients = torch.einsum("bo,bi->boi", new_d[:, 0], new_a[:, 0])
    torch.testing.assert_close(squares, gradients.square().sum((1, 2)))
    truth = cases.exact(a, d, left, right)
    torch.testing.assert_close(squares, truth.sq_norms(bias=True))
