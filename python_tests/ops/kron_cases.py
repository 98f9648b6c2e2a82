"""Inputs and plain PyTorch results that the tests of ``kron`` and ``kron_sum`` share."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMS = ["identity", "full", "diagonal", "low rank"]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def numbers(*shape: int, dtype: torch.dtype = torch.float32, bits: int = 20) -> Tensor:
    """Return normals, or, of float64, multiples of 2^-bits in [-1, 1).

    Sums of products of the latter are exact in float64, which therefore is the truth even for
    float64 results, and they need more than float32 has.
    """
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    if dtype != torch.float64:
        return torch.randn(shape, generator=generator).to(dtype)
    scale = 1 << bits
    return torch.randint(-scale, scale, shape, generator=generator).double() / scale


def symmetric(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    matrix = numbers(size, size, dtype=dtype, bits=6)
    return matrix.triu() + matrix.triu(1).T


def factor(
    form: str, size: int, dtype: torch.dtype = torch.float32, rank: int = 3
) -> Factor | None:
    """Return a factor; a low rank's formula does not need orthonormal vectors, so they are not."""
    if form == "identity":
        return None
    if form == "full":
        return Full(symmetric(size, dtype))
    if form == "diagonal":
        return Diagonal(numbers(size, dtype=dtype, bits=6))
    vectors = numbers(size, rank, dtype=dtype, bits=6)
    return LowRank(vectors, numbers(rank, dtype=dtype, bits=6), 0.25)


def augmented(x: Tensor) -> Tensor:
    return torch.cat((x, torch.ones((*x.shape[:-1], 1), dtype=x.dtype)), -1)


def applied(x: Tensor, side: Factor | None) -> Tensor:
    """``x U`` in plain PyTorch, in the dtype of ``x``."""
    if side is None:
        return x
    if isinstance(side, Full):
        return x @ side.matrix.to(x.dtype)
    if isinstance(side, Diagonal):
        return x * side.values.to(x.dtype)
    vectors, values = side.vectors.to(x.dtype), side.values.to(x.dtype)
    return side.tail * x + (x @ vectors * (values - side.tail)) @ vectors.T


def applied_left(x: Tensor, side: Factor | None) -> Tensor:
    return applied(x.mT, side).mT
