"""Rank k (Woodbury): solve with ``rho I + sum_i u_i v_i^T`` from the k vectors alone.

(rho I + U^T V)^-1 g = (g - U^T y) / rho  with  (rho I + V U^T) y = V g,  for U and V ``[k, d]``.
The k x k system is built and solved in float64 whatever the windows are, and the sums of the last
pass are float64, so the cancellation in ``g - U^T y`` costs what it costs in exact products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite, check_writable
from dpkernels.ops.sherman_morrison import reference

DTYPES = frozenset({torch.float32, torch.float64})
# As for the rank-one update: a smallest singular value below this many ulps of the system's entries
# is rounding.
_TOLERANCE_ULPS = 8


def woodbury_solve(
    u: Tensor,
    g: Tensor,
    *,
    rho: float,
    v: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``(rho I + sum_i u_i v_i^T)^-1 g`` without forming a matrix of d x d.

    u: ``[k, d]`` float32 or float64, one rank-one term in each row; 1 <= k, usually <= 64.
    g: ``[d]`` of the same dtype.
    rho: > 0.
    v: like u; None stands for u: the matrix is positive definite then.
    out: ``[d]`` contiguous, to be written; allocated if None.

    k = 1 is the Sherman-Morrison formula. d k^2 flops and k d elements read for the products (twice
    that with v), 2 k d flops and k d elements read for the result. The system is solved by Cholesky
    (by LU with v). Raises ValueError for bad input, and where it is singular to rounding or not
    finite. (Under torch.compile that is not looked at: the result is not finite then.)
    """
    op = "woodbury_solve"
    _check_window(op, "u", u, g)
    if v is not None and (v.shape != u.shape or v.dtype != u.dtype or v.device != u.device):
        raise ValueError(
            f"{op}: v must be {list(u.shape)} {u.dtype} on {u.device} like u, got "
            f"{list(v.shape)} {v.dtype} on {v.device}"
        )
    check_finite(op, "rho", rho, above=0.0)
    out = _output(op, out, g, [u] if v is None else [u, v])
    products: Tensor = backend.select(_window_gram, u.device, u.dtype)(u, v, g)
    gram, projected = products[:, :-1], products[:, -1]
    if v is None:
        weights = _solve(_factorise(op, gram, rho), projected)
    else:
        weights = _solve_general(op, gram, projected, rho, torch.finfo(u.dtype).eps)
    _combine(out, u, g, weights, rho)
    return out


class GradientWindow:
    """The last k gradients W ``[k, d]`` and ``(rho I + W^T W)^-1``, kept current in O(k d) a step.

    When a gradient replaces the oldest one, only its row and column of the Gram matrix W W^T
    change: k dot products instead of k^2 / 2. The Gram matrix and its Cholesky factor are float64.

    size: k >= 1, how many gradients are kept; until as many have come there are fewer.
    dim: d, elements of a gradient (flattened, all parameters together).
    rho: > 0.
    """

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        rho: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        op = "GradientWindow"
        if size < 1 or dim < 0:
            raise ValueError(f"{op}: size must be >= 1 and dim >= 0, got {size} and {dim}")
        if dtype not in DTYPES:
            raise ValueError(f"{op}: dtype must be float32 or float64, got {dtype}")
        check_finite(op, "rho", rho, above=0.0)
        self.rho = rho
        self._rows = torch.zeros(size, dim, dtype=dtype, device=device)
        self._gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._factor = _factorise(op, self._gram[:0, :0], rho)
        self._filled = 0
        self._next = 0

    def __len__(self) -> int:
        """Return how many gradients are in the window."""
        return self._filled

    @property
    def rows(self) -> Tensor:
        """The gradients, ``[len, d]``, in no particular order; a view, not to be written."""
        return self._rows[: self._filled]

    @property
    def gram(self) -> Tensor:
        """Their products, float64 ``[len, len]``; a view, not to be written."""
        return self._gram[: self._filled, : self._filled]

    def push(self, g: Tensor) -> None:
        """Take ``g`` ``[d]`` in, in place of the oldest gradient once the window is full.

        2 k d flops, (k + 2) d elements read, d written. Raises ValueError for bad input, non-finite
        elements included (float64: past 1e154); the window is as it was then.
        """
        op = "GradientWindow.push"
        _check_window(op, "rows", self._rows, g)
        at, filled = self._next, max(self._filled, self._next + 1)
        project = backend.select(_window_project, g.device, g.dtype)
        row = project(self._rows[:filled], g)
        row[at : at + 1] = project(g.unsqueeze(0), g)
        if not row.isfinite().all():
            raise ValueError(
                f"{op}: g is not finite, or its products with the window are not; the window was "
                "left as it was: skip this gradient"
            )
        gram = self._gram[:filled, :filled].clone()
        gram[at], gram[:, at] = row, row
        self._factor = _factorise(op, gram, self.rho)
        self._gram[:filled, :filled] = gram
        self._rows[at] = g
        self._filled, self._next = filled, (at + 1) % self._rows.shape[0]

    def solve(self, g: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``(rho I + W^T W)^-1 g``, ``[d]``; ``g / rho`` while the window is empty.

        g: ``[d]``, a gradient of the window or any other vector.
        out: ``[d]`` contiguous, to be written; allocated if None.

        4 k d flops, (2 k + 2) d elements read, d written. Raises ValueError for bad input; elements
        of g that are not finite make the result so.
        """
        op = "GradientWindow.solve"
        _check_window(op, "rows", self._rows, g)
        out = _output(op, out, g, [self._rows])
        if self._filled == 0:
            return torch.div(g, self.rho, out=out)
        projected = backend.select(_window_project, g.device, g.dtype)(self.rows, g)
        _combine(out, self.rows, g, _solve(self._factor, projected), self.rho)
        return out


def _check_window(op: str, name: str, window: Tensor, g: Tensor) -> None:
    if window.dim() != 2 or window.shape[0] < 1 or window.dtype not in DTYPES:
        raise ValueError(
            f"{op}: {name} must be [k, d] float32 or float64 with k >= 1, got "
            f"{list(window.shape)} {window.dtype}; stack flattened gradients"
        )
    if g.shape != window.shape[1:] or g.dtype != window.dtype or g.device != window.device:
        raise ValueError(
            f"{op}: g must be [{window.shape[1]}] {window.dtype} on {window.device}, got "
            f"{list(g.shape)} {g.dtype} on {g.device}"
        )


def _output(op: str, out: Tensor | None, g: Tensor, inputs: list[Tensor]) -> Tensor:
    if out is None:
        return torch.empty_like(g, memory_format=torch.contiguous_format)
    same = out.shape == g.shape and out.dtype == g.dtype and out.device == g.device
    if not same or not out.is_contiguous():
        raise ValueError(
            f"{op}: out must be {list(g.shape)} contiguous {g.dtype} on {g.device}, got "
            f"{list(out.shape)} {out.dtype} on {out.device}, strides {list(out.stride())}"
        )
    check_writable(op, "out", [out], [g, *inputs])
    return out


def _factorise(op: str, gram: Tensor, rho: float) -> Tensor:
    """Return the Cholesky factor of ``rho I + gram``, float64; raise if there is none."""
    system = gram.clone()
    system.diagonal().add_(rho)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(system)
    if not torch.compiler.is_compiling() and info != 0:
        largest = gram.diagonal().abs().max().item()
        raise ValueError(
            f"{op}: rho I + W W^T is not positive definite: the largest squared norm is "
            f"{largest:g} and rho = {rho:g} is "
            + ("lost beside it; raise rho" if largest < float("inf") else "added; look for NaN")
        )
    return factor


def _solve(factor: Tensor, projected: Tensor) -> Tensor:
    weights: Tensor = torch.cholesky_solve(projected.unsqueeze(1), factor)
    return weights.squeeze(1)


def _solve_general(op: str, gram: Tensor, projected: Tensor, rho: float, eps: float) -> Tensor:
    """Return ``(rho I + gram)^-1 projected``; raise if that is singular to rounding."""
    system = gram.clone()
    system.diagonal().add_(rho)
    if not torch.compiler.is_compiling():
        if not gram.isfinite().all():
            raise ValueError(f"{op}: u or v are not finite; look for the overflow before them")
        smallest = torch.linalg.svdvals(system).min().item()
        magnitude = rho + gram.abs().max().item()
        if not smallest > _TOLERANCE_ULPS * eps * magnitude:
            raise ValueError(
                f"{op}: rho I + V U^T is singular to rounding: its smallest singular value is "
                f"{smallest:g}, its entries are sums of terms of {magnitude:g}; raise rho"
            )
    weights: Tensor = torch.linalg.solve_ex(system, projected).result
    return weights


def _combine(out: Tensor, window: Tensor, g: Tensor, weights: Tensor, rho: float) -> None:
    backend.select(_window_combine, g.device, g.dtype)(out, window, g, weights, 1 / rho)


def _fake_window_gram(u: Tensor, v: Tensor | None, g: Tensor) -> Tensor:
    return u.new_empty((u.shape[0], u.shape[0] + 1), dtype=torch.float64)


def _fake_window_project(window: Tensor, g: Tensor) -> Tensor:
    return window.new_empty(window.shape[0], dtype=torch.float64)


def _fake_window_combine(
    out: Tensor, window: Tensor, g: Tensor, weights: Tensor, scale: float
) -> None:
    return None


_TRITON = "dpkernels.ops.sherman_morrison.triton_impl"

_window_gram = backend.register(
    "window_gram(Tensor u, Tensor? v, Tensor g) -> Tensor",
    reference=reference.window_gram,
    fake=_fake_window_gram,
    dtypes=DTYPES,
    triton=f"{_TRITON}:window_gram",
)
_window_project = backend.register(
    "window_project(Tensor window, Tensor g) -> Tensor",
    reference=reference.window_project,
    fake=_fake_window_project,
    dtypes=DTYPES,
    triton=f"{_TRITON}:window_project",
)
_window_combine = backend.register(
    "window_combine_(Tensor(a!) out, Tensor window, Tensor g, Tensor weights, float scale) -> ()",
    reference=reference.window_combine_,
    fake=_fake_window_combine,
    dtypes=DTYPES,
    triton=f"{_TRITON}:window_combine_",
)
