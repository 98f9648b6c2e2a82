"""Random sizes, numbers and tensors, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPILED_FLOATS = (torch.float32, torch.float64)
# Around the widths of vectors (4 to 16), tiles (6, 14) and panels (32).
SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 31, 32, 33)
# Where sums overflow, vanish, or are none.
HARD = (0.0, -0.0, 1e-45, 1e-30, 1e30, -3e38, float("inf"), float("nan"))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors and sums for elements of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Draw:
    """Draws everything that a call needs; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def flag(self) -> bool:
        return self.random.random() < 0.5

    def one_of(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def size(self, least: int = 0, most: int = 33) -> int:
        if self.random.random() < 0.05:  # over one block of rows, records or columns
            return min(most, self.random.randint(34, 400))
        return self.one_of([n for n in SIZES if least <= n <= most])

    def number(self) -> float:
        return self.random.uniform(0.1, 3.0)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normals of this shape, sometimes hard ones, with the strides of some view."""
        values = self._normals(shape)
        if values.numel() and self.random.random() < 0.15:
            flat = values.view(-1)
            flat[self.random.randrange(flat.numel())] = self.one_of(HARD)
        return self.view_of(values.to(dtype))

    def symmetric(self, batch: int, n: int, dtype: torch.dtype) -> Tensor:
        """Return positive definite matrices ``[batch, n, n]``."""
        x = self._normals((batch, n, n))
        return (x @ x.mT + torch.eye(n, dtype=x.dtype)).to(dtype)

    def integers(self, *shape: int, below: int) -> Tensor:
        values = torch.randint(max(below, 1), shape, generator=self.generator)
        return self.view_of(values)

    def output(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a contiguous buffer that ends where its memory ends."""
        return self._normals(shape).to(dtype)

    def view_of(self, x: Tensor) -> Tensor:
        """Return a tensor of the same values: as it is, transposed, a slice, or expanded."""
        kind = self.one_of(("plain", "plain", "transposed", "sliced", "inside", "expanded"))
        if x.dim() == 0 or kind == "plain":
            return x
        axis = self.random.randrange(x.dim())
        if kind == "transposed":
            return x.transpose(0, axis).contiguous().transpose(0, axis)
        if kind == "sliced":
            return x.repeat_interleave(2, axis).narrow(axis, 0, 2 * x.shape[axis])[
                (slice(None),) * axis + (slice(None, None, 2),)
            ]
        if kind == "inside":
            wide = torch.cat([x, x, x], axis)
            return wide.narrow(axis, x.shape[axis], x.shape[axis])
        if x.shape[axis] == 0:
            return x
        return x.narrow(axis, 0, 1).expand(x.shape)

    def _normals(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)
