"""FedCEO's server step: every layer of all uploads as one tensor over clients, made low-rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.federated.problem import Layer
from dpkernels.ops.tsvd import soft_threshold


def thresholded_slices(layers: Sequence[Layer], models: Tensor, tau: float) -> Tensor:
    """Return the models ``[K, D]`` after a soft threshold of each layer's tensor SVD.

    A layer ``[out, ...]`` is folded to ``[the rest, out, K]``, a vector ``[n]`` to ``[1, n, K]``
    (FedCEO, Algorithm 2, lines 12 to 14). tau: >= 0; theta^(t/I) / (2 lambda) in the paper.
    """
    found = []
    for layer in layers:
        size = math.prod(layer.shape)
        part = models[:, layer.begin : layer.begin + size]
        rows = layer.shape[0] if len(layer.shape) > 1 else size
        folded = part.unflatten(1, (rows, size // rows)).permute(2, 1, 0)
        low_rank = soft_threshold(folded, tau).tensors
        assert isinstance(low_rank, Tensor)
        found.append(low_rank.permute(2, 1, 0).flatten(1))
    return torch.cat(found, 1)
