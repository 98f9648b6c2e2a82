"""Bad input: the error names the argument and what to do, and nothing has been written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops import clip
from dpkernels.ops.noise import NoiseKey, add_gaussian_noise_, add_row_noise_
from python_tests.ops import clip_cases

OPERATIONS = (*clip_cases.OPERATIONS, "add_gaussian_noise_", "add_row_noise_")

NAN, INF = math.nan, math.inf
ROWS = torch.arange(12.0).view(3, 4)
PAIR = [torch.ones(3, 4), torch.ones(3, 2)]


def refuses(match: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Assert that the call raises ValueError with such a message and writes to no tensor."""
    tensors = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, list) else [a])]
    tensors = [t for t in tensors if isinstance(t, Tensor) and t.device.type == "cpu"]
    before = [t.detach().clone() for t in tensors]
    name = function.__name__
    with pytest.raises(ValueError, match=match) as raised:
        function(*args, **kwargs)
    assert str(raised.value).startswith(f"{name}: "), "the message names the function"
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(1e9), copy.nan_to_num(1e9)), "half-written"


TAKE_GRADS: list[Callable[..., Any]] = [
    clip.row_sq_norms,
    lambda grads, **out: clip.clip_and_sum(grads, 1.0, **out),
    lambda grads, **out: clip.weighted_row_sum(grads, torch.ones(3), **out),
]
for call, op in zip(TAKE_GRADS[1:], (clip.clip_and_sum, clip.weighted_row_sum), strict=True):
    call.__name__ = op.__name__


@pytest.mark.parametrize("function", TAKE_GRADS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("grads", "match"),
    [
        (torch.ones(3), r"grads must be \[B, D\].*got \[3\] float32.*flatten"),
        (torch.ones(3, 2, 2), r"grads must be \[B, D\].*got \[3, 2, 2\]"),
        (torch.ones(3, 4, dtype=torch.int64), "grads must be .*float32.*int64"),
        (torch.ones(3, 4, dtype=torch.complex64), "grads must be .*complex64"),
        ([torch.ones(3, 4), torch.ones(3)], r"grads must be .*\[3\] float32"),
        ([torch.ones(3, 4), torch.ones(2, 4)], r"grads must share batch size.*\[2, 4\]"),
        ([torch.ones(3, 4), torch.ones(3, 4).half()], "grads must share .*dtype.*float16"),
        ([torch.ones(3, 4), torch.ones(3, 4, device="meta")], "grads must share .*device.*meta"),
        ([], "grads is an empty list; pass at least one"),
    ],
)
def test_grads(backend: str, function: Callable[..., Any], grads: Any, match: str) -> None:
    refuses(match, function, grads)


SQ_NORMS = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("function", [clip.clip_and_sum, clip.clip_factors])
@pytest.mark.parametrize(
    ("max_norm", "mode", "match"),
    [
        *((bound, "flat", "max_norm must be a finite number > 0, got") for bound in (0.0, -1.0)),
        *((bound, "automatic", "max_norm must be a finite number > 0") for bound in (NAN, INF)),
        ([1.0, -1.0], "per_layer", "max_norm must be a finite number > 0, got -1"),
        ([1.0, NAN], "per_layer", "max_norm must be a finite number > 0, got nan"),
        (1.0, "per_layer", "max_norm must be a list with one bound for each tensor"),
        ([1.0, 1.0, 1.0], "per_layer", "max_norm has 3 bounds for 2 tensors; pass one for each"),
        ([], "per_layer", "max_norm has 0 bounds for 2 tensors"),
        ([1.0, 1.0], "flat", "max_norm must be one number for mode 'flat', got 2.*per_layer"),
        (1.0, "ghost", "no mode 'ghost'; there are flat, automatic, per_layer"),
    ],
)
def test_bounds_and_modes(
    backend: str, function: Callable[..., Any], max_norm: Any, mode: Any, match: str
) -> None:
    if function is clip.clip_and_sum:
        outs = [torch.full((4,), 7.0), torch.full((2,), 7.0)]
        refuses(match, function, PAIR, max_norm, mode, out=outs)
    else:
        layers = SQ_NORMS.expand(2, 3) if mode == "per_layer" else SQ_NORMS
        refuses(match, function, layers, max_norm, mode)


@pytest.mark.parametrize("gamma", [-0.1, NAN, INF])
def test_gamma(backend: str, gamma: float) -> None:
    out = torch.full((4,), 7.0)
    refuses("gamma must be a finite number >= 0", clip.clip_factors, SQ_NORMS, 1.0, gamma=gamma)
    refuses("gamma must be", clip.clip_and_sum, ROWS, 1.0, "automatic", gamma=gamma, out=out)


@pytest.mark.parametrize(
    ("sq_norms", "mode"),
    [
        (SQ_NORMS.float(), "flat"),
        (SQ_NORMS.view(1, 3), "flat"),
        (SQ_NORMS, "per_layer"),
        (SQ_NORMS[0], "automatic"),
    ],
)
def test_sq_norms(backend: str, sq_norms: Tensor, mode: clip.Mode) -> None:
    refuses(
        "sq_norms must be .*float64 for mode.*row_sq_norms", clip.clip_factors, sq_norms, 1, mode
    )


def test_dtype_of_factors(backend: str) -> None:
    refuses("dtype must be float32 or float64", clip.clip_factors, SQ_NORMS, 1.0, dtype=torch.half)


@pytest.mark.parametrize(
    "factors",
    [
        torch.ones(4),
        torch.ones(3, 1),
        torch.ones(2, 3),
        torch.tensor(1.0),
        torch.ones(3).double(),
        torch.ones(3).half(),
    ],
)
def test_factors(backend: str, factors: Tensor) -> None:
    out = torch.full((4,), 7.0)
    match = r"factors must be \[3\] or \[1, 3\] torch.float32.*, got"
    refuses(match, clip.weighted_row_sum, ROWS, factors, out=out)


def test_factors_on_another_device(backend: str) -> None:
    factors = torch.ones(3, device="meta")
    refuses("factors must be .*cpu.*got .*meta", clip.weighted_row_sum, ROWS, factors)


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.full((4,), 7.0)


SUMS = TAKE_GRADS[1:]
BAD_OUTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "shape": (lambda: torch.full((5,), 7.0), r"out must be contiguous \[4\].*got \[5\]"),
    "rank": (lambda: torch.full((1, 4), 7.0), r"out must be contiguous \[4\].*got \[1, 4\]"),
    "float64": (lambda: torch.full((4,), 7.0).double(), "out must be .*float32.*got .*float64"),
    "half": (lambda: torch.full((4,), 7.0).half(), "out must be .*float32.*got .*float16"),
    "device": (lambda: torch.empty(4, device="meta"), "out must be .*on cpu, got .*meta"),
    "strided": (lambda: torch.full((8,), 7.0)[::2], "out must be contiguous.*strides .2."),
    "expanded": (lambda: torch.full((1,), 7.0).expand(4), "out must be contiguous.*strides .0."),
    "requires grad": (
        lambda: torch.full((4,), 7.0, requires_grad=True),
        r"out requires grad and is read-only here; pass out.detach\(\)",
    ),
    "inference": (_inference, r"out is an inference tensor.*allocate it outside"),
}


@pytest.mark.parametrize("function", SUMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BAD_OUTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_out(backend: str, function: Callable[..., Any], name: str, accumulate: bool) -> None:
    make, match = BAD_OUTS[name]
    refuses(match, function, ROWS, out=make(), accumulate=accumulate)


@pytest.mark.parametrize("function", SUMS, ids=lambda f: f.__name__)
def test_out_and_accumulate_fit_grads(backend: str, function: Callable[..., Any]) -> None:
    out = torch.full((4,), 7.0)
    refuses("accumulate=True needs out", function, ROWS, accumulate=True)
    refuses("out must be a tensor if grads is one", function, ROWS, out=[out])
    refuses("out must be a tensor if grads is one", function, PAIR, out=out)
    refuses("out has 1 buffers for 2 tensors", function, PAIR, out=[out])


@pytest.mark.parametrize("function", SUMS, ids=lambda f: f.__name__)
def test_out_shares_no_memory(backend: str, function: Callable[..., Any]) -> None:
    rows = ROWS.clone()
    refuses("out shares memory", function, rows, out=rows[1])
    refuses("out shares memory", function, rows.t()[:3], out=rows[0, :3])
    buffer = torch.full((5,), 7.0)
    square = [torch.ones(3, 4), torch.ones(3, 4)]
    refuses("out shares memory", function, square, out=[buffer[:4], buffer[1:]])
    refuses("out shares memory", function, square, out=[buffer[:4], buffer[:4]])


def test_out_shares_no_memory_with_the_factors(backend: str) -> None:
    factors = torch.ones(3)
    refuses("out shares memory", clip.weighted_row_sum, torch.ones(3, 3), factors, out=factors)


def test_neighbouring_outputs_in_one_buffer_are_fine(backend: str) -> None:
    flat = torch.full((8,), NAN)
    result = clip.clip_and_sum(PAIR, 10.0, out=[flat[1:5], flat[5:7]])
    assert flat[1:7].tolist() == [3.0] * 6 and flat[[0, 7]].isnan().all()
    assert result.nonfinite() == 0


BAD_NOISE: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "half": (lambda: torch.ones(3).half(), {}, "x must be float32 or float64, got torch.float16"),
    "bf16": (lambda: torch.ones(3).bfloat16(), {}, "x must be float32.*bfloat16.*then convert"),
    "integers": (lambda: torch.ones(3).long(), {}, "x must be float32 or float64.*int64"),
    "mixed": (lambda: [torch.ones(3), torch.ones(3).double()], {}, "x must share dtype and device"),
    "devices": (
        lambda: [torch.ones(3), torch.ones(3, device="meta")],
        {},
        "x must share dtype and device.*meta",
    ),
    "std < 0": (lambda: torch.ones(3), {"std": -1.0}, "std must be a finite number >= 0, got -1"),
    "std nan": (lambda: torch.ones(3), {"std": NAN}, "std must be a finite number >= 0, got nan"),
    "std lost": (lambda: torch.ones(3), {"std": 1e-50}, "std must be 0 or from 1.17549e-38"),
    "std huge": (lambda: torch.ones(3), {"std": 1e39}, r"for torch.float32, got 1e\+39"),
    "no counter": (lambda: torch.ones(3), {"counter": None}, "counter is missing; pass a NoiseKey"),
    "counter twice": (lambda: torch.ones(3), {"key": NoiseKey()}, "counter must be left out"),
    "std inf": (lambda: torch.ones(3), {"std": INF}, "std must be a finite number"),
    "scale nan": (lambda: torch.ones(3), {"scale": NAN}, "scale must be a finite number"),
    "scale inf": (lambda: torch.ones(3), {"scale": -INF}, "scale must be a finite number"),
    "key": (lambda: torch.ones(3), {"key": 2**64}, "key must fit in 64 bits, got .*NoiseKey"),
    "low key": (lambda: torch.ones(3), {"key": -(2**63) - 1}, "key must fit in 64 bits"),
    "counter < 0": (lambda: torch.ones(3), {"counter": -1}, r"counter must be in .*got -1"),
    "counter": (lambda: torch.ones(3), {"counter": 2**63}, r"counter must be in .*NoiseKey"),
    "counters": (
        lambda: [torch.ones(3), torch.ones(3)],
        {"counter": 2**63 - 1},
        "counter must be in",
    ),
    "expanded": (lambda: torch.ones(1).expand(3), {}, r"x of shape \[3\] has several.*x.clone"),
    "expanded column": (
        lambda: torch.ones(10, 5)[:, 0].expand(2, 10),
        {},
        r"x of shape \[2, 10\] has several elements at one address",
    ),
    "windows": (
        lambda: torch.ones(40).as_strided((3, 3), (3, 6)),
        {},
        r"x of shape \[3, 3\] has several elements at one address",
    ),
    "leaf": (lambda: torch.ones(3, requires_grad=True), {}, "x requires grad.*x.detach"),
    "inference": (_inference, {}, "x is an inference tensor"),
    "twice": (lambda: [torch.ones(3)] * 2, {}, "x shares memory .*with itself"),
}


@pytest.mark.parametrize("name", BAD_NOISE)
def test_noise(backend: str, name: str) -> None:
    make, changed, match = BAD_NOISE[name]
    arguments = {"std": 1.0, "key": 1, "counter": 0, **changed}
    refuses(match, add_gaussian_noise_, make(), **arguments)


@pytest.mark.parametrize("bad", range(3))
def test_one_bad_tensor_of_many_leaves_all_unchanged(backend: str, bad: int) -> None:
    xs = [torch.ones(5) for _ in range(3)]
    xs[bad] = torch.ones(1).expand(5)
    refuses("several elements at one address", add_gaussian_noise_, xs, 1.0, 1, 0)


def _rows() -> Tensor:
    return torch.full((3, 4), 7.0)


def _inference_rows() -> Tensor:
    with torch.inference_mode():
        return _rows()


BAD_ROWS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "half": (lambda: _rows().half(), {}, "x must be float32 or float64, got torch.float16"),
    "integers": (lambda: _rows().long(), {}, "x must be float32 or float64.*int64.*then convert"),
    "scalar": (lambda: torch.tensor(7.0), {}, r"x must be \[k, ...\], a row for each key"),
    "transposed": (
        lambda: torch.full((4, 3), 7.0).t(),
        {},
        r"x must have contiguous rows, got shape \[3, 4\] with strides \[1, 3\]; pass x.contig",
    ),
    "every other": (lambda: torch.full((3, 8), 7.0)[:, ::2], {}, "x must have contiguous rows"),
    "inner": (lambda: torch.full((3, 2, 4), 7.0)[..., :2], {}, "x must have contiguous rows"),
    "expanded": (lambda: torch.ones(4).expand(3, 4), {}, r"x of shape \[3, 4\] has several"),
    "windows": (lambda: torch.ones(9).as_strided((3, 4), (2, 1)), {}, "has several elements at"),
    "leaf": (lambda: _rows().requires_grad_(), {}, "x requires grad.*x.detach"),
    "inference": (_inference_rows, {}, "x is an inference tensor"),
    "std < 0": (_rows, {"std": -1.0}, "std must be a finite number >= 0, got -1"),
    "std nan": (_rows, {"std": NAN}, "std must be a finite number >= 0, got nan"),
    "std lost": (_rows, {"std": 1e-50}, "std must be 0 or from 1.17549e-38"),
    "std huge": (_rows, {"std": 1e39}, r"for torch.float32, got 1e\+39"),
    "scale": (_rows, {"scale": INF}, "scale must be a finite number, got inf"),
    "few keys": (_rows, {"keys": torch.arange(2)}, r"keys must be int64 \[3\] on.*got \[2\]"),
    "columns": (_rows, {"keys": torch.zeros(3, 1).long()}, r"keys must be .*got \[3, 1\]"),
    "int32": (_rows, {"keys": torch.arange(3).int()}, "keys must be int64.*int32.*RowKeys"),
    "counters": (_rows, {"counters": torch.ones(3)}, "counters must be int64.*float32"),
    "away": (_rows, {"counters": torch.ones(3, device="meta").long()}, "on the CPU.*on meta"),
    "negative": (_rows, {"counters": torch.tensor([0, 1, -1])}, r"in \[0, 2\^63\), got a neg"),
    "least": (_rows, {"counters": torch.tensor([-(2**63), 1, 0])}, "got a negative one; RowKeys"),
    "twice": (
        _rows,
        {"keys": torch.tensor([7, 5, 7]), "counters": torch.tensor([9, 9, 9])},
        "two rows have the same key and counter, so that their difference would show the data",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_row_noise(backend: str, name: str) -> None:
    make, changed, match = BAD_ROWS[name]
    arguments = {"std": 1.0, "keys": torch.arange(3), "counters": torch.zeros(3).long(), **changed}
    refuses(match, add_row_noise_, make(), **arguments)


def test_rows_without_elements_are_checked_too(backend: str) -> None:
    same = torch.zeros(3).long()
    refuses("same key and counter", add_row_noise_, torch.zeros(3, 0), 1.0, same, same)


def test_row_noise_shares_no_memory(backend: str) -> None:
    keys = torch.arange(6)
    x = keys[:2].view(torch.float64).view(2, 1)
    refuses("x shares memory", add_row_noise_, x, 1.0, keys[:2], torch.zeros(2).long())
    refuses("x shares memory", add_row_noise_, x, 1.0, torch.arange(2), keys[1:3])


def test_no_message_tells_a_key(backend: str) -> None:
    keys = torch.tensor([1234567890, 1234567890])
    for counters in ([987654321, 987654321], [0, -987654321]):
        with pytest.raises(ValueError, match="RowKeys") as raised:
            add_row_noise_(torch.zeros(2, 3), 1.0, keys, torch.tensor(counters))
        assert "12345" not in str(raised.value) and "98765" not in str(raised.value)
