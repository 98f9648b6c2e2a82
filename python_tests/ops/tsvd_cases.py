"""Tensors of clients' weights for the tests of ``tsvd``, and how their results are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import dpkernels
from dpkernels.ops import tsvd
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("tsvd_soft_threshold", "tsvd_singular_values")

# One client, even and odd numbers of them, wide, tall and square, single rows and columns.
SHAPES = [(1, 1, 1), (7, 3, 2), (3, 7, 3), (1, 9, 4), (6, 6, 6), (17, 33, 5)]
# Beyond the blocks of the CPU kernels (128 and 96 rows, 32 columns), and many clients.
LARGE_SHAPES = [(259, 33, 3), (97, 65, 4), (40, 130, 10), (9, 8, 100), (64, 64, 2)]


def clients(d: int, h: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``[d, h, count]`` normal weights; the same for the same shape."""
    generator = torch.Generator().manual_seed(d * 10_000 + h * 100 + count)
    return torch.randn(d, h, count, generator=generator, dtype=dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "clients last": lambda x: x.contiguous(),
    "clients first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "clients in the middle": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0],
    "a part": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 4), value=torch.nan)[:, 3:-4, 1:-2],
}


def exact_values(tensor: Tensor) -> Tensor:
    """Return the singular values of all slices in float64, from the definition."""
    return torch.linalg.svdvals(torch.fft.fft(tensor.double(), dim=2).permute(2, 0, 1))


def threshold_between(tensor: Tensor, quantile: float = 0.5) -> float:
    """Return a threshold in the middle of two singular values, so that rounding moves none over it.

    quantile: about this part of the singular values lies below.
    """
    values = exact_values(tensor).flatten().sort().values
    gaps = values.diff()
    if gaps.numel() == 0:
        return 0.5 * values.item()
    near = int(quantile * (gaps.numel() - 1))
    low, high = max(0, near - 5), min(gaps.numel(), near + 6)
    at = low + int(gaps[low:high].argmax())
    return 0.5 * (values[at] + values[at + 1]).item()


def plain(tensors: Sequence[Tensor], thresholds: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the thresholded tensors, flattened into one, of the reference in ``dtype``."""
    with dpkernels.use_backend("reference"):
        found = tsvd.soft_threshold([x.to(dtype) for x in tensors], thresholds).tensors
    return torch.cat([x.flatten() for x in found])


def check(tensors: Sequence[Tensor], thresholds: Sequence[float]) -> tsvd.Thresholded:
    """Threshold float32 tensors on the backend that is set; assert that they are as they should be.

    All tensors are judged together: a small one alone might be exact by luck in plain PyTorch.
    """
    result = tsvd.soft_threshold(tensors, thresholds)
    actual = torch.cat([x.flatten() for x in result.tensors])
    exact = plain(tensors, thresholds, torch.float64)
    assert_as_accurate(actual, plain(tensors, thresholds, torch.float32), exact)
    return result
