"""Gradients for the tests of ``clip``: sizes, layouts, truth and the plain-PyTorch baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("clip_and_sum_", "clip_factors", "row_sq_norms", "weighted_row_sum_")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Zero, one, odd, and one over a block, in both directions.
SIZES = (
    (0, 5),
    (5, 0),
    (0, 0),
    (1, 1),
    (1, 257),
    (3, 65),
    (7, 1025),
    (9, 4097),
    (65, 7),
    (257, 33),
    (1025, 3),
)
# Widths of a list of tensors: some are empty, none is like its neighbour.
WIDTHS = ((5,), (65, 0, 1, 1025), (0, 0), (0, 257, 3), (7,) * 12)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums and factors of such gradients have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradients(batch: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return ``[batch, width]`` normal values of mean 1, each row at its own scale, 1/4 to 4.

    With a mean the sum over rows does not cancel, so one ulp of its scale means something even
    where the output is a single number.
    """
    generator = torch.Generator().manual_seed(1000 * seed + 10 * batch + width)
    values = torch.randn(batch, width, generator=generator, dtype=torch.float64)
    scales = 4.0 ** (2 * torch.rand(batch, 1, generator=generator, dtype=torch.float64) - 1)
    return ((values + 1) * scales).to(dtype)


def median_bound(grads: Sequence[Tensor]) -> float:
    """Return a norm bound that clips about half of the rows."""
    norms = sum(g.double().square().sum(1) for g in grads)
    assert isinstance(norms, Tensor)
    return norms.median().sqrt().item() or 1.0 if norms.numel() else 1.0


def exact_sq_norms(grads: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.longdouble]]:
    """Return the squared norms of the rows in extended precision."""
    rows = grads.double().numpy().astype(np.longdouble)
    return np.asarray((rows * rows).sum(axis=1))


def exact_factors(grads: Sequence[Tensor], bound: float, mode: str, gamma: float) -> Tensor:
    """Return the true clip factors of the rows' norm over all ``grads``, float64 ``[B]``."""
    norms = np.sqrt(np.sum([exact_sq_norms(g) for g in grads], axis=0))
    if mode == "automatic":
        factors = bound / (norms + gamma)
    else:
        factors = bound / np.maximum(norms, bound)
    return torch.from_numpy(factors.astype(np.float64))


def plain_factors(grads: Sequence[Tensor], bound: float, mode: str, gamma: float) -> Tensor:
    """Return the clip factors as PyTorch code computes them in the gradients' own sum dtype."""
    dtype = sum_dtype(grads[0].dtype)
    norms = torch.stack([g.to(dtype).norm(dim=1) for g in grads]).norm(dim=0)
    if mode == "automatic":
        return torch.div(bound, norms + gamma)
    return torch.clamp(bound / norms, max=1)


def exact_sum(grads: Tensor, factors: Tensor) -> Tensor:
    """Return ``factors @ grads`` in extended precision, rounded to float64."""
    rows = grads.double().numpy().astype(np.longdouble)
    weights = factors.double().numpy().astype(np.longdouble)
    total = (weights[:, None] * rows).sum(axis=0)
    return torch.from_numpy(np.asarray(total, dtype=np.float64))


def plain_sum(grads: Tensor, factors: Tensor) -> Tensor:
    """Return ``factors @ grads`` in plain PyTorch, in the factors' dtype."""
    return factors @ grads.to(factors.dtype)


def assert_sum(actual: Tensor, grads: Tensor, factors: Tensor, start: Tensor | None = None) -> None:
    """Assert that ``actual`` is ``factors @ grads``, on top of ``start``."""
    plain, exact = plain_sum(grads, factors), exact_sum(grads, factors)
    if start is not None:
        plain, exact = start + plain, start.double() + exact
    assert_as_accurate(actual, plain, exact)


def _columns(g: Tensor) -> Tensor:
    wide = g.new_full((g.shape[0], g.shape[1] + 8), float("nan"))
    return wide[:, 3 : 3 + g.shape[1]].copy_(g)


def _strided_rows(g: Tensor) -> Tensor:
    return g.new_full((2 * g.shape[0] + 1, g.shape[1]), float("nan"))[1::2].copy_(g)


def _strided_columns(g: Tensor) -> Tensor:
    return g.new_full((g.shape[0], 3 * g.shape[1] + 2), float("nan"))[:, 2::3].copy_(g)


def _misaligned(g: Tensor) -> Tensor:
    return g.new_full((g.numel() + 1,), float("nan"))[1:].view_as(g).copy_(g)


# The same values at other addresses. What lies between them is NaN, so reading it shows.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "columns": _columns,
    "transposed": lambda g: g.t().contiguous().t(),
    "strided_rows": _strided_rows,
    "strided_columns": _strided_columns,
    "misaligned": _misaligned,
}
