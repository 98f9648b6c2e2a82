"""Inputs, float64 truth and buffers of the ``clip`` cases.

Every plain form takes ``factors``, a function from norms ``[B]`` to clip factors ``[B]``, first.
Those called "kept" write into buffers that live from call to call, where PyTorch has ``out=``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.registry import Inputs, poisoned

Factors = Callable[[Tensor], Tensor]

# Rows may be taken in blocks of about this many bytes, so that the sum finds them in the cache that
# the norm left them in. Which size is best depends on the caches, so each is a form of its own.
BLOCK_BYTES = (2**20, 4 * 2**20, 16 * 2**20)


def sums(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Return one buffer of NaN for all sums, and its parts ``[D_l]``, one for each tensor."""
    sizes = [g.shape[1] for g in inputs]
    flat = poisoned(sum(sizes), like=inputs[0])
    return flat, list(flat.split(sizes))


def rows_in_block(inputs: Inputs, block_bytes: int) -> int:
    """Return how many rows (over all tensors, as float32) make a block of ``block_bytes``."""
    row_bytes = 4 * sum(g.shape[1] for g in inputs)
    return max(1, block_bytes // max(1, row_bytes))


def block_name(block_bytes: int) -> str:
    """Return what forms with such blocks are called."""
    return f"row blocks of {block_bytes / 2**20:.3g} MB"


def gradients(
    batch: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Inputs:
    """Return normal gradients ``[batch, size]`` whose rows have log-normal scales (median 1)."""
    scales = torch.randn(batch, 1, generator=generator, device=device).mul_(0.5).exp_()
    shapes = [(batch, size) for size in sizes]
    normals = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    return [normal.mul_(scales).to(dtype) for normal in normals]


def row_squares(g: Tensor) -> Tensor:
    """Return the squared norms ``[B]`` of the rows in float64, without a float64 copy of all."""
    return torch.stack([row.double().square().sum() for row in g])


def weighted_rows(g: Tensor, factors: Tensor) -> Tensor:
    """Return ``sum_b factors[b] * g[b]`` in float64, without a float64 copy of all."""
    total = torch.zeros(g.shape[1], dtype=torch.float64, device=g.device)
    for row, factor in zip(g, factors.double(), strict=True):
        total += factor * row.double()
    return total
