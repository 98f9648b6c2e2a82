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


def sum_error(dtype: torch.dtype, positions: int) -> float:
    """Return what part of one sample's terms a sum over samples in ``dtype`` may round off.

    There is a term for each position; the part is of the sum of their lengths. It bounds what the
    product of csrc/ghost/linear_sum.cpp rounds (the header counts), and that of triton_linear.py:
    chains of 32, one after the other, in parts that are added up. Only the sample's own terms are
    meant: how the others' partial sums round changes with it, too (the header says how far).
    """
    return rounding_error(dtype, min(positions, 64) + 2 * -(-positions // 32) + 8)


def sum_limit(positions: int) -> float:
    """Return the part of a norm that ``sum_error`` may come to.

    Beyond, a sample's terms cancel so far that its share of the sum is computed in float64 and
    rounded once: see the header. Four times what uncorrelated positions come to.
    """
    return max(1e-3, 4 * sum_error(torch.float32, positions) * math.sqrt(positions))


def with_sum_error(
    squares: Tensor, error: Tensor, limit: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return squared norms with what their sum in ``dtype`` rounds, and which samples stay apart.

    squares, error: ``[B]``, squared norms and what ``sum_error`` comes to. Samples for which that
    is more than ``limit`` of the norm are marked and not raised: their share of the sum must be
    computed in float64. There are none if the sum is in float64 anyway.
    """
    if dtype == torch.float64:
        return raised(squares, error), torch.zeros_like(squares, dtype=torch.bool)
    apart = error > limit * squares.sqrt()
    return torch.where(apart, squares, raised(squares, error)), apart


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
