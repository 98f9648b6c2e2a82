"""Symmetric matrices with known difficulties, and what the tests of ``roots`` compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from python_tests.tolerance import assert_as_accurate

DTYPES = [torch.float32, torch.float64]
OPERATIONS = ("eigh", "inverse_root")


def second_moment(
    n: int, samples: int, dtype: torch.dtype, batch: int | None = None, seed: int = 0
) -> Tensor:
    """Return E[x x^T] of ``samples`` normal vectors: ``[(batch,) n, n]``, of that rank at most."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, n) if batch is None else (batch, samples, n)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return (x.mT @ x / max(samples, 1)).to(dtype)


def orthogonal(n: int, seed: int = 0) -> Tensor:
    """Return a random orthogonal matrix, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q


def with_spectrum(values: Tensor, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a symmetric matrix with these eigenvalues."""
    q = orthogonal(len(values), seed)
    matrix = (q * values.double()) @ q.T
    return ((matrix + matrix.T) / 2).to(dtype)


def exactly_rotated(values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return Q, orthogonal, and Q diag(values) Q^T, float64, neither with any rounding error.

    values: ``[n]``, whole numbers below 2^16.

    Q is a product of six reflections I - v v^T / 8, each v with 16 elements of -1 or 1 (of four
    reflections I - v v^T / 2 with 4 such elements where n < 16): all elements of Q are multiples of
    2^-18, so the product's need 16 + 36 bits. Below n = 4, Q is a permutation.
    """
    n = len(values)
    generator = torch.Generator().manual_seed(seed)
    q = torch.eye(n, dtype=torch.float64)[torch.randperm(n, generator=generator)]
    count, size = (6, 16) if n >= 16 else (4, 4)
    for _ in range(count if n >= size else 0):
        v = torch.zeros(n, dtype=torch.float64)
        signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        v[torch.randperm(n, generator=generator)[:size]] = signs
        q -= torch.outer(v, v @ q) * (2 / size)
    assert torch.equal(q @ q.T, torch.eye(n, dtype=torch.float64))
    return q, (q * values.double()) @ q.T


def difficult(n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return matrices ``[n, n]`` that solvers have had trouble with."""
    steps = torch.arange(n, dtype=torch.float64)
    index = torch.arange(n)
    glued = torch.diag((index % 21 - 10).abs().double())
    glued += torch.diag(torch.ones(max(n - 1, 0)).double(), 1)[:n, :n]
    glued += torch.diag(torch.ones(max(n - 1, 0)).double(), -1)[:n, :n]
    return {
        "zero": torch.zeros(n, n, dtype=dtype),
        "identity": torch.eye(n, dtype=dtype),
        "ones": torch.ones(n, n, dtype=dtype),
        "diagonal": torch.diag(steps.flip(0)).to(dtype),
        "rank one": second_moment(n, 1, dtype),
        "rank deficient": second_moment(n, max(1, n // 3), dtype),
        "repeated": with_spectrum(torch.where(index % 2 == 0, 1.0, 3.0), dtype),
        "clustered": with_spectrum(1 + 1e-6 * steps, dtype),
        "graded": with_spectrum(10.0 ** (-steps / 2), dtype),
        "indefinite": with_spectrum(steps - n / 2, dtype),
        "glued Wilkinson": glued.to(dtype),
    }


def check_eigh(
    values: Sequence[Tensor], vectors: Sequence[Tensor], matrices: Sequence[Tensor]
) -> None:
    """Assert that values, residuals and orthogonality are as good as ``torch.linalg.eigh``'s.

    Errors are relative to the norm of each matrix, and the largest over all matrices count: on a
    single one plain PyTorch may be exact by luck and ask for as much. In float64 the values of any
    matrix have no truth but LAPACK's own: here residuals and orthogonality are judged, and matrices
    that are ``exactly_rotated`` have values that are known.
    """
    ours: list[list[Tensor]] = [[], [], []]
    plain: list[list[Tensor]] = [[], [], []]
    for value, vector, matrix in zip(values, vectors, matrices, strict=True):
        assert value.dtype == vector.dtype == matrix.dtype
        assert (value.diff() >= 0).all(), "eigenvalues must ascend"
        for found, pair in ((ours, (value, vector)), (plain, torch.linalg.eigh(matrix))):
            for errors, error in zip(found, eigh_errors(matrix, *pair), strict=True):
                errors.append(error.flatten().to(matrix.dtype))
    first = 1 if matrix.dtype == torch.float64 else 0
    for our_errors, plain_errors in zip(ours[first:], plain[first:], strict=True):
        # One more element, of size 1, sets the scale: errors are relative already.
        a, b = (torch.cat((*errors, torch.ones(1))) for errors in (our_errors, plain_errors))
        exact = torch.zeros_like(a, dtype=torch.float64)
        exact[-1] = 1
        assert_as_accurate(a.to(matrix.dtype), b.to(matrix.dtype), exact)


def eigh_errors(matrix: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, in float64: errors of the values, A V - V L, and V^T V - I; relative to |A|_2."""
    a, v = matrix.double(), vectors.double()
    exact = torch.linalg.eigvalsh(a)
    norm = exact.abs().max() if len(a) else a.new_ones(())
    norm = norm if norm > 0 else torch.ones_like(norm)
    residual = (a @ v - v * values.double()) / norm
    identity = torch.eye(len(a), dtype=torch.float64)
    return (values.double() - exact) / norm, residual, v.T @ v - identity


def power_of(matrix: Tensor, power: float, damping: float) -> Tensor:
    """``V (max(L, 0) + damping)^power V^T`` by ``torch.linalg.eigh`` in the matrix's dtype."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0) + damping).pow(power)) @ vectors.mT
