"""Shrinking a tensor's singular values on GPUs: Gram matrices and products in Triton.

The transforms are PyTorch's (cuFFT, rocFFT), and so is the Hermitian eigensolver between the two
kernels. Slices are contiguous ``[S, m, n]``, m >= n, complex64, read as pairs of floats. Gram
matrices are float64, on the float64 matrix units that sm_80, sm_90, sm_100 and gfx942 have: only
tiles on and below the diagonal are computed, and no float64 copy of the slices is made. Addresses
are int64.

Gram: ``4 S m n^2`` flops, the slices read once for every 32 columns. Product: ``8 S m n^2`` flops,
the slices read once for every 32 columns and written once.

No GPU was at hand: nothing here was timed. Tiles follow from the static report (``make
gpu-check``): no spills on any target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.tsvd.reference import (
    curves_of,
    fourier_slices,
    shrink_by_svd,
    shrink_factors,
    to_clients,
)

# The bound of the Gram matrix, as a part of |M|_F: see the package.
_GRAM_BOUND = 2.0**-24

# Two float64 tiles of 32 x 32 are 32 registers a thread; with their operands it is 128 at most on
# any NVIDIA target.
_GRAM_COLUMNS, _GRAM_ROWS = 32, 16
_GRAM_WARPS = 4
# Real columns. On 8 warps a thread needs 128 registers on sm_80 and sm_90, on 4 warps all of 255.
_PRODUCT_ROWS, _PRODUCT_COLUMNS, _PRODUCT_DEPTH = 64, 64, 16
_PRODUCT_WARPS = 8


@triton.jit
def _load_complex(x, row, column, rows, columns):
    """Real and imaginary parts of elements ``[row, column]``; zero outside of the matrix."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = x + 2 * (row[:, None] * columns + column[None, :])
    return tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "columns"])
def _gram_kernel(
    x,
    gram,
    rows: tl.int64,
    columns: tl.int64,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Tile (i, j), i >= j, of ``gram[s] = x[s]^H x[s]`` in float64."""
    i, j, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i < j:
        return
    x += s * rows * columns * 2
    left = i.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    right = j.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    re = tl.zeros([BLOCK_C, BLOCK_C], tl.float64)
    im = tl.zeros([BLOCK_C, BLOCK_C], tl.float64)
    for start in range(0, rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R).to(tl.int64)
        a_re, a_im = _load_complex(x, row, left, rows, columns)
        b_re, b_im = _load_complex(x, row, right, rows, columns)
        a_re, a_im = tl.trans(a_re.to(tl.float64)), tl.trans(a_im.to(tl.float64))
        b_re, b_im = b_re.to(tl.float64), b_im.to(tl.float64)
        re = tl.dot(a_re, b_re, re, out_dtype=tl.float64)
        re = tl.dot(a_im, b_im, re, out_dtype=tl.float64)
        im = tl.dot(a_re, b_im, im, out_dtype=tl.float64)
        im = tl.dot(-a_im, b_re, im, out_dtype=tl.float64)
    inside = (left < columns)[:, None] & (right < columns)[None, :]
    at = gram + 2 * (s * columns * columns + left[:, None] * columns + right[None, :])
    tl.store(at, re, mask=inside)
    tl.store(at + 1, im, mask=inside)


@triton.jit(do_not_specialize=["rows", "columns"])
def _product_kernel(
    x,
    operator,
    out,
    rows: tl.int64,
    columns: tl.int64,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of ``out[s] = x[s] operator[s]``, all complex, as a product of real matrices.

    Pairs of floats make x ``[rows, 2 columns]``, and every element p of the operator the 2 x 2
    block ``[[Re p, Im p], [-Im p, Re p]]``, which is put together on its way into the tile.
    """
    s = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    width = 2 * columns
    x += s * rows * width
    operator += s * columns * width
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, width, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K).to(tl.int64)
        inside = (row < rows)[:, None] & (inner < width)[None, :]
        a = tl.load(x + row[:, None] * width + inner[None, :], mask=inside, other=0.0)
        part = (inner[:, None] ^ column[None, :]) & 1  # 1 for the imaginary part
        at = operator + (inner // 2)[:, None] * width + (column // 2 * 2)[None, :] + part
        inside = (inner < width)[:, None] & (column < width)[None, :]
        b = tl.load(at, mask=inside, other=0.0)
        minus = ((inner & 1) == 1)[:, None] & ((column & 1) == 0)[None, :]
        total = tl.dot(a, tl.where(minus, -b, b), total, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(out + s * rows * width + row[:, None] * width + column[None, :], total, mask=inside)


def _tall(slices: Tensor) -> Tensor:
    """Return the slices, transposed if that makes them taller than wide, contiguous."""
    return (slices if slices.shape[1] >= slices.shape[2] else slices.mT).contiguous()


def _gram(slices: Tensor) -> Tensor:
    """Return the lower triangles of ``M^H M``, complex128 ``[S, n, n]``, of complex64 slices."""
    count, rows, columns = slices.shape
    gram = slices.new_zeros((count, columns, columns), dtype=torch.complex128)
    tiles = triton.cdiv(columns, _GRAM_COLUMNS)
    with torch.cuda.device_of(slices):
        _gram_kernel[(tiles, tiles, count)](
            torch.view_as_real(slices),
            torch.view_as_real(gram),
            rows,
            columns,
            BLOCK_C=_GRAM_COLUMNS,
            BLOCK_R=_GRAM_ROWS,
            num_warps=_GRAM_WARPS,
            **COMPILE_OPTIONS,
        )
    return gram


def _product(slices: Tensor, operators: Tensor) -> Tensor:
    """Return ``slices @ operators``, complex64 ``[S, m, n]``, both contiguous."""
    count, rows, columns = slices.shape
    out = torch.empty_like(slices)
    grid = (triton.cdiv(rows, _PRODUCT_ROWS), triton.cdiv(2 * columns, _PRODUCT_COLUMNS), count)
    with torch.cuda.device_of(slices):
        _product_kernel[grid](
            torch.view_as_real(slices),
            torch.view_as_real(operators),
            torch.view_as_real(out),
            rows,
            columns,
            BLOCK_R=_PRODUCT_ROWS,
            BLOCK_C=_PRODUCT_COLUMNS,
            BLOCK_K=_PRODUCT_DEPTH,
            num_warps=_PRODUCT_WARPS,
            **COMPILE_OPTIONS,
        )
    return out


def _shrink(slices: Tensor, curves: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slices with their singular values shrunk by ``curves``, and how many were kept."""
    gram = _gram(slices)
    eigenvalues, vectors = torch.linalg.eigh(gram)
    s = eigenvalues.clamp(min=0).sqrt()
    factors = shrink_factors(s, curves)
    operators = (vectors * factors.unsqueeze(1)) @ vectors.mH
    out = _product(slices, operators.to(torch.complex64).contiguous())
    cuts = curves[:, 0]
    kept = (s > cuts.unsqueeze(1)).sum(1)
    norms = gram.diagonal(dim1=1, dim2=2).real.sum(1).sqrt()
    inaccurate = ((cuts < _GRAM_BOUND * norms) | (cuts == 0)).nonzero().flatten()
    if inaccurate.numel() > 0:
        by_svd = shrink_by_svd(slices[inaccurate], curves[inaccurate])
        out[inaccurate], kept[inaccurate] = by_svd
    return out, kept


def soft_threshold(
    tensors: list[Tensor], thresholds: list[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Every tensor with its slices' singular values shrunk, and how many of them were kept."""
    curves = []
    for tensor, threshold in zip(tensors, thresholds, strict=True):
        curves += [threshold, threshold, 0.0, 0.0] * (tensor.shape[2] // 2 + 1)
    return _shrink_all("soft_threshold", tensors, curves)


def shrink(tensors: list[Tensor], curves: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """Every tensor with its slices' singular values shrunk, and how many are above the cut."""
    return _shrink_all("shrink", tensors, curves)


def _shrink_all(
    op: str, tensors: list[Tensor], curves: list[float]
) -> tuple[list[Tensor], list[Tensor]]:
    out, kept = [], []
    for index, (tensor, of_tensor) in enumerate(
        zip(tensors, curves_of(tensors, curves), strict=True)
    ):
        slices = fourier_slices(op, index, tensor)
        shrunk, count = _shrink(_tall(slices), of_tensor)
        wide = slices.shape[1] < slices.shape[2]
        out.append(to_clients(shrunk.mT if wide else shrunk, tensor))
        kept.append(count)
    return out, kept


def singular_values(tensors: list[Tensor]) -> list[Tensor]:
    """Singular values ``[K // 2 + 1, min(d, h)]`` of every tensor's slices, largest first."""
    values = []
    for index, tensor in enumerate(tensors):
        slices = fourier_slices("singular_values", index, tensor)
        eigenvalues = torch.linalg.eigvalsh(_gram(_tall(slices)))
        values.append(eigenvalues.clamp(min=0).sqrt().flip(1).to(tensor.dtype))
    return values


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the kernels are launched."""
    sizes = {"rows": "i64", "columns": "i64"}
    return [
        AheadOfTimeCase(
            kernel=_gram_kernel,
            configuration=f"{_GRAM_COLUMNS} columns {_GRAM_ROWS} rows",
            signature={"x": "*fp32", "gram": "*fp64", **sizes},
            constexprs={"BLOCK_C": _GRAM_COLUMNS, "BLOCK_R": _GRAM_ROWS},
            num_warps=_GRAM_WARPS,
            bytes_per_element=8,
            aligned=("x", "gram"),
        ),
        AheadOfTimeCase(
            kernel=_product_kernel,
            configuration=f"{_PRODUCT_ROWS} x {_PRODUCT_COLUMNS} x {_PRODUCT_DEPTH}",
            signature={"x": "*fp32", "operator": "*fp32", "out": "*fp32", **sizes},
            constexprs={
                "BLOCK_R": _PRODUCT_ROWS,
                "BLOCK_C": _PRODUCT_COLUMNS,
                "BLOCK_K": _PRODUCT_DEPTH,
            },
            num_warps=_PRODUCT_WARPS,
            bytes_per_element=16,
            aligned=("x", "operator", "out"),
        ),
    ]
