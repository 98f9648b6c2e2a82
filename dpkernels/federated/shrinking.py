"""Shrink a vector that has Gaussian noise of a known variance towards 0, by layers or as a whole.

Nothing is tuned and no record is looked at: what goes in is released already, and the variance of
its noise is public. All of it is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from dpkernels.federated.folding import fold, unfold
from dpkernels.federated.problem import Layer
from dpkernels.ops.tsvd import Optimal, shrink_matrices

Shrink = Literal["none", "energy", "scalar", "layer", "spectral"]
SHRINKS: tuple[Shrink, ...] = get_args(Shrink)


def james_stein(values: Tensor, variance: float) -> float:
    """Return ``max(0, 1 - (n - 2) variance / |values|^2)``, the positive-part James-Stein factor.

    values: n numbers with noise of that variance in each.
    """
    square = float(values.double().square().sum())
    excess = max(0, values.numel() - 2) * variance
    return max(0.0, 1 - excess / square) if square > 0 else 0.0


def spectral(matrix: Tensor, variance: float) -> Tensor:
    """Return ``matrix``, ``[d, h]``, shrunk after Gavish and Donoho; James-Stein for a vector.

    By ``tsvd.shrink_matrices``, which is compiled for float32.
    """
    if min(matrix.shape) == 1:
        return matrix * james_stein(matrix, variance)
    found = shrink_matrices(matrix, Optimal(math.sqrt(variance)))
    assert isinstance(found, Tensor)
    return found


def groups(kind: Shrink, layers: Sequence[Layer], size: int) -> list[slice]:
    """Return which elements of a vector have a factor in common: all, or those of a layer."""
    if kind in ("energy", "scalar"):
        return [slice(0, size)]
    return [slice(x.begin, x.begin + math.prod(x.shape)) for x in layers]


def shrunken(kind: Shrink, layers: Sequence[Layer], values: Tensor, variance: float) -> Tensor:
    """Return ``values``, ``[*shape]``, shrunk as ``kind`` says.

    kind: ``scalar``: one James-Stein factor q, which has the least mean square error. ``energy``:
        its root, after which the whole is as long as the signal in it is expected to be. A
        classifier minds directions more than lengths, and q takes too much of both. ``layer``: a
        factor q for every layer. ``spectral``: the singular values of every layer's matrix.
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
        factor = james_stein(flat[part], variance)
        found[part] *= math.sqrt(factor) if kind == "energy" else factor
    return found.view_as(values)
