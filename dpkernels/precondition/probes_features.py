"""Vectors of features: tabular data and bags of words."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Generator, Tensor
from torch.nn import functional

from dpkernels.precondition.probes_synthetic import (
    Labels,
    Synthetic,
    check_labels,
    describe_labels,
    draw_labels,
)

Kind = Literal["gaussian", "sparse", "binary"]


class Features(Synthetic):
    """Independent random features.

    size: how many.
    classes: how many, uniform; or a function (size, generator) -> targets.
    kind: ``gaussian``: of mean 0 and variance 1, for standardised columns; ``sparse``: as TF-IDF
        has it, each present with probability ``density``, its weight 1 plus an exponential number,
        rows scaled to unit length; ``binary``: 1 with probability ``density``, else 0.
    density: in (0, 1], of sparse and binary features. A sparse row that would be empty has one.
    """

    def __init__(
        self,
        size: int,
        classes: Labels,
        kind: Kind = "gaussian",
        *,
        density: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if size < 1:
            raise ValueError(f"Features: size must be at least 1, got {size}")
        if kind not in get_args(Kind):
            raise ValueError(
                f"Features: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}"
            )
        if not 0 < density <= 1:
            raise ValueError(f"Features: density must be in (0, 1], got {density}")
        check_labels("Features", classes)
        self.size, self.classes, self.kind, self.density = size, classes, kind, density
        self.dtype = dtype

    def describe(self) -> str:
        """Return kind, size and targets."""
        density = "" if self.kind == "gaussian" else f" of density {self.density:g}"
        return f"{self.size} {self.kind} features{density}, {describe_labels(self.classes)}"

    def batch(self, size: int, generator: Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return features ``[size, self.size]`` and targets ``[size]``."""
        if self.kind == "gaussian":
            shape = size, self.size
            x = torch.randn(shape, generator=generator, dtype=self.dtype, device=generator.device)
        elif self.kind == "binary":
            x = self._present(size, generator).to(self.dtype)
        else:
            x = self._weights(size, generator)
        return (x,), draw_labels(self.classes, size, generator)

    def _present(self, size: int, generator: Generator) -> Tensor:
        uniform = torch.rand(size, self.size, generator=generator, device=generator.device)
        return uniform < self.density

    def _weights(self, size: int, generator: Generator) -> Tensor:
        """Return rows of non-negative numbers and unit length."""
        present = self._present(size, generator)
        one = torch.randint(self.size, (size, 1), generator=generator, device=generator.device)
        empty = ~present.any(1, keepdim=True)
        present.scatter_(1, one, present.gather(1, one) | empty)
        wide = torch.promote_types(self.dtype, torch.float32)
        uniform = torch.rand(
            present.shape, generator=generator, dtype=wide, device=generator.device
        )
        weights = (1 - torch.log1p(-uniform)) * present
        return functional.normalize(weights, dim=1).to(self.dtype)
