"""The tolerances of the tests: as accurate as plain PyTorch, equal but for rounding, never low."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpkernels.ops.ghost.rounding import rounding_error, sum_error, sum_limit


def assert_as_accurate(actual: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Assert that ``actual`` errs at most twice as much as ``plain``, plus one ulp of the scale.

    actual: what is tested.
    plain: the same computation in plain PyTorch, in the same dtype.
    exact: the true result, float64; ``actual`` must be finite where this is.

    Errors are the largest over all elements; the scale is the largest magnitude in ``exact``.
    """
    assert actual.dtype == plain.dtype, f"dtype {actual.dtype}, wanted {plain.dtype}"
    assert actual.shape == exact.shape, f"shape {list(actual.shape)}, wanted {list(exact.shape)}"
    assert plain.shape == exact.shape and exact.dtype == torch.float64
    if exact.numel() == 0:
        return
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"non-finite elements: {actual}, wanted {exact}"
    assert torch.equal(plain.isfinite(), finite), "plain PyTorch overflows here: nothing to compare"
    if not finite.any():
        return
    exact = exact[finite]
    error = (actual[finite].double() - exact).abs().max().item()
    plain_error = (plain[finite].double() - exact).abs().max().item()
    ulp = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= 2 * plain_error + ulp, (
        f"error {error:.3g} exceeds twice that of plain PyTorch, {plain_error:.3g}, plus one ulp "
        f"of the scale, {ulp:.3g}"
    )


def assert_within_rounding(actual: Tensor, other: Tensor, terms: int, magnitude: Tensor) -> None:
    """Assert that two sums of the same terms, each in any order, differ by no more than rounding.

    terms: how many roundings an element goes through at most, in either sum.
    magnitude: sum of the terms' absolute values, which broadcasts against the sums.

    A sum errs by at most terms * eps / 2 * magnitude (Higham, Accuracy and Stability, (3.5), to
    first order), two of them differ by at most twice that; another factor of 2 covers the rest.
    """
    assert actual.dtype == other.dtype and actual.shape == other.shape
    allowed = 2 * terms * torch.finfo(actual.dtype).eps * magnitude.double()
    difference = (actual.double() - other.double()).abs()
    assert (difference <= allowed).all(), (
        f"differ by {difference.max().item():.3g}, rounding explains {allowed.max().item():.3g}"
    )


def assert_never_low(
    sq_norms: Tensor,
    exact: Tensor,
    positions: int,
    terms: Tensor,
    dtype: torch.dtype,
    roundings: int | None = None,
) -> None:
    """Assert the contract of ghost norms: never low by more than 1e-7, nor high beyond a limit.

    ``norm (1 - 1e-7) <= sqrt(sq_norms) <= norm (1 + limit) + of_sum``.

    sq_norms: what is tested, float64 ``[B]``; exact: the true squares, finite.
    positions: that a sample's gradient adds up. The limit is ``max(5e-5, 1e-5 sqrt(positions))``,
        or 1e-8 for inputs of ``dtype`` float64.
    terms: ``[B]``, sums of the terms' lengths. What float64 rounds of them, ``(200 + 2 positions)``
        times 2^-53, comes on top, and so does what sums in float32 may round, the bound of
        ``sum_error``: as far as that is within ``sum_limit`` of the norm, and not beyond.
    roundings: of a term in the sum, where that is not the product of linear layers.
    """
    assert sq_norms.dtype == exact.dtype == torch.float64 and sq_norms.shape == exact.shape
    norms, truth = sq_norms.sqrt(), exact.sqrt()
    part, most = sum_error(torch.float32, positions), sum_limit(positions)
    if roundings is not None:
        part = rounding_error(torch.float32, roundings)
        most = max(1e-3, 4 * part * math.sqrt(positions))
    limit = 1e-8 if dtype == torch.float64 else max(5e-5, 1e-5 * math.sqrt(positions))
    of_sum = torch.zeros_like(terms)
    if dtype != torch.float64:
        of_sum = torch.minimum(part * terms, most * norms)
    rest = (200 + 2 * positions) * 2.0**-53 * terms + of_sum
    low, high = truth * (1 - 1e-7) - norms, norms - truth * (1 + limit) - rest
    assert (low <= 0).all(), f"low by {(1 - norms / truth).max().item():.3g}"
    assert (high <= 0).all(), f"high by {(norms / truth - 1).max().item():.3g}, limit {limit:.3g}"
