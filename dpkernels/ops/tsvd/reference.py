"""Soft threshold of a tensor's singular values in plain PyTorch, by the SVD of every slice.

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


def singular_values(tensors: list[Tensor]) -> list[Tensor]:
    """Singular values ``[K // 2 + 1, min(d, h)]`` of every tensor's slices, largest first."""
    return [
        torch.linalg.svdvals(fourier_slices("singular_values", index, tensor))
        for index, tensor in enumerate(tensors)
    ]
