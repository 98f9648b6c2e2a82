"""The inverse of a matrix after a rank-one change, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_writable
from dpkernels.ops.sherman_morrison import reference

DTYPES = frozenset({torch.float32, torch.float64})
# The denominator is a sum of n rounded terms; below this many ulps of their magnitude nothing of
# it is left but rounding.
_TOLERANCE_ULPS = 8


def rank_one_inverse_update_(
    inverse: Tensor, u: Tensor, v: Tensor | None = None, *, check: bool = True
) -> Tensor:
    """Turn ``A^-1`` into ``(A + u v^T)^-1`` in place; return ``1 + v^T A^-1 u``.

    H <- H - (H u)(H^T v)^T / (1 + v^T H u)  (Sherman-Morrison), with H = A^-1. The denominator is
    det(A + u v^T) / det(A): zero means that there is no inverse.

    inverse: H, ``[n, n]`` float32 or float64, contiguous by rows or (as torch.linalg.inv returns
        it) by columns.
    u, v: ``[n]`` of the same dtype. Without v it is u and H must be symmetric, which is not looked
        at (one triangle may be all that is read for H u); it stays symmetric to the bit.
    check: raise if the denominator is zero to rounding, or not finite. On a GPU that waits for it;
        without the check, and under torch.compile, H is left as it is in that case and the
        denominator tells.

    6 n^2 flops (5 n^2 if symmetric); n^2 elements read for both products (half of them if
    symmetric), n^2 read and written for the update. Returns the denominator, a float64 scalar.
    Raises ValueError for bad input and for a singular update; H is as it was then.
    """
    op = "rank_one_inverse_update_"
    n = inverse.shape[0] if inverse.dim() == 2 else -1
    by_columns = n > 1 and inverse.T.is_contiguous()
    dense = by_columns or inverse.is_contiguous()
    if inverse.dtype not in DTYPES or inverse.shape != (n, n) or not dense:
        raise ValueError(
            f"{op}: inverse must be [n, n] float32 or float64, contiguous by rows or by columns, "
            f"got {list(inverse.shape)} {inverse.dtype}, strides {list(inverse.stride())}"
        )
    vectors = {"u": u} if v is None else {"u": u, "v": v}
    for name, x in vectors.items():
        if x.shape != (n,) or x.dtype != inverse.dtype or x.device != inverse.device:
            raise ValueError(
                f"{op}: {name} must be [{n}] {inverse.dtype} on {inverse.device}, got "
                f"{list(x.shape)} {x.dtype} on {x.device}"
            )
    check_writable(op, "inverse", [inverse], list(vectors.values()))
    tolerance = _TOLERANCE_ULPS * torch.finfo(inverse.dtype).eps
    run = backend.select(_rank_one_inverse_update, inverse.device, inverse.dtype)
    if by_columns and v is not None:
        # (H^T)' = (A^T + v u^T)^-1: the same update of the transpose, which is contiguous by rows.
        u, v = v, u
    rows = inverse.T if by_columns else inverse
    result: Tensor = run(rows, u, v, tolerance)
    denominator, magnitude = result.unbind()
    if check and not torch.compiler.is_compiling():
        _check_denominator(op, denominator.item(), magnitude.item(), tolerance)
    return denominator


def _check_denominator(op: str, denominator: float, magnitude: float, tolerance: float) -> None:
    if not magnitude < float("inf"):
        raise ValueError(
            f"{op}: inverse, u or v are not finite (1 + v^T H u = {denominator:g}); inverse was "
            "left as it was"
        )
    if not abs(denominator) > tolerance * magnitude:
        raise ValueError(
            f"{op}: A + u v^T is singular to rounding: 1 + v^T H u = {denominator:g}, a difference "
            f"of terms of {magnitude:g}; inverse was left as it was: damp A, or drop this term"
        )


def _fake_rank_one_inverse_update(
    inverse: Tensor, u: Tensor, v: Tensor | None, tolerance: float
) -> Tensor:
    return inverse.new_empty(2, dtype=torch.float64)


_rank_one_inverse_update = backend.register(
    "rank_one_inverse_update_(Tensor(a!) inverse, Tensor u, Tensor? v, float tolerance) -> Tensor",
    reference=reference.rank_one_inverse_update_,
    fake=_fake_rank_one_inverse_update,
    dtypes=DTYPES,
    triton="dpkernels.ops.sherman_morrison.triton_impl:rank_one_inverse_update_",
)
