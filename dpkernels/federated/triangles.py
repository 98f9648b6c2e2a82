"""Symmetric matrices as vectors of the same norm: the upper triangle, sqrt(2) off the diagonal."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def packed_size(size: int) -> int:
    """Return how many elements a packed ``[size, size]`` matrix has."""
    return size * (size + 1) // 2


def packed(matrices: Tensor) -> Tensor:
    """Return symmetric ``[k, d, d]`` as ``[k, d (d + 1) / 2]`` of the same norm."""
    size = matrices.shape[-1]
    rows, columns = torch.triu_indices(size, size)
    return matrices[:, rows, columns] * _weights(rows == columns, math.sqrt(2), matrices)


def unpacked(vector: Tensor, size: int) -> Tensor:
    """Return the symmetric ``[size, size]`` matrix that ``packed`` made ``vector`` of."""
    rows, columns = torch.triu_indices(size, size)
    values = vector * _weights(rows == columns, math.sqrt(0.5), vector)
    matrix = vector.new_zeros(size, size)
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix


def _weights(diagonal: Tensor, elsewhere: float, like: Tensor) -> Tensor:
    """Return 1 on the diagonal and ``elsewhere`` off it, in the dtype of ``like``."""
    weights: Tensor = like.new_full(diagonal.shape, elsewhere).masked_fill_(diagonal, 1.0)
    return weights
