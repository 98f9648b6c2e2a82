"""Second moments of layers that are no plain rows: convolutions, embeddings, scale and shift."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot, unfold

from dpkernels.ops.kron import (
    conv_second_moment,
    mean_patches,
    scale_and_shift_moments,
    second_moment,
    token_frequencies,
)
from python_tests.conftest import running_on
from python_tests.ops import kron_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("conv_second_moment", "second_moment")


class Layer(NamedTuple):
    """A convolution and the sizes of its input."""

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    options: dict[str, Any]

    def module(self) -> torch.nn.Module:
        """Return the layer in float64, with more outputs for each group than a patch has elements.

        Its weights are multiples of 1/8, so that everything it computes is exact.
        """
        axes, channels = len(self.kernel), self.shape[1]
        groups = self.options.get("groups", 1)
        patch = channels // groups * torch.Size(self.kernel).numel() + 1
        kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[axes - 1]
        layer = kind(channels, groups * (patch + 2), self.kernel, **self.options).double()
        for parameter in layer.parameters():
            parameter.data = cases.numbers(*parameter.shape, dtype=torch.float64, bits=3)
        return layer


LAYERS = {
    "1d": Layer((3, 2, 9), (3,), {}),
    "1d stride padding dilation": Layer(
        (2, 3, 11), (2,), {"stride": 2, "padding": 3, "dilation": 3}
    ),
    "2d": Layer((3, 2, 6, 5), (3, 3), {"padding": 1}),
    "2d one pixel": Layer((2, 5, 3, 4), (1, 1), {}),
    "2d mixed": Layer(
        (2, 3, 7, 8), (2, 3), {"stride": (2, 1), "padding": (0, 2), "dilation": (3, 2)}
    ),
    "2d groups": Layer((3, 6, 5, 4), (2, 2), {"groups": 3, "padding": (1, 0)}),
    "2d depthwise": Layer((2, 4, 5, 5), (3, 3), {"groups": 4, "stride": 2, "padding": 1}),
    "3d": Layer(
        (2, 2, 4, 5, 3),
        (2, 3, 1),
        {"stride": (1, 2, 1), "padding": (1, 1, 0), "dilation": (2, 1, 1)},
    ),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


def test_a_convolution_has_the_moment_that_autograd_says(backend: str, layer: Layer) -> None:
    # The gradient of |W * x|^2 / 2 is sum_r (W p_r) p_r^T = R W A for the patches p_r: with more
    # outputs than elements of a patch, that determines A. Everything is exact in float64.
    module = layer.module()
    x = cases.numbers(*layer.shape, dtype=torch.float64, bits=10)
    output = module(x)
    output.square().sum().div(2).backward()
    groups = layer.options.get("groups", 1)
    weights, gradient = (
        torch.cat((w.flatten(1), b.unsqueeze(1)), 1).unflatten(0, (groups, -1))
        for w, b in (
            (module.weight.detach(), module.bias.detach()),
            (module.weight.grad, module.bias.grad),
        )
    )
    moment = conv_second_moment(x, layer.kernel, bias=True, **layer.options)
    rows = output.numel() // output.shape[1]
    plain = torch.matmul(weights, rows * moment.view(groups, *moment.shape[-2:]))
    assert_as_accurate(plain, gradient, gradient)
    assert torch.equal(moment, moment.mT)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_dtype_against_unfold(backend: str, dtype: torch.dtype) -> None:
    x = cases.numbers(3, 4, 7, 6, dtype=dtype)
    options: dict[str, Any] = {"stride": 1, "padding": 1, "dilation": 2}
    wide = x.to(cases.sum_dtype(dtype))
    plain, exact = (
        rows.T @ rows * (1 / len(rows))
        for t in (wide, wide.double())
        for rows in [unfold(t, (2, 3), **options).transpose(1, 2).flatten(0, 1)]
    )
    assert_as_accurate(conv_second_moment(x, (2, 3), **options), plain, exact)


@pytest.mark.parametrize("name", ["2d mixed", "2d groups", "3d"])
def test_without_bias_the_last_row_and_column_are_missing(backend: str, name: str) -> None:
    layer = LAYERS[name]
    x = cases.numbers(*layer.shape, dtype=torch.float64, bits=10)
    augmented = conv_second_moment(x, layer.kernel, bias=True, **layer.options)
    bare = conv_second_moment(x, layer.kernel, **layer.options)
    assert torch.equal(bare, augmented[..., :-1, :-1])


def test_reduce_takes_the_mean_patch(backend: str, layer: Layer) -> None:
    x = cases.numbers(*layer.shape, dtype=torch.float64, bits=10)
    moment = conv_second_moment(x, layer.kernel, sharing="reduce", bias=True, **layer.options)
    # Patches from the convolution with the unit kernels, one for each element of a patch.
    groups = layer.options.get("groups", 1)
    channels = layer.shape[1] // groups
    size = channels * torch.Size(layer.kernel).numel()
    units = (
        torch.eye(size)
        .double()
        .view(size, channels, *layer.kernel)
        .repeat(groups, *(1,) * (1 + len(layer.kernel)))
    )
    convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel) - 1]
    patches = convolution(x, units, **layer.options).flatten(2).mean(2)
    means = patches.unflatten(1, (groups, size)).transpose(0, 1)
    torch.testing.assert_close(mean_patches(x, layer.kernel, **layer.options), means)
    rows = cases.augmented(means)
    wanted = torch.bmm(rows.mT, rows) / layer.shape[0]
    torch.testing.assert_close(moment, wanted if groups > 1 else wanted[0])


def test_patches_of_many_samples_on_any_number_of_threads(cpp: str, threads: int) -> None:
    # 7 x 36 patches and 7 x 2 samples and groups: no block and no share comes out even.
    x = cases.numbers(7, 6, 6, 6)
    for groups in (1, 2):
        options: dict[str, Any] = {"padding": 1, "groups": groups, "bias": True}
        with running_on("reference", OPERATIONS):
            plain = conv_second_moment(x, (3, 3), **options)
            exact = conv_second_moment(x.double(), (3, 3), **options)
        assert_as_accurate(conv_second_moment(x, (3, 3), **options), plain, exact)


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    channels=st.integers(1, 3),
    groups=st.integers(1, 2),
    data=st.data(),
)
def test_any_geometry_compiled(
    cpp: str, sizes: list[int], channels: int, groups: int, data: st.DataObject
) -> None:
    def each(least: int, most: int) -> list[int]:
        return data.draw(
            st.lists(st.integers(least, most), min_size=len(sizes), max_size=len(sizes))
        )

    kernel, stride, padding, dilation = each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    spans = zip(sizes, kernel, padding, dilation, strict=True)
    assume(all(size + 2 * p >= d * (k - 1) + 1 for size, k, p, d in spans))
    x = cases.numbers(2, channels * groups, *sizes, dtype=torch.float64)
    options |= {"groups": groups, "bias": True}
    actual = conv_second_moment(x, kernel, **options)
    with running_on("reference", OPERATIONS):
        exact = conv_second_moment(x, kernel, **options)
    assert_as_accurate(actual, exact, exact)


def test_strided_images(backend: str) -> None:
    x = cases.numbers(2, 3, 6, 5, dtype=torch.float64)
    wanted = conv_second_moment(x, (2, 2))
    views = [x.to(memory_format=torch.channels_last), torch.stack((x, x), -1)[..., 0]]
    for view in views:
        assert torch.equal(conv_second_moment(view, (2, 2)), wanted)


def test_the_errors_of_a_convolution(backend: str) -> None:
    errors = cases.numbers(3, 4, 5, 2)
    rows = errors.permute(0, 2, 3, 1).reshape(-1, 4)
    exact = rows.double().T @ rows.double() / 30
    assert_as_accurate(second_moment(errors, channel_dim=1), rows.T @ rows / 30, exact)


IMAGES = torch.ones(2, 4, 5, 5)


@pytest.mark.parametrize(
    ("x", "kernel", "options", "match"),
    [
        (torch.ones(2, 4), (1,), {}, r"x must be \[B, C, L\].*got \[2, 4\]"),
        (IMAGES.int(), (1, 1), {}, "x must be .*int32"),
        (IMAGES, (3,), {}, "kernel_size must be 2 integers >= 1.*got"),
        (IMAGES, (3, 0), {}, "kernel_size must be 2 integers >= 1"),
        (IMAGES, (3, 3), {"stride": 0}, "stride must be 2 integers >= 1"),
        (IMAGES, (3, 3), {"padding": (1, -1)}, "padding must be 2 integers >= 0"),
        (IMAGES, (3, 3), {"dilation": (1, 1, 1)}, "dilation must be 2 integers"),
        (IMAGES, (3, 3), {"groups": 3}, "groups must divide the 4 channels of x, got 3"),
        (IMAGES, (3, 3), {"groups": 0}, "groups must divide"),
        (IMAGES, (3, 3), {"sharing": "sum"}, "sharing must be one of expand, reduce"),
        (IMAGES, (6, 3), {}, "there are no patches in x .*kernel_size"),
        (IMAGES[:0], (3, 3), {}, "there are no patches .*skip empty batches"),
        (IMAGES / 0, (3, 3), {}, "x holds NaN or infinity"),
    ],
)
def test_bad_convolutions(
    backend: str, x: Tensor, kernel: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=f"^conv_second_moment: {match}"):
        conv_second_moment(x, kernel, **options)


def test_an_embedding_has_the_moment_of_its_one_hot_inputs() -> None:
    tokens = torch.randint(0, 11, (4, 16), generator=torch.Generator().manual_seed(0))
    exact = second_moment(one_hot(tokens, 11).double())
    assert torch.equal(token_frequencies(tokens, 11).dense(), exact.float())
    assert torch.equal(token_frequencies(tokens.to(torch.int16), 11).dense(), exact.float())
    kept = tokens[tokens != 3]
    without = token_frequencies(tokens, 11, padding_idx=3).values
    assert torch.equal(without, token_frequencies(kept, 11).values) and without[3] == 0


def test_counts_are_exact_where_float32_is_not() -> None:
    tokens = torch.zeros(2**24 + 4, dtype=torch.int32)
    tokens[-1] = 1
    exact = torch.tensor([2**24 + 3, 1]).double() / (2**24 + 4)
    assert torch.equal(token_frequencies(tokens, 2).values, exact.float())


@pytest.mark.parametrize(
    ("tokens", "padding_idx", "error", "match"),
    [
        (torch.ones(3), None, ValueError, "tokens must be integers, got"),
        (torch.tensor([0, 5]), None, IndexError, r"tokens must be in \[0, 5\), got 5"),
        (torch.tensor([0, -1]), None, IndexError, r"tokens must be in \[0, 5\), got -1"),
        (torch.tensor([2, 2]), 2, ValueError, "tokens has none"),
        (torch.tensor([], dtype=torch.int64), None, ValueError, "tokens has none"),
        (torch.tensor([1]), 7, ValueError, r"padding_idx must be in \[0, 5\), got 7"),
    ],
)
def test_bad_tokens(tokens: Tensor, padding_idx: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^token_frequencies: {match}"):
        token_frequencies(tokens, 5, padding_idx)


def test_scale_and_shift_have_the_moments_of_their_per_sample_gradients() -> None:
    x = torch.randn(5, 6, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    errors = torch.randn(5, 6, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    layer = torch.nn.GroupNorm(3, 6).double()
    squares = []
    for sample, error in zip(x, errors, strict=True):
        layer.zero_grad()
        (layer(sample.unsqueeze(0)) * error).sum().backward()
        squares.append(torch.stack((layer.weight.grad, layer.bias.grad)).square())
    normalised = torch.nn.functional.group_norm(x, 3)
    scale, shift = scale_and_shift_moments(normalised, errors, channel_dim=1)
    wanted = torch.stack(squares).mean(0)
    torch.testing.assert_close(torch.stack((scale.values, shift.values)), wanted)


def test_scale_and_shift_may_take_every_position_as_a_sample() -> None:
    x, errors = cases.numbers(3, 4, 5), cases.numbers(4, 3, 5).transpose(0, 1)
    scale, shift = scale_and_shift_moments(x, errors, sharing="expand")
    torch.testing.assert_close(scale.values, (x * errors).square().mean((0, 1)))
    torch.testing.assert_close(shift.values, errors.square().mean((0, 1)))
    half = scale_and_shift_moments(x.half(), errors.half())[0]
    assert half.values.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "errors", "match"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), "normalised and errors must have one shape"),
        (torch.ones(2, 3), torch.ones(2, 3).double(), "one shape and dtype"),
        (torch.ones(0, 3), torch.ones(0, 3), "no samples, got"),
        (torch.ones(2, 3) / 0, torch.ones(2, 3), "x holds NaN or infinity"),
    ],
)
def test_bad_scale_and_shift(x: Tensor, errors: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=f"^scale_and_shift_moments: .*{match}"):
        scale_and_shift_moments(x, errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    for shape, axes in (((2, 4, 5), 1), ((2, 4, 5, 3), 2), ((0, 4, 5, 3), 2)):
        x = cases.numbers(*shape, dtype=dtype)
        lists = [2] * axes, [1] * axes, [1] * axes, [2] * axes
        arguments = (x, *lists, 2, True, 0.5)
        torch.library.opcheck(torch.ops.dpkernels.conv_second_moment.default, arguments)


@pytest.mark.parametrize("name", ["reference", "cpp"])
def test_no_graph_break(name: str) -> None:
    torch._dynamo.reset()

    def flow(x: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        frequencies = token_frequencies(tokens, 9, padding_idx=2).values
        scale, shift = scale_and_shift_moments(x, x * 2, channel_dim=1)
        moment = conv_second_moment(x, (3, 3), padding=1, bias=True)
        reduced = conv_second_moment(x, (2, 2), groups=2, sharing="reduce")
        return moment, reduced, frequencies, scale.values, shift.values

    with running_on(name, OPERATIONS):
        compiled = torch.compile(flow, fullgraph=True, backend="aot_eager")
        for samples in (3, 4):
            x, tokens = cases.numbers(samples, 4, 5, 6), torch.arange(samples + 4)
            torch.testing.assert_close(compiled(x, tokens), flow(x, tokens), rtol=0, atol=0)


def test_direct_calls_of_the_compiled_operator_are_checked() -> None:
    operator = torch.ops.dpkernels.conv_second_moment
    with running_on("cpp", OPERATIONS):
        for lists, wrong in (
            (([3], [1, 1], [0, 0], [1, 1], 1), "x must be"),
            (([3, 3], [1, 1], [0, 0], [1, 1], 3), "groups must divide the 4 channels, got 3"),
            (([3, 3], [0, 1], [0, 0], [1, 1], 1), "kernel_size, stride and dilation must be in"),
            (([3, 3], [1, 1], [0, -1], [1, 1], 1), "padding must be in"),
        ):
            with pytest.raises(ValueError, match=f"conv_second_moment: {wrong}"):
                operator(IMAGES, *lists, False, 1.0)
