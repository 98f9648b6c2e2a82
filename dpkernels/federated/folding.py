"""Every layer of many uploads as one tensor over clients, and back: what ``tsvd`` works on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dpkernels.federated.problem import Layer


def fold(layers: Sequence[Layer], uploads: Tensor) -> list[Tensor]:
    """Return a tensor ``[d, h, K]`` for each layer of the uploads ``[K, D]``.

    Linear ``[out, in]`` becomes ``[in, out, K]``, convolution ``[out, in, kh, kw]`` ``[in kh kw,
    out, K]``, a vector ``[n]`` ``[1, n, K]``. They are views.
    """
    return [_folded(layer, uploads) for layer in layers]


def unfold(layers: Sequence[Layer], tensors: Sequence[Tensor], uploads: Tensor) -> Tensor:
    """Return ``[K, D]`` with ``layers`` from ``tensors``, and all others from ``uploads``."""
    out = uploads.clone()
    for layer, tensor in zip(layers, tensors, strict=True):
        _folded(layer, out).copy_(tensor)
    return out


def _folded(layer: Layer, uploads: Tensor) -> Tensor:
    size = math.prod(layer.shape)
    rows = layer.shape[0] if len(layer.shape) > 1 else size
    part: Tensor = uploads[:, layer.begin : layer.begin + size].unflatten(1, (rows, size // rows))
    return part.permute(2, 1, 0)
