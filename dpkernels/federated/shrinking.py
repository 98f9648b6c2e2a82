"""Shrink a vector that has Gaussian noise of a known variance towards 0, by layers or as a whole.

Nothing is tuned and no record is looked at: what goes in is released already, and the variance of
its noise is public. All of it is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated.folding import fold, unfold
from dpkernels.federated.problem import Layer

Shrink = Literal["none", "scalar", "layer", "spectral"]
SHRINKS: tuple[Shrink, ...] = get_args(Shrink)


def james_stein(values: Tensor, variance: float) -> float:
    """Return ``max(0, 1 - (n - 2) variance / |values|^2)``, the positive-part James-Stein factor.

    values: n numbers with noise of that variance in each.
    """
    square = float(values.double().square().sum())
    excess = max(0, values.numel() - 2) * variance
    return max(0.0, 1 - excess / square) if square > 0 else 0.0


def optimal_singular_values(values: Tensor, shape: tuple[int, int], variance: float) -> Tensor:
    """Return what Gavish and Donoho's shrinker for Frobenius loss makes of singular values s.

    ``sqrt((s^2 - (d + h) v)^2 - 4 d h v^2) / s`` above the edge ``sqrt(v) (sqrt d + sqrt h)`` of
    the noise of variance v, and 0 below ("Optimal Shrinkage of Singular Values", 2017).

    values: float64. shape: d, h of the matrix.
    """
    d, h = shape
    above = values.square() - (d + h) * variance
    edge = 2 * math.sqrt(d * h) * variance
    root = ((above - edge) * (above + edge)).clamp(min=0).sqrt()
    return torch.where(above > edge, root / values, 0.0)


def spectral(matrix: Tensor, variance: float) -> Tensor:
    """Return ``matrix``, ``[d, h]``, with ``optimal_singular_values``; James-Stein for a vector.

    By the eigenpairs of its Gram matrix, in float64: 2 d h n + 9 n^3 flops, n = min(d, h).
    """
    d, h = matrix.shape
    if min(d, h) == 1:
        return matrix * james_stein(matrix, variance)
    wide = matrix.double()
    tall = wide if d >= h else wide.mT
    squares, vectors = torch.linalg.eigh(tall.mT @ tall)
    values = squares.clamp(min=0).sqrt()
    shrunk = optimal_singular_values(values, (d, h), variance)
    factors = torch.where(shrunk > 0, shrunk / values, 0.0)
    found = (tall @ vectors * factors) @ vectors.mT
    shaped: Tensor = found if d >= h else found.mT
    return shaped.to(matrix.dtype)


def groups(kind: Shrink, layers: Sequence[Layer], size: int) -> list[slice]:
    """Return which elements of a vector have a factor in common: all, or those of a layer."""
    if kind == "scalar":
        return [slice(0, size)]
    return [slice(x.begin, x.begin + math.prod(x.shape)) for x in layers]


def shrunken(kind: Shrink, layers: Sequence[Layer], values: Tensor, variance: float) -> Tensor:
    """Return ``values``, ``[*shape]``, shrunk as ``kind`` says.

    kind: ``scalar``: one James-Stein factor. ``layer``: one for every layer. ``spectral``: the
        singular values of every layer's matrix.
    variance: of the noise in each element; 0 changes nothing.
    """
    if kind == "none" or variance == 0:
        return values
    flat = values.flatten()
    if kind == "spectral":
        folded = [spectral(part[:, :, 0], variance)[..., None] for part in fold(layers, flat[None])]
        return unfold(layers, folded, flat[None]).view_as(values)
    found = flat.clone()
    for part in groups(kind, layers, len(flat)):
        found[part] *= james_stein(flat[part], variance)
    return found.view_as(values)
