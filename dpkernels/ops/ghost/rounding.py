"""How far a norm that was computed in floating point may be off, so that none is reported low.

What is returned is the computed norm plus a bound of its error; a norm that the bound would raise
by more than ``norm_limit`` is computed again in float64. As in ``csrc/ghost/rounding.h``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rounding_error(dtype: torch.dtype, roundings: int) -> float:
    """Return by what part of its terms' magnitudes a sum of products in ``dtype`` errs at most.

    roundings: of each term. Higham, Accuracy and Stability, (3.4), for any order of additions; by
    Cauchy and Schwarz also the part of ``|x| |y|`` for a dot product.
    """
    n = roundings * torch.finfo(dtype).eps / 2
    return n / (1 - n)


def dot_error(dtype: torch.dtype, length: int, chain: int) -> float:
    """Return the same for a dot product in chains of ``dtype`` that are added up in float64.

    64 roundings more cover what is done with it in float64: sums over tiles, as trees.
    """
    additions = length // chain + 65
    return rounding_error(dtype, min(length, chain)) + rounding_error(torch.float64, additions)


def underflow(dtype: torch.dtype) -> float:
    """Return what a product and its addition lose at most if what is not normal is flushed."""
    return 2 * torch.finfo(dtype).tiny


def sum_error(dtype: torch.dtype, terms: int) -> float:
    """Return what a gradient's sum in ``dtype`` rounds of its terms, so many, as in the header.

    Each addition half a unit of what it has reached; having no common sign, as the root of their
    number all together. Of float64 it is within the bounds of norms.
    """
    return 0.0 if dtype == torch.float64 else 2.0**-24 * math.sqrt(terms)


def norm_limit(dtype: torch.dtype, positions: int) -> float:
    """Return the part by which a norm over so many positions may come out high.

    The bound of uncorrelated ones grows with their root: csrc/ghost/rounding.h has figures.
    """
    return 1e-8 if dtype == torch.float64 else max(5e-5, 1e-5 * math.sqrt(positions))


def square_within(squares: Tensor, error: Tensor, limit: float) -> Tensor:
    """Return whether squares that are off by ``error``, and raised by it, are within the limit.

    ``(norm^2 + 2 error)^(1/2) <= norm (1 + error / norm^2)``. False for NaN.
    """
    return error <= limit * (squares - error)


def norm_within(norms: Tensor, error: Tensor, limit: float) -> Tensor:
    """Return the same for norms that are off by ``error``."""
    return 2 * error <= limit * (norms - error)


def raised(squares: Tensor, error: Tensor) -> Tensor:
    """Return the squares of norms whose squares were computed, larger by ``error``."""
    return (squares.sqrt() + error).square()
