"""Every layer of many uploads as one tensor over clients, and back: what ``tsvd`` works on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.federated.problem import Layer


def fold(layers: Sequence[Layer], uploads: Tensor) -> list[Tensor]:
    """Return a tensor ``[d, h, K]`` for each layer of the uploads ``[K, D]``.

    Linear ``[out, in]`` becomes ``[in, out, K]``, convolution ``[out, in, kh, kw]`` ``[in kh kw,
    out, K]``, a vector ``[n]`` ``[1, n, K]``. They are views.
    """
    found = []
    for layer in layers:
        size = math.prod(layer.shape)
        part = uploads[:, layer.begin : layer.begin + size]
        rows = layer.shape[0] if len(layer.shape) > 1 else size
        found.append(part.unflatten(1, (rows, size // rows)).permute(2, 1, 0))
    return found


def unfold(layers: Sequence[Layer], folded: Sequence[Tensor]) -> Tensor:
    """Return uploads ``[K, D]`` of tensors ``[d, h, K]``: the inverse of ``fold``."""
    return torch.cat([part.permute(2, 1, 0).flatten(1) for part in folded], 1)
