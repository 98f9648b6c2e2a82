"""Make Fisher information of a noisy sum: positive semidefinite, with the known noise taken out.

The noise in every element is public, so all of this is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.federated.fisher_vectors import FisherLayout, Part
from dpkernels.federated.shrinking import james_stein
from dpkernels.federated.triangles import packed, unpacked


def shrunken_spectrum(matrix: Tensor, std: float) -> Tensor:
    """Return a positive semidefinite estimate of M from M + noise, ``[n, n]`` float64.

    std: of the noise in each element of the packed triangle: std on the diagonal, std / sqrt(2)
        off it. Alone its eigenvalues fill [-e, e], e = std sqrt(2 n) (Wigner's semicircle).

    An eigenvalue l > e becomes sqrt(l^2 - e^2), which has the least Frobenius loss for few
    eigenvalues above the noise: a spike x shows at l = x + e^2 / (4 x), along a vector whose
    squared cosine with its own is 1 - e^2 / (4 x^2) (Benaych-Georges and Nadakuditi, 2011).
    Others tell nothing of their directions and share evenly what is left of the trace, whose
    noise is std sqrt(n), less than one eigenvalue's. std 0 sets negative ones to 0, nothing else.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    edge = std * math.sqrt(2 * len(values))
    found = (values.clamp(min=0.0).square() - edge**2).clamp(min=0.0).sqrt()
    if edge > 0:
        lost = found == 0
        left = float(matrix.double().trace() - found.sum())
        if left > 0 and lost.any():
            found = torch.where(lost, left / int(lost.sum()), found)
    estimate: Tensor = (vectors * found) @ vectors.mT
    return estimate


def shrunken_diagonal(values: Tensor, std: float) -> Tensor:
    """Return an estimate >= 0 of values ``[n]``: shrunk to their mean, after James and Stein."""
    mean = values.double().mean()
    spread = values.double() - mean
    return (mean + james_stein(spread, std**2) * spread).clamp(min=0.0)


def denoised(
    layout: FisherLayout, seen: Tensor, clips: Sequence[float], std: float, records: float
) -> Tensor:
    """Return the Fisher vector ``[size]``, float64, of a noisy ``record_factors`` sum.

    seen: ``[size]``, the sum over |D|, with noise of ``std`` in each element. records: how many
        there were over |D|, as the noisy count has it; > 0.
    """

    def of(part: Part, clip: float) -> Tensor:
        values = seen[part.slice].double()
        if part.side == "diagonal":
            found = shrunken_diagonal(values, std)
        else:
            found = packed(shrunken_spectrum(unpacked(values, part.n), std)[None])[0]
        return found * (clip / records)

    pieces = [of(part, clip) for part, clip in zip(layout.parts, clips, strict=True)]
    return torch.cat(pieces) if pieces else seen.new_zeros(0).double()
