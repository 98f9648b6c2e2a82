"""Second moments of rows: the sum of products, symmetric, on every backend; and their averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dpkernels
from dpkernels.ops.kron import SecondMoment, second_moment
from python_tests.conftest import running_on
from python_tests.ops import kron_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("second_moment",)


def plain_moment(rows: Tensor, bias: bool) -> Tensor:
    """``E[x x^T]`` over rows ``[R, n]`` in plain PyTorch, in the dtype of ``rows``."""
    rows = cases.augmented(rows) if bias else rows
    return rows.T @ rows * (1 / len(rows))


def check_moment(actual: Tensor, rows: Tensor, bias: bool) -> None:
    """Assert that ``actual`` is the moment of ``rows``, exactly symmetric."""
    wide = rows.to(cases.sum_dtype(rows.dtype))
    assert_as_accurate(actual, plain_moment(wide, bias), plain_moment(wide.double(), bias))
    assert torch.equal(actual, actual.T)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_dtype(backend: str, dtype: torch.dtype, bias: bool) -> None:
    # 65 and 66 are one over a block of the Triton kernel; the rows are more than one split of it.
    x = cases.numbers(75, 65, dtype=dtype)
    check_moment(second_moment(x, bias=bias), x, bias)


@pytest.mark.parametrize("bias", [False, True])
def test_every_size(backend: str, bias: bool) -> None:
    for shape in [(1, 1), (2, 5), (64, 1), (128, 0), (4, 33)]:
        x = cases.numbers(*shape, dtype=torch.float64)
        check_moment(second_moment(x, bias=bias), x, bias)


@pytest.mark.parametrize("bias", [False, True])
def test_float64_keeps_all_its_bits(backend: str, bias: bool) -> None:
    # 25 bits are one more than float32 has; products and sums of 4 of them are exact in float64.
    x = cases.numbers(4, 5, dtype=torch.float64, bits=25)
    assert not torch.equal(x, x.float().double())
    assert torch.equal(second_moment(x, bias=bias), plain_moment(x, bias))


def test_positions_expand_into_samples(backend: str) -> None:
    x = cases.numbers(4, 2, 3, 7)
    check_moment(second_moment(x, bias=True), x.reshape(-1, 7), True)


def test_positions_reduce_to_means_of_activations_and_sums_of_errors(backend: str) -> None:
    x = cases.numbers(16, 4, 8, 5, dtype=torch.float64, bits=10)
    means, sums = x.mean((1, 2)), x.sum((1, 2))
    check_moment(second_moment(x, sharing="reduce", bias=True), means, True)
    check_moment(second_moment(x, sharing="reduce", role="errors"), sums, False)
    half = x.to(torch.float16)
    summed = half.float().sum((1, 2))
    check_moment(second_moment(half, sharing="reduce", role="errors"), summed, False)


def layouts(x: Tensor) -> list[Tensor]:
    """Return views that equal x ``[B, T, n]`` but lie in memory in other ways."""
    doubled = torch.full((x.shape[0], 2 * x.shape[1], 3 * x.shape[2]), 7.0, dtype=x.dtype)
    doubled[:, ::2, ::3] = x
    channels_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    batch_last = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return [channels_first, doubled[:, ::2, ::3], batch_last, x[:1].expand(x.shape)]


@pytest.mark.parametrize("positions", [1, 5, 70])
def test_strides_do_not_matter(backend: str, positions: int) -> None:
    x = cases.numbers(3, positions, 9)
    for view in layouts(x):
        check_moment(second_moment(view, bias=True), view.reshape(-1, 9), True)


def test_channels_may_be_anywhere(backend: str) -> None:
    errors = cases.numbers(3, 6, 4, 5)
    rows = errors.permute(0, 2, 3, 1).reshape(-1, 6)
    check_moment(second_moment(errors, channel_dim=1), rows, False)
    check_moment(second_moment(errors, channel_dim=-3), rows, False)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_or_tiles_shared_out_over_any_number_of_threads(
    cpp: str, threads: int, bias: bool
) -> None:
    # Many rows (a sum for each thread), few of them (tiles of the result), and something between;
    # 252 and 253 columns are one tile of it and one more.
    for shape in [(1500, 37), (40, 252), (40, 253), (700, 300), (5, 600)]:
        x = cases.numbers(*shape)
        check_moment(second_moment(x, bias=bias), x, bias)
    x = cases.numbers(3, 80, 300)
    for view in (x.transpose(1, 2).contiguous().transpose(1, 2), x[:, ::2]):
        check_moment(second_moment(view, bias=bias), view.reshape(-1, 300), bias)


@given(
    samples=st.integers(1, 40),
    positions=st.integers(1, 80),
    size=st.integers(1, 60),
    channels_first=st.booleans(),
    bias=st.booleans(),
)
def test_any_shape_compiled(
    cpp: str, samples: int, positions: int, size: int, channels_first: bool, bias: bool
) -> None:
    x = cases.numbers(samples, positions, size, dtype=torch.float64, bits=18)
    view = x.transpose(1, 2).contiguous().transpose(1, 2) if channels_first else x
    check_moment(second_moment(view, bias=bias), x.flatten(0, 1), bias)


def test_of_a_layer_it_is_what_autograd_says(backend: str) -> None:
    # With errors d = W a + b, those of |W a + b|^2 / 2, the gradient sum_r d_r [a_r, 1]^T of a
    # linear layer is R [W, b] A: that determines A.
    layer = torch.nn.Linear(6, 9).double()
    x = cases.numbers(5, 4, 6, dtype=torch.float64)
    layer(x).square().sum().div(2).backward()
    gradient = torch.cat((layer.weight.grad, layer.bias.grad.unsqueeze(1)), 1)
    weights = torch.cat((layer.weight, layer.bias.unsqueeze(1)), 1).detach()
    torch.testing.assert_close(20 * weights @ second_moment(x, bias=True), gradient)


def test_the_factors_of_one_sample_give_its_gradient_where_theory_says_so(backend: str) -> None:
    # Reduce is exact for equal errors at all positions: G (x) A is then vec(g) vec(g)^T.
    layer = torch.nn.Linear(4, 3).double()
    x = cases.numbers(1, 5, 4, dtype=torch.float64)
    error = cases.numbers(3, dtype=torch.float64)
    (layer(x) * error).sum().backward()
    g = torch.cat((layer.weight.grad, layer.bias.grad.unsqueeze(1)), 1).flatten()
    a = second_moment(x, sharing="reduce", bias=True)
    errors = error.expand(1, 5, 3)
    expected = torch.kron(second_moment(errors, sharing="reduce", role="errors"), a)
    torch.testing.assert_close(torch.outer(g, g), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("position", [(0, 0), (39, 8)])
def test_what_is_not_finite_is_refused(backend: str, position: Any, value: float) -> None:
    x = cases.numbers(40, 9)
    x[position] = value
    with pytest.raises(ValueError, match=r"^second_moment: x holds NaN or infinity, or numbers"):
        second_moment(x)
    half = cases.numbers(40, 9, dtype=torch.bfloat16)
    half[position] = value
    with pytest.raises(ValueError, match="look at the probes"):
        second_moment(half, bias=True)


def test_large_half_precision_numbers_are_squared_in_float32(backend: str) -> None:
    x = torch.full((3, 2), 60000.0, dtype=torch.float16)
    assert torch.equal(second_moment(x), torch.full((2, 2), x[0, 0].item() ** 2))


@pytest.mark.parametrize(
    ("x", "options", "match"),
    [
        (torch.ones(3), {}, r"x must be \[B, n\] or \[B, T\.\.\., n\].*got \[3\]"),
        (torch.ones(3, 2).int(), {}, "x must be .*float32.*int32"),
        (torch.ones(3, 2), {"channel_dim": 0}, "channel_dim must name an axis .* behind the first"),
        (torch.ones(3, 2), {"channel_dim": 2}, "channel_dim must name an axis"),
        (
            torch.ones(3, 2),
            {"sharing": "mean"},
            "sharing must be one of expand, reduce, got 'mean'",
        ),
        (torch.ones(3, 2), {"sharing": "reduce", "role": "a"}, "role must be one of activations"),
        (torch.ones(0, 2), {}, r"x has no samples, got \[0, 2\].*skip empty batches"),
        (torch.ones(3, 0, 2), {"sharing": "expand"}, "x has no samples"),
        (torch.ones(3, 0, 2), {"sharing": "reduce"}, "x has no samples"),
    ],
)
def test_bad_input(backend: str, x: Tensor, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^second_moment: {match}"):
        second_moment(x, **options)


BATCHES = [cases.numbers(rows, 5) for rows in (3, 1, 8)]


def test_the_mean_over_batches_is_the_moment_of_all_samples() -> None:
    running = SecondMoment()
    for batch in BATCHES:
        running.update(second_moment(batch, bias=True), len(batch))
    everything = torch.cat(BATCHES)
    assert running.count == 12 and isinstance(running.count, int)
    exact = plain_moment(everything.double(), True)
    assert_as_accurate(running.value, plain_moment(everything, True), exact)


def test_a_moving_average_forgets_by_its_decay_and_has_no_bias_at_the_start() -> None:
    running, decay = SecondMoment(decay=0.75), 0.75
    moments = [plain_moment(b.double(), False) for b in BATCHES]
    for index, batch in enumerate(BATCHES):
        running.update(moments[index], len(batch))
        weights = [decay ** (index - i) * len(BATCHES[i]) for i in range(index + 1)]
        wanted = sum(w * m for w, m in zip(weights, moments, strict=False)) / sum(weights)
        torch.testing.assert_close(running.value, wanted, rtol=1e-14, atol=0)


def test_merging_is_having_seen_both() -> None:
    parts = [SecondMoment(), SecondMoment(), SecondMoment()]
    whole = SecondMoment()
    for index, batch in enumerate(BATCHES):
        moment = plain_moment(batch.double(), False)
        whole.update(moment, len(batch))
        parts[index % 2].update(moment, len(batch))
    parts[0].merge(parts[1])
    parts[0].merge(parts[2])
    parts[2].merge(parts[0])
    for part in (parts[0], parts[2]):
        assert part.count == whole.count == 12
        torch.testing.assert_close(part.value, whole.value, rtol=1e-14, atol=0)


def test_many_batches_lose_no_more_than_a_plain_sum_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    running, batches = SecondMoment(), torch.randn(2000, 4, 20, generator=generator) + 10
    plain = torch.zeros(20, 20)
    for batch in batches:
        moment = plain_moment(batch, False)
        running.update(moment, len(batch))
        plain += moment
    exact = plain_moment(batches.flatten(0, 1).double(), False)
    assert_as_accurate(running.value, plain / len(batches), exact)


def test_an_empty_batch_changes_nothing() -> None:
    running = SecondMoment(decay=0.5)
    running.update(torch.full((2, 2), float("nan")), 0)
    with pytest.raises(ValueError, match="no value before the first update"):
        _ = running.value
    running.update(torch.eye(2), 3)
    running.update(torch.full((2, 2), float("nan")), 0)
    assert torch.equal(running.value, torch.eye(2)) and running.count == 3


def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    first, second = SecondMoment(decay=0.9), SecondMoment()
    first.update(plain_moment(BATCHES[0], False), 3)
    state = first.state_dict()
    second.load_state_dict(state)
    for running in (first, second):
        running.update(plain_moment(BATCHES[1], False), 1)
    assert torch.equal(first.value, second.value) and first.count == second.count == 4
    assert first.value.data_ptr() != second.value.data_ptr()
    fresh = SecondMoment()
    fresh.load_state_dict(SecondMoment().state_dict())
    assert fresh.count == 0


def test_what_was_given_is_copied() -> None:
    running, moment = SecondMoment(), torch.eye(2)
    running.update(moment, 1)
    moment.zero_()
    assert torch.equal(running.value, torch.eye(2))


@pytest.mark.parametrize(
    ("moment", "samples", "match"),
    [
        (torch.eye(2), -1, "samples must be >= 0, got -1"),
        (torch.eye(3), 1, r"moment must be \[2, 2\] .*as before, got \[3, 3\]"),
        (torch.eye(2).double(), 1, "moment must be .*float32.*got .*float64"),
        (torch.eye(2).half(), 1, "moment must be float32 or float64, got torch.float16"),
        (torch.eye(2) / 0, 1, "moment holds NaN or infinity"),
    ],
)
def test_bad_updates_change_nothing(moment: Tensor, samples: int, match: str) -> None:
    running = SecondMoment()
    running.update(torch.eye(2), 2)
    with pytest.raises(ValueError, match=f"^SecondMoment.update: {match}"):
        running.update(moment, samples)
    assert torch.equal(running.value, torch.eye(2)) and running.count == 2


def test_bad_averages() -> None:
    for decay in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="SecondMoment: decay must be"):
            SecondMoment(decay=decay)
    with pytest.raises(ValueError, match="state lacks count, decay, weight"):
        SecondMoment().load_state_dict({"mean": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    x = cases.numbers(3, 4, 5, dtype=dtype)
    for view in (x, x.transpose(1, 2), x[:0]):
        for bias in (False, True):
            check = torch.library.opcheck
            check(torch.ops.dpkernels.second_moment.default, (view, bias, 0.5))


@pytest.mark.parametrize("name", ["reference", "cpp"])
def test_no_graph_break(name: str) -> None:
    torch._dynamo.reset()

    def flow(x: Tensor) -> tuple[Tensor, Tensor]:
        return second_moment(x, bias=True), second_moment(x * 2, sharing="reduce", role="errors")

    with running_on(name, OPERATIONS):
        compiled = torch.compile(flow, fullgraph=True, backend="aot_eager")
        for samples in (4, 6):
            x = cases.numbers(samples, 3, 5)
            torch.testing.assert_close(compiled(x), flow(x), rtol=0, atol=0)


def test_direct_calls_of_the_compiled_operator_are_checked() -> None:
    with running_on("cpp", OPERATIONS):
        for x in (torch.ones(2, 3), torch.ones(2, 3, 4).int()):
            with pytest.raises(ValueError, match="x must be"):
                torch.ops.dpkernels.second_moment(x, False, 1.0)
        assert dpkernels.explain("second_moment").chosen == "cpp"
        nothing = torch.ops.dpkernels.second_moment(torch.ones(0, 3, 4), True, 1.0)
        assert torch.equal(nothing, torch.zeros(5, 5))
