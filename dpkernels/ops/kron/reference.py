"""Kronecker preconditioning in plain PyTorch.

These functions are the documentation of the compiled ones, the fallback where those are missing,
and, given float64 inputs, the truth that the others are tested against. They take the arguments
of the operators' schemas (``apply.py``, ``moments.py``), already checked. A factor comes as its
tensors: [] the identity, [diagonal], [matrix] or [vectors, values].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors, moments and results for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def apply_factor_(out: Tensor, x: Tensor, factor: list[Tensor], tail: float, bias: bool) -> None:
    """``out = x U``, or ``[x, 1] U`` with ``bias``, for the rows of x ``[M, n]``."""
    n = x.shape[1]
    x = x.to(out.dtype)
    if len(factor) == 2:
        _apply_low_rank_(out, x, factor[0], factor[1] - tail, tail, bias)
    elif factor and factor[0].dim() == 2:
        if bias:
            torch.addmm(factor[0][n], x, factor[0][:n], out=out)
        else:
            torch.mm(x, factor[0], out=out)
    else:
        diagonal = factor[0] if factor else out.new_ones(out.shape[1])
        out[:, :n] = x * diagonal[:n]
        out[:, n:] = diagonal[n:]


def _apply_low_rank_(
    out: Tensor, x: Tensor, vectors: Tensor, gains: Tensor, tail: float, bias: bool
) -> None:
    """``out = tail x + ((x V) * gains) V^T``, gains being values - tail."""
    n = x.shape[1]
    inner = torch.addmm(vectors[n], x, vectors[:n]) if bias else x @ vectors
    inner *= gains
    if bias:
        out[:, :n] = tail * x
        out[:, n] = tail
        out.addmm_(inner, vectors.T)
    else:
        torch.addmm(x, inner, vectors.T, beta=tail, out=out)


def apply_kron_(
    out: Tensor,
    x: Tensor,
    left: list[Tensor],
    left_tail: float,
    right: list[Tensor],
    right_tail: float,
) -> None:
    """``out = U_G X U_A`` for the matrices of x ``[N, O, I]``."""
    columns = x.shape[2]
    half = x if not right else torch.empty_like(out)
    if right:
        apply_factor_(half.view(-1, columns), x.reshape(-1, columns), right, right_tail, bias=False)
    half = half.to(out.dtype)
    if len(left) == 2:
        inner = torch.matmul(left[0].T, half) * (left[1] - left_tail).unsqueeze(1)
        torch.add(left_tail * half, torch.matmul(left[0], inner), out=out)
    elif left and left[0].dim() == 2:
        torch.matmul(left[0], half, out=out)
    elif left:
        torch.mul(half, left[0].unsqueeze(1), out=out)
    else:
        out.copy_(half)


def second_moment(x: Tensor, bias: bool, scale: float) -> Tensor:
    """``scale * sum_r [x_r, 1][x_r, 1]^T`` over the rows of x ``[B, T, n]``: ``[n, n]``."""
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2]).to(sum_dtype(x.dtype))
    return _scaled_moment(rows, bias, scale)


def _scaled_moment(rows: Tensor, bias: bool, scale: float) -> Tensor:
    """``scale * [x, 1]^T [x, 1]`` for rows x ``[..., R, n]``."""
    if bias:
        rows = pad(rows, (0, 1), value=1.0)
    product = rows.mT @ rows
    # A product of the library is symmetric to rounding; this is exactly so.
    return torch.add(product, product.mT).mul_(scale / 2)


def patches(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Patches of x ``[B, C, *spatial]``: ``[groups, B * positions, C / groups * kernel elements]``.

    The elements of a patch are in the order of a convolution's weight, channel first.
    """
    x = pad(x, [p for side in reversed(padding) for p in (side, side)])
    for axis, (size, step, hole) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + axis, hole * (size - 1) + 1, step)
    # [B, C, *positions, *kernel with its holes]
    for axis, hole in enumerate(dilation):
        taps = torch.arange(0, x.shape[axis - len(kernel)], hole, device=x.device)
        x = x.index_select(axis - len(kernel), taps) if hole > 1 else x
    x = x.unflatten(1, (groups, -1)).movedim(2, 2 + len(kernel))
    return x.movedim(1, 0).flatten(1, 1 + len(kernel)).flatten(2)


def conv_second_moment(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: bool,
    scale: float,
) -> Tensor:
    """``scale * sum_r [p_r, 1][p_r, 1]^T`` over the patches of each group: ``[groups, n, n]``."""
    rows = patches(x, kernel, stride, padding, dilation, groups).to(sum_dtype(x.dtype))
    return _scaled_moment(rows, bias, scale)
