"""Folding: the uploads of a round as one tensor ``[d, h, K]`` for each layer, and back (FedCEO).

A weight ``[out, in]`` becomes ``[in, out, K]``, a convolution's ``[out, in, kh, kw]`` becomes ``[in
kh kw, out, K]``, and a vector ``[1, n, K]``. What comes out goes to ``dpkernels.ops.tsvd``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dpkernels.federated.problem import Layer
from dpkernels.ops.tsvd import soft_threshold


def folded_layers(layers: Sequence[Layer], last: int | None = None) -> tuple[Layer, ...]:
    """Return the layers that ``fold`` folds with this ``last``, in order.

    last: None for all; else the last so many weights (two dimensions or more), and the vectors
        from the first of those on, which are their biases.
    """
    if last is None:
        return tuple(layers)
    weights = [i for i, layer in enumerate(layers) if len(layer.shape) > 1]
    if not 0 <= last <= len(weights):
        raise ValueError(
            f"fold: last must be in 0 ... {len(weights)}, the number of weights, got {last}"
        )
    return tuple(layers[weights[-last] :]) if last > 0 else ()


def fold(layers: Sequence[Layer], uploads: Tensor, last: int | None = None) -> list[Tensor]:
    """Return ``[d, h, K]`` of every layer, as views of the uploads: nothing is copied.

    layers: where each parameter is in a row of ``uploads``; ``[out, ...]`` with the outputs first.
    uploads: ``[K, D]``.
    last: fold the last so many weights only, with their biases; None for all layers.
    """
    if uploads.dim() != 2:
        raise ValueError(f"fold: uploads must be [K, D], got {list(uploads.shape)}")
    return [_folded(layer, uploads) for layer in folded_layers(layers, last)]


def unfold(
    layers: Sequence[Layer], tensors: Sequence[Tensor], uploads: Tensor, last: int | None = None
) -> Tensor:
    """Return ``[K, D]`` with the folded layers from ``tensors``, and the others from ``uploads``.

    layers, uploads, last: as for ``fold``, of which this is the inverse. The uploads are not
    written; the result is new memory.
    """
    chosen = folded_layers(layers, last)
    if len(tensors) != len(chosen):
        raise ValueError(f"unfold: {len(tensors)} tensors for {len(chosen)} folded layers")
    out = uploads.clone()
    for layer, tensor in zip(chosen, tensors, strict=True):
        place = _folded(layer, out)
        if tensor.shape != place.shape:
            raise ValueError(
                f"unfold: layer {layer.name} folds to {list(place.shape)}, got {list(tensor.shape)}"
            )
        place.copy_(tensor)
    return out


def thresholded(layers: Sequence[Layer], models: Tensor, tau: float) -> Tensor:
    """Return the models ``[K, D]`` after a soft threshold of each of ``layers``' tensor SVD.

    FedCEO, Algorithm 2, lines 12 to 14. tau: >= 0; theta^(t/I) / (2 lambda) in the paper. What is
    in none of ``layers`` is averaged over the models.
    """
    found = soft_threshold(fold(layers, models), tau).tensors
    assert isinstance(found, list)
    # Where all is folded, the means are written over.
    return unfold(layers, found, models.mean(0).expand_as(models))


def _folded(layer: Layer, uploads: Tensor) -> Tensor:
    size = math.prod(layer.shape)
    if layer.begin + size > uploads.shape[1]:
        raise ValueError(
            f"fold: layer {layer.name} ends at {layer.begin + size}, beyond uploads "
            f"{list(uploads.shape)}"
        )
    rows = uploads[:, layer.begin : layer.begin + size]
    if len(layer.shape) < 2:
        return rows.T.unsqueeze(0)
    out = layer.shape[0]
    weights: Tensor = rows.unflatten(1, (out, math.prod(layer.shape[1:])))
    return weights.permute(2, 1, 0)
