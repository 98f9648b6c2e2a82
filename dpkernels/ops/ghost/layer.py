"""What the layers of this room share: checks, buffers for sums, dropped samples, gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpkernels.ops.checks import check_writable
from dpkernels.ops.factor import Diagonal, Factor, Full, parts_of

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class LayerSum(NamedTuple):
    """What a layer's ``clip_and_sum`` returns.

    weight: clipped sum, shaped like the layer's weight; the buffer that was passed, if one was.
    bias: the same for the bias, or None.
    sq_norms: float64 ``[B]``. Private: depends on each sample.
    factors: ``[B]``, of the dtype of the sums.
    """

    weight: Tensor
    bias: Tensor | None
    sq_norms: Tensor
    factors: Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors and sums for inputs of ``dtype``: float32 or wider."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def describe(tensor: Tensor) -> str:
    """Return shape, dtype and device for a message."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def check_pair(op: str, names: tuple[str, str], first: Tensor, second: Tensor) -> None:
    """Raise ValueError unless both are floating tensors of one dtype on one device."""
    if first.dtype in DTYPES and first.dtype == second.dtype and first.device == second.device:
        return
    raise ValueError(
        f"{op}: {names[0]} and {names[1]} must be float32, bf16, fp16 or float64, of one dtype and "
        f"on one device, got {describe(first)} and {describe(second)}"
    )


def check_factor_size(op: str, name: str, factor: Factor | None, sizes: Sequence[int]) -> None:
    """Raise ValueError unless ``factor`` is None or acts on vectors of one of ``sizes``."""
    if factor is not None and factor.size not in sizes:
        wanted = " or ".join(str(size) for size in sizes)
        raise ValueError(
            f"{op}: {name} must act on vectors of {wanted} elements, got {factor.size}"
        )


def check_factor(
    op: str, name: str, factor: Factor | None, sizes: Sequence[int], like: Tensor
) -> None:
    """Raise ValueError unless ``factor`` is None or fits, in the dtype of sums of ``like``."""
    check_factor_size(op, name, factor, sizes)
    wanted = sum_dtype(like.dtype)
    for part in parts_of(factor)[0]:
        if part.dtype != wanted or part.device != like.device:
            raise ValueError(
                f"{op}: {name} must be {wanted} on {like.device} for inputs {describe(like)}, got "
                f"{describe(part)}; convert it once, where it is made"
            )


def check_factors(op: str, factors: Tensor, batch: int, like: Tensor) -> None:
    """Raise ValueError unless ``factors`` is ``[B]`` in the dtype of sums of ``like``."""
    wanted = sum_dtype(like.dtype)
    if list(factors.shape) == [batch] and factors.dtype == wanted and factors.device == like.device:
        return
    raise ValueError(
        f"{op}: factors must be [{batch}] {wanted} on {like.device}, got {describe(factors)}; "
        "dpkernels.ops.clip.clip_factors makes them"
    )


def sum_buffer(
    op: str,
    name: str,
    out: Tensor | None,
    shape: Sequence[int],
    like: Tensor,
    accumulate: bool,
    inputs: Sequence[Tensor],
) -> Tensor:
    """Return the buffer to write a sum of ``shape`` into: ``out``, checked, or a new one."""
    dtype = sum_dtype(like.dtype)
    if out is None:
        if accumulate:
            raise ValueError(f"{op}: accumulate=True needs {name}, the buffer to add to")
        return like.new_empty(tuple(shape), dtype=dtype)
    if (
        list(out.shape) != list(shape)
        or out.dtype != dtype
        or out.device != like.device
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"{op}: {name} must be contiguous {list(shape)} {dtype} on {like.device}, got "
            f"{describe(out)} with strides {list(out.stride())}"
        )
    check_writable(op, name, [out], inputs)
    return out


def sum_buffers(
    op: str,
    buffers: tuple[Tensor | None, Tensor | None],
    shapes: tuple[Sequence[int], Sequence[int] | None],
    like: Tensor,
    accumulate: bool,
    inputs: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Return the buffers of weight and bias, checked or new; None where there is no bias.

    buffers: ``out`` and ``bias_out`` as passed; shapes: of both, None for no bias.
    """
    out, bias_out = buffers
    shape, bias_shape = shapes
    weight = sum_buffer(op, "out", out, shape, like, accumulate, inputs)
    if bias_shape is None:
        if bias_out is not None:
            raise ValueError(
                f"{op}: bias_out was passed, but the norms were taken with bias=False; leave it "
                "out, or take the norms with the bias"
            )
        return weight, None
    others = [*inputs, weight]
    return weight, sum_buffer(op, "bias_out", bias_out, bias_shape, like, accumulate, others)


def write_sum(out: Tensor, total: Tensor, accumulate: bool) -> None:
    """``out (+)= total``, which has as many elements and is rounded first."""
    total = total.reshape(out.shape).to(out.dtype)
    if accumulate:
        out.add_(total)
    else:
        out.copy_(total)


def drop_samples(factors: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``tensors`` ``[B, ...]`` with zeros where the factor is 0, whatever was there.

    Zero times NaN would be NaN in a product. On the CPU nothing is copied if no sample is dropped;
    elsewhere, and in a compiled graph, asking would make the host wait.
    """
    kept = factors != 0
    if factors.device.type == "cpu" and not torch.compiler.is_compiling() and bool(kept.all()):
        return tensors
    return tuple(torch.where(kept.view(-1, *[1] * (t.dim() - 1)), t, 0) for t in tensors)


def largest_gain(factor: Factor) -> Tensor:
    """Return a bound of the norm of the factor with all its numbers made positive, float64.

    It is what rounding errors of a product with it are to be multiplied by. ``Full``: the root of
    the largest sums of a row and of a column; ``LowRank``: its r vectors have length 1 each.
    """
    if isinstance(factor, Full):
        sizes = factor.matrix.detach().abs().double()
        return (sizes.sum(0).max() * sizes.sum(1).max()).sqrt()
    values = factor.values.detach().double()
    if isinstance(factor, Diagonal):
        return values.abs().max()
    return abs(factor.tail) + (values - factor.tail).abs().sum()
