"""``kron``: second moments of a layer's inputs, and factors applied to vectors and matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases.kron import apply, moments
from benchmarks.registry import Case


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the moments of a linear and a convolutional layer, and the applications."""
    yield moments.linear(512 if quick else 4096, 196 if quick else 784)
    yield moments.errors(32 if quick else 256, 32, 196)
    yield moments.convolution(16 if quick else 256, 16)
    rows, size = (128, 196) if quick else (1024, 784)
    yield apply.full(rows, size)
    yield apply.low_rank(rows, size)
    yield apply.matrices(32 if quick else 256, 32, 144)
