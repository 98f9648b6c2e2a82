"""What a caller may get wrong: a mutation of one argument of a well-formed call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from python_tests.sanitize.draw import Draw

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
# None of 2^20 to 2^31: a padding of that size is no mistake, and takes as much memory.
INTEGERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63))
NUMBERS = (0.0, -0.0, -1.0, 1e-320, 1e308, float("inf"), -float("inf"), float("nan"))


def malform(draw: Draw, arguments: list[Any]) -> list[Any]:
    """Return the arguments with one or two of them spoiled; some mutations spoil nothing."""
    spoiled = list(arguments)
    for _ in range(draw.random.randint(1, 2)):
        at = draw.random.randrange(len(spoiled))
        spoiled[at] = _spoil(draw, spoiled[at], _tensors(spoiled))
    return spoiled


def _tensors(arguments: list[Any]) -> list[Tensor]:
    lists = (a if isinstance(a, list) else [a] for a in arguments)
    return [x for each in lists for x in each if isinstance(x, Tensor)]


def _spoil(draw: Draw, value: Any, others: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return draw.one_of(TENSOR_MUTATIONS)(draw, value, others)
    if value is None:
        return draw.one_of(others) if others else None
    if isinstance(value, list):
        return _spoil_list(draw, value, others)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.one_of(INTEGERS)
    if isinstance(value, float):
        return draw.one_of(NUMBERS)
    if isinstance(value, torch.dtype):
        return draw.one_of(DTYPES)
    return draw.one_of(("", "gram", "materialised", "auto", "ql", "jacobi", "no such thing"))


def _spoil_list(draw: Draw, values: list[Any], others: list[Tensor]) -> list[Any]:
    kind = draw.one_of(("element", "element", "element", "drop", "repeat", "empty", "reverse"))
    if kind == "empty" or not values:
        return []
    at = draw.random.randrange(len(values))
    if kind == "drop":
        return values[:at] + values[at + 1 :]
    if kind == "repeat":
        return [*values, values[at]]
    if kind == "reverse":
        return values[::-1]
    return [*values[:at], _spoil(draw, values[at], others), *values[at + 1 :]]


def _other_dtype(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    finite = torch.nan_to_num(x, 0.0, 0.0, 0.0) if x.is_floating_point() else x
    return finite.clamp(-100, 100).to(draw.one_of(DTYPES))


def _other_rank(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    kind = draw.one_of(("more", "fewer", "flat", "scalar"))
    if kind == "more" or x.dim() == 0:
        return x.unsqueeze(draw.random.randint(0, x.dim()))
    if kind == "flat":
        return x.reshape(-1)
    if kind == "scalar":
        return torch.zeros((), dtype=x.dtype)
    return x.flatten(0, 1) if x.dim() > 1 else x.sum()


def _other_size(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    if x.dim() == 0:
        return x
    axis = draw.random.randrange(x.dim())
    size = draw.one_of((0, 1, x.shape[axis] - 1, x.shape[axis] + 1, 2 * x.shape[axis]))
    if 0 <= size <= x.shape[axis]:
        return x.narrow(axis, 0, size)
    return torch.cat([x, x], axis).narrow(axis, 0, max(0, min(size, 2 * x.shape[axis])))


def _other_strides(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    """Return the shape with elements that overlap or are far apart, inside of memory as large."""
    if x.numel() == 0:
        return x
    strides = [draw.random.randint(0, 3) for _ in x.shape]
    last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    memory = torch.zeros(last + 1, dtype=x.dtype)
    return memory.as_strided(x.shape, strides)


def _transposed(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    return x.transpose(0, -1) if x.dim() > 1 else x


def _alias(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    """Return another argument, whole or in part, as this one: outputs then overlap inputs."""
    other = draw.one_of(others)
    flat = other.reshape(-1) if other.is_contiguous() else other
    if flat.dim() == 1 and 0 < x.numel() <= flat.numel():
        return flat.narrow(0, draw.random.randint(0, flat.numel() - x.numel()), x.numel()).view(
            x.shape
        )
    return other


def _elsewhere(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    return x.to("meta") if draw.flag() else x.contiguous().to_sparse()


def _autograd(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    if draw.flag() and x.is_floating_point():
        return x.detach().clone().requires_grad_()
    with torch.inference_mode():
        return x.clone()


def _values(draw: Draw, x: Tensor, others: list[Tensor]) -> Tensor:
    """Return the tensor with values that no index, label, span or matrix may have."""
    y = x.clone(memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    choices = NUMBERS if y.is_floating_point() or y.is_complex() else INTEGERS
    flat = y.view(-1)
    for _ in range(draw.random.randint(1, 3)):
        flat[draw.random.randrange(flat.numel())] = torch.tensor(draw.one_of(choices)).to(y.dtype)
    return y


TENSOR_MUTATIONS: tuple[Callable[[Draw, Tensor, list[Tensor]], Tensor], ...] = (
    _other_dtype,
    _other_rank,
    _other_size,
    _other_size,
    _other_strides,
    _transposed,
    _alias,
    _elsewhere,
    _autograd,
    _values,
    _values,
)
