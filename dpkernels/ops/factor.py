"""One side of a Kronecker preconditioner: a symmetric operator on the last axis of a tensor.

The forms cost, for a vector of n elements: ``Full`` 2 n^2 flops, ``LowRank`` 4 n r, ``Diagonal`` n.
None stands for the identity wherever a factor is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Full:
    """A symmetric matrix ``[n, n]``."""

    matrix: Tensor

    def __post_init__(self) -> None:
        shape = list(self.matrix.shape)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"Full: matrix must be [n, n], got {shape}")

    @property
    def size(self) -> int:
        """How many elements the vectors that it takes have."""
        return self.matrix.shape[0]

    def dense(self) -> Tensor:
        """Return the operator as a matrix ``[n, n]``."""
        return self.matrix


@dataclass(frozen=True)
class Diagonal:
    """A diagonal matrix, as its diagonal ``[n]``."""

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1:
            raise ValueError(f"Diagonal: values must be [n], got {list(self.values.shape)}")

    @property
    def size(self) -> int:
        """How many elements the vectors that it takes have."""
        return self.values.shape[0]

    def dense(self) -> Tensor:
        """Return the operator as a matrix ``[n, n]``."""
        return torch.diag(self.values)


@dataclass(frozen=True)
class LowRank:
    """A few eigenpairs and one value for everything else.

    U = tail I + V diag(values - tail) V^T, with orthonormal columns V ``[n, r]``, values ``[r]``.
    """

    vectors: Tensor
    values: Tensor
    tail: float

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2 or self.values.shape != self.vectors.shape[1:]:
            raise ValueError(
                "LowRank: vectors must be [n, r] and values [r], got "
                f"{list(self.vectors.shape)} and {list(self.values.shape)}"
            )

    @property
    def size(self) -> int:
        """How many elements the vectors that it takes have."""
        return self.vectors.shape[0]

    def dense(self) -> Tensor:
        """Return the operator as a matrix ``[n, n]``."""
        middle = self.vectors * (self.values - self.tail)
        identity = torch.eye(self.size, dtype=middle.dtype, device=middle.device)
        return torch.addmm(identity, middle, self.vectors.T, beta=self.tail)


Factor = Full | Diagonal | LowRank


def parts_of(factor: Factor | None) -> tuple[list[Tensor], float]:
    """Return a factor as operators take it: [], [diagonal], [matrix] or [vectors, values]; tail."""
    if factor is None:
        return [], 1.0
    if isinstance(factor, Full):
        return [factor.matrix.detach()], 1.0
    if isinstance(factor, Diagonal):
        return [factor.values.detach()], 1.0
    return [factor.vectors.detach(), factor.values.detach()], factor.tail
