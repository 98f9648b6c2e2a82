"""Shrinking a tensor's singular values in plain PyTorch, by the SVD of every slice.

These functions are the documentation of the compiled ones, the fallback where those are missing,
and, given float64 inputs, the truth that the others are tested against. They take the arguments
of the operators' schemas (``dpkernels.ops.tsvd``), already checked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fourier_slices(op: str, index: int, tensor: Tensor) -> Tensor:
    """Return the slices ``[K // 2 + 1, d, h]`` of the unnormalised real FFT over the clients.

    The other slices are their conjugates. Raises ValueError, naming ``tensors[index]``, if one of
    their elements is not finite (a RuntimeError inside ``torch.compile``).
    """
    slices: Tensor = torch.fft.rfft(tensor, dim=2).permute(2, 0, 1)
    finite = torch.view_as_real(slices).isfinite().all()
    message = (
        f"{op}: tensors[{index}] has values that are not finite, or whose sum over the clients is "
        "not; drop that client's upload"
    )
    if torch.compiler.is_compiling():
        torch._assert_async(finite, message)
    elif not finite:
        raise ValueError(message)
    return slices


def to_clients(slices: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of ``fourier_slices`` with the shape and the strides of ``like``."""
    clients = torch.fft.irfft(slices.permute(1, 2, 0), n=like.shape[2], dim=2)
    return torch.empty_like(like).copy_(clients)


def threshold_by_svd(slices: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """``U max(0, s - threshold) V^H`` of every slice, and how many ``s`` exceed the threshold."""
    u, s, vh = torch.linalg.svd(slices, full_matrices=False)
    shrunk = (u * (s - threshold).clamp(min=0).unsqueeze(-2)) @ vh
    return shrunk, (s > threshold).sum(-1)


def soft_threshold(
    tensors: list[Tensor], thresholds: list[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Every tensor with its slices' singular values shrunk, and how many of them were kept."""
    out, kept = [], []
    for index, (tensor, threshold) in enumerate(zip(tensors, thresholds, strict=True)):
        slices = fourier_slices("soft_threshold", index, tensor)
        shrunk, count = threshold_by_svd(slices, threshold)
        out.append(to_clients(shrunk, tensor))
        kept.append(count)
    return out, kept


def shrink_factors(values: Tensor, curves: Tensor) -> Tensor:
    """Return what singular values ``[S, n]`` are multiplied with, float64 ``[S, n]``.

    curves: float64 ``[S, 4]``: cut, subtracted, upper and lower of ``tsvd.shrinkers``.
    """
    s = values.double()
    cut, subtracted, upper, lower = curves.unsqueeze(1).unbind(2)
    high, low = upper / s, lower / s
    below = (1 - high) * (1 + high) * (1 - low) * (1 + low)
    factors = (1 - subtracted / s) * below.sqrt()
    return torch.where(s > cut, factors, 0.0)


def shrink_by_svd(slices: Tensor, curves: Tensor) -> tuple[Tensor, Tensor]:
    """Every slice with its singular values shrunk, and how many of each are above the cut.

    slices: ``[S, d, h]``; curves: float64 ``[S, 4]``. A cut of 0 leaves a slice as it is.
    """
    u, s, vh = torch.linalg.svd(slices, full_matrices=False)
    shrunk = (s.double() * shrink_factors(s, curves)).to(s.dtype)
    cut = curves[:, :1]
    out = torch.where(cut.unsqueeze(2) > 0, (u * shrunk.unsqueeze(-2)) @ vh, slices)
    return out, ((s > cut) | (cut == 0)).sum(1)


def curves_of(tensors: list[Tensor], curves: list[float]) -> list[Tensor]:
    """Return the curves of each tensor, float64 ``[K // 2 + 1, 4]``, from the flat list of all."""
    table = torch.tensor(curves, dtype=torch.float64).view(-1, 4)
    parts = table.split([x.shape[2] // 2 + 1 for x in tensors])
    return [part.to(x.device) for part, x in zip(parts, tensors, strict=True)]


def shrink(tensors: list[Tensor], curves: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """Every tensor with its slices' singular values shrunk, and how many are above the cut."""
    out, kept = [], []
    for index, (tensor, of_tensor) in enumerate(
        zip(tensors, curves_of(tensors, curves), strict=True)
    ):
        slices = fourier_slices("shrink", index, tensor)
        shrunk, count = shrink_by_svd(slices, of_tensor)
        out.append(to_clients(shrunk, tensor))
        kept.append(count)
    return out, kept


def singular_values(tensors: list[Tensor]) -> list[Tensor]:
    """Singular values ``[K // 2 + 1, min(d, h)]`` of every tensor's slices, largest first."""
    return [
        torch.linalg.svdvals(fourier_slices("singular_values", index, tensor))
        for index, tensor in enumerate(tensors)
    ]
