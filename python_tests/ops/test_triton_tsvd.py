"""The Triton kernels of ``tsvd`` at the edges of their tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.ops.tsvd import triton_impl
from python_tests.tolerance import assert_as_accurate

COLUMNS, ROWS = triton_impl._GRAM_COLUMNS, triton_impl._GRAM_ROWS
SIZES = [(1, 1), (ROWS + 1, COLUMNS), (2 * ROWS, COLUMNS + 1), (65, 33)]


def slices(rows: int, columns: int) -> Tensor:
    """Return three complex64 matrices."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(3, rows, columns, generator=generator, dtype=torch.complex64)


def real(x: Tensor) -> Tensor:
    """Return complex numbers as pairs."""
    return torch.view_as_real(x.contiguous())


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gram_matrices_are_float64(rows: int, columns: int) -> None:
    # Integers, so that float64 sums are exact; float32 could not hold them.
    x = torch.view_as_complex(real(slices(rows, columns)).mul(2000).round())
    wide = x.to(torch.complex128)
    exact = wide.mH @ wide
    if rows > 1:
        assert not torch.equal(exact.to(torch.complex64).to(torch.complex128), exact)
    # Above the diagonal whole tiles are left out, and parts of tiles are computed.
    assert torch.equal(triton_impl._gram(x).tril(), exact.tril())


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_products_of_complex_matrices(rows: int, columns: int) -> None:
    x, operators = slices(rows, columns), slices(columns, columns)
    exact = x.to(torch.complex128) @ operators.to(torch.complex128)
    found = triton_impl._product(x, operators)
    assert_as_accurate(real(found), real(x @ operators), real(exact))


def test_slices_that_need_an_svd_are_found_one_by_one() -> None:
    # The same threshold is large for the second slice and below the bound for the others.
    x = slices(9, 4)
    x[1] *= 1e-9
    threshold = 1e-8
    norms = torch.linalg.matrix_norm(x)
    assert (threshold < triton_impl._GRAM_BOUND * norms).tolist() == [True, False, True]
    curves = torch.tensor([[threshold, threshold, 0, 0]], dtype=torch.float64).expand(3, 4)
    found, kept = triton_impl._shrink(x, curves)
    assert kept.tolist()[::2] == [4, 4] and 0 <= kept[1] < 4
    u, s, vh = torch.linalg.svd(x.to(torch.complex128), full_matrices=False)
    exact = (u * (s - threshold).clamp(min=0).unsqueeze(1)) @ vh
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    plain = (u * (s - threshold).clamp(min=0).unsqueeze(1)) @ vh
    for i in range(3):
        assert_as_accurate(real(found[i]), real(plain[i]), real(exact[i]))
