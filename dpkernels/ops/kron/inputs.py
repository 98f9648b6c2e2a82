"""What the estimators of second moments take, and how they refuse it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
Sharing = Literal["expand", "reduce"]
Role = Literal["activations", "errors"]
SHARINGS: tuple[Sharing, ...] = ("expand", "reduce")
ROLES: tuple[Role, ...] = ("activations", "errors")


def describe(tensor: Tensor) -> str:
    """Return shape, dtype and device, for messages."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def known(op: str, name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return ``value``, or raise if it is none of ``choices``."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def rows_of(op: str, x: Tensor, channel_dim: int) -> Tensor:
    """Return x as ``[B, T, n]``: a view, or a copy where the positions cannot be merged."""
    if x.dim() < 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"{op}: x must be [B, n] or [B, T..., n] float32/bf16/fp16/float64, got {describe(x)}"
        )
    if not -x.dim() <= channel_dim < x.dim() or channel_dim % x.dim() == 0:
        raise ValueError(
            f"{op}: channel_dim must name an axis of x {describe(x)} behind the first, got "
            f"{channel_dim}"
        )
    last = x.detach().movedim(channel_dim, -1)
    return last.reshape(x.shape[0], math.prod(last.shape[1:-1]), last.shape[-1])


def finite(op: str, moment: Tensor) -> Tensor:
    """Return ``moment``, or raise if it is not finite: the diagonal, a sum of squares, tells."""
    if not torch.compiler.is_compiling():
        diagonal = moment.diagonal(dim1=-2, dim2=-1) if moment.dim() > 1 else moment
        if not bool(diagonal.isfinite().all()):
            raise ValueError(
                f"{op}: x holds NaN or infinity, or numbers whose squares overflow "
                f"{moment.dtype}; look at the probes that it came from"
            )
    return moment
