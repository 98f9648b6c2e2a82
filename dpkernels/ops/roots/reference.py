"""Eigendecompositions and inverse roots in plain PyTorch, on any device.

Matrices of one size are decomposed together. Each is first symmetrised and scaled by a power of
two, so that its largest element is below 1: no size of element overflows or loses digits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# How far a matrix may be from symmetric, relative to its largest element (see roots.h).
ASYMMETRY = 2.0**-10


def symmetrised(op: str, index: int, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(A + A^T) / 2``, scaled, and the scales, float64 ``[b, 1]``, of ``[b, n, n]``.

    Raises ValueError, with the matrix's name, for NaN, Inf or a matrix that is not symmetric.
    """
    flat = batch.flatten(1)
    n = batch.shape[1]
    finite = flat.isfinite().all(1)
    if not bool(finite.all()):
        number = int(finite.logical_not().nonzero()[0])
        raise ValueError(f"{op}: {_name(index, number, n)} has NaN or Inf")
    # In float64: the scale of subnormal elements has no place in float32.
    largest = flat.abs().amax(1).double()
    # 2^1022 is the largest power of two whose inverse is not subnormal.
    exponent = torch.frexp(largest).exponent.clamp(min=-1022)
    scale = torch.ldexp(torch.ones_like(largest), -exponent)[:, None]
    scaled = batch.double() * scale[:, :, None]
    asymmetry = (scaled - scaled.mT).flatten(1).abs().amax(1)
    wrong = asymmetry > ASYMMETRY * scaled.flatten(1).abs().amax(1)
    if bool(wrong.any()):
        number = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: {_name(index, number, n)} is not symmetric: |a_ij - a_ji| is up to "
            f"{asymmetry[number] / scale[number, 0]:.3g}, its largest element is "
            f"{largest[number]:.3g}; pass (A + A^T) / 2 if that is what you mean"
        )
    return ((scaled + scaled.mT) / 2).to(batch.dtype), scale


def _name(index: int, number: int, n: int) -> str:
    return f"matrix {index} of the list (number {number} of its batch, {n} x {n})"


def _by_size(
    op: str, matrices: list[Tensor], run: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Call ``run`` once for each size with all matrices of it and their scales; split again."""
    sizes: dict[int, list[int]] = {}
    for index, batch in enumerate(matrices):
        sizes.setdefault(batch.shape[1], []).append(index)
    results: dict[int, tuple[Tensor, ...]] = {}
    for n, indices in sizes.items():
        if n == 0:
            one = torch.ones((), dtype=torch.float64, device=matrices[0].device)
            prepared = [(matrices[i], one.expand(len(matrices[i]), 1)) for i in indices]
        else:
            prepared = [symmetrised(op, i, matrices[i]) for i in indices]
        batches, scales = zip(*prepared, strict=True)
        together = run(torch.cat(batches), torch.cat(scales))
        counts = [len(matrices[i]) for i in indices]
        parts = zip(*(result.split(counts) for result in together), strict=True)
        results.update(zip(indices, parts, strict=True))
    return [results[index] for index in range(len(matrices))]


def eigh(matrices: list[Tensor], method: str) -> tuple[list[Tensor], list[Tensor]]:
    """Eigenvalues, ascending, ``[b, n]`` and eigenvectors, columns of ``[b, n, n]``, of each batch.

    ``method`` is for the compiled implementation; here it is always ``torch.linalg.eigh``.
    """
    return _eigh("eigh", matrices)


def _eigh(op: str, matrices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    def run(batch: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        values, vectors = torch.linalg.eigh(batch)
        return (values / scale).to(values.dtype), vectors

    pairs = _by_size(op, matrices, run)
    # A result of an operator must not be a view of another one's memory.
    return [p[0].clone() for p in pairs], [p[1].mT.contiguous().clone().mT for p in pairs]


def inverse_root(
    matrices: list[Tensor], power: float, damping: list[float], method: str
) -> list[Tensor]:
    """``V (max(L, 0) + damping)^power V^T`` of each batch, exactly symmetric.

    Every ``method`` is this one here.
    """
    return power_of_pairs(*_eigh("inverse_root", matrices), power, damping)


def power_of_pairs(
    values: list[Tensor], vectors: list[Tensor], power: float, damping: list[float]
) -> list[Tensor]:
    """``V (max(L, 0) + damping)^power V^T`` of eigenpairs ``[b, n]`` and ``[b, n, n]``.

    Raises ValueError, with the matrix's name, where that is singular.
    """
    roots = []
    for index, (value, vector) in enumerate(zip(values, vectors, strict=True)):
        n = vector.shape[1]
        positive = value.clamp(min=0)
        if power < 0 and damping[index] == 0 and n > 0:
            cutoff = positive[:, -1:] * n * torch.finfo(value.dtype).eps
            singular = (positive <= cutoff).any(1)
            if bool(singular.any()):
                number = int(singular.nonzero()[0])
                raise ValueError(
                    f"inverse_root: {_name(index, number, n)} is singular to working precision "
                    "and damping is 0; pass damping > 0"
                )
        factors = (positive.double() + damping[index]).pow(power).to(value.dtype)
        root = (vector * factors[:, None, :]) @ vector.mT
        roots.append((root + root.mT) / 2)
    return roots
