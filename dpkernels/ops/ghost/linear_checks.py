"""Argument checks of the linear layer's functions."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.checks import check_writable
from dpkernels.ops.factor import Diagonal, Factor, Full
from dpkernels.ops.ghost.linear_plan import FORMULAS, Sizes
from dpkernels.ops.ghost.reference_linear import sum_dtype

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def describe(tensor: Tensor) -> str:
    """Return shape, dtype and device of a tensor, for messages."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def check_inputs(op: str, activations: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as ``[B, T, width]``, detached; raise ValueError if they do not fit."""
    a, d = activations.detach(), errors.detach()
    if a.dim() < 2 or a.dtype not in DTYPES:
        raise ValueError(
            f"{op}: activations must be [B, *, I] float32/bf16/fp16/float64, got {describe(a)}"
        )
    if a.shape[:-1] != d.shape[:-1] or a.dtype != d.dtype or a.device != d.device:
        raise ValueError(
            f"{op}: errors must be {[*a.shape[:-1], 'O']} {a.dtype} on {a.device}, like "
            f"activations {describe(a)}, got {describe(d)}"
        )
    if a.dim() == 2:
        return a.unsqueeze(1), d.unsqueeze(1)
    return a.flatten(1, -2), d.flatten(1, -2)


def check_factors(
    op: str, a: Tensor, d: Tensor, left: Factor | None, right: Factor | None, bias: bool
) -> None:
    """Raise ValueError unless both factors fit the sides that they act on."""
    _check_factor(op, "left", left, d, (d.shape[-1],))
    sizes = (a.shape[-1], a.shape[-1] + 1)
    _check_factor(op, "right", right, a, sizes)
    if right is not None and right.size == sizes[1] and not bias:
        raise ValueError(
            f"{op}: right has size {right.size} = I + 1, which includes the bias, but bias is "
            f"False; pass bias=True or a factor of size {sizes[0]}"
        )


def _check_factor(
    op: str, name: str, factor: Factor | None, x: Tensor, sizes: tuple[int, ...]
) -> None:
    if factor is None:
        return
    wanted = sum_dtype(x.dtype)
    size = " or ".join(map(str, sizes))
    if isinstance(factor, Full):
        tensors = [factor.matrix]
    elif isinstance(factor, Diagonal):
        tensors = [factor.values]
    else:
        tensors = [factor.vectors, factor.values]
    for tensor in tensors:
        if factor.size not in sizes or tensor.dtype != wanted or tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} must be of size {size} (outputs for left; inputs, or inputs and a "
                f"constant 1, for right), {wanted} on {x.device}, got {describe(tensor)}"
            )


def check_formula(op: str, formula: str, sizes: Sizes) -> None:
    """Raise ValueError for an unknown formula, or one that does not apply."""
    if formula not in ("auto", *FORMULAS):
        raise ValueError(f"{op}: no formula {formula!r}; there are auto, {', '.join(FORMULAS)}")
    if formula == "rank_one" and sizes.positions != 1:
        raise ValueError(
            f"{op}: formula 'rank_one' needs one position for each sample, got {sizes.positions}: "
            "the gradient is a sum of so many outer products; use 'gram', 'materialised' or 'auto'"
        )


def check_weights(op: str, factors: Tensor, batch: int, like: Tensor) -> None:
    """Raise ValueError unless ``factors`` are ``[B]`` and of the dtype of the sums."""
    wanted = sum_dtype(like.dtype)
    if list(factors.shape) != [batch] or factors.dtype != wanted or factors.device != like.device:
        raise ValueError(
            f"{op}: factors must be [{batch}] {wanted} on {like.device}, got {describe(factors)}; "
            "clip_factors makes them"
        )


def output(
    op: str, name: str, given: Tensor | None, shape: tuple[int, ...], like: Tensor, accumulate: bool
) -> Tensor:
    """Return the buffer to write: the one given, checked, or a new one."""
    dtype = sum_dtype(like.dtype)
    if given is None:
        if accumulate:
            raise ValueError(f"{op}: accumulate=True needs {name}, the buffer to add to")
        return like.new_empty(shape, dtype=dtype)
    if (
        given.shape != shape
        or given.dtype != dtype
        or given.device != like.device
        or not given.is_contiguous()
    ):
        raise ValueError(
            f"{op}: {name} must be contiguous {list(shape)} {dtype} on {like.device}, got "
            f"{describe(given)} with strides {list(given.stride())}"
        )
    return given


def check_outputs(op: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Raise unless the outputs may be written and share no memory with anything else."""
    check_writable(op, "out", outputs, inputs)
