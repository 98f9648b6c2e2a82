"""The layers that ``tsvd`` takes: checked, and how many Fourier slices each has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.float64})
# What the compiled kernels take: see the package.
COMPILED_DTYPES = frozenset({torch.float32})


class Thresholded(NamedTuple):
    """What ``soft_threshold`` and ``shrink`` return.

    tensors: ``[d, h, K]``, with the strides of the input if that was dense; a list for a list.
    kept: int64 ``[K // 2 + 1]``, how many singular values of each slice exceed the threshold; all
        ``min(d, h)`` where that is 0, because nothing is cut then. A list for a list.
    """

    tensors: Tensor | list[Tensor]
    kept: Tensor | list[Tensor]


def slice_count(tensor: Tensor) -> int:
    """Return how many Fourier slices of ``[d, h, K]`` are worked on; the others are conjugates."""
    return tensor.shape[2] // 2 + 1


def all_kept(tensor: Tensor) -> Tensor:
    """Return ``Thresholded.kept`` of a tensor that stays as it is."""
    return tensor.new_full((slice_count(tensor),), min(tensor.shape[:2]), dtype=torch.int64)


def gathered(
    layers: list[Tensor], busy: list[int], found: tuple[list[Tensor], list[Tensor]], as_list: bool
) -> Thresholded:
    """Return what was ``found`` for the layers ``busy``, and the other layers as they are."""
    results, counts = (dict(zip(busy, part, strict=True)) for part in found)
    out = [results[i] if i in results else x.clone() for i, x in enumerate(layers)]
    kept = [counts[i] if i in counts else all_kept(x) for i, x in enumerate(layers)]
    return Thresholded(*((out, kept) if as_list else (out[0], kept[0])))


def checked_layers(op: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as a list, detached; raise ValueError unless ``op`` can take them."""
    layers = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not layers:
        raise ValueError(f"{op}: tensors is an empty list; pass at least one [d, h, K] tensor")
    first = layers[0]
    for x in layers:
        if x.dim() != 3 or x.dtype not in DTYPES:
            raise ValueError(
                f"{op}: tensors must be [d, h, K] float32 or float64, got {_describe(x)}; stack "
                "the clients' weights, as matrices, along a last dimension"
            )
        if x.shape[2] == 0:
            raise ValueError(f"{op}: tensors must have at least one client, got {_describe(x)}")
        if x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"{op}: all of tensors must share dtype and device, got {_describe(first)} and "
                f"{_describe(x)}"
            )
    return [x.detach() for x in layers]


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def fake_thresholded(
    tensors: list[Tensor], numbers: list[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return empty results of the right shape, for ``torch.compile``."""
    kept = [x.new_empty((slice_count(x),), dtype=torch.int64) for x in tensors]
    return [torch.empty_like(x) for x in tensors], kept
