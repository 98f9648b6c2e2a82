"""Updates of an inverse and passes over a window, in Triton.

All of this is bound by memory. Sums are deterministic: every program writes partial sums, which are
added up in a fixed order. Dot products over windows are float64.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import AheadOfTimeCase
from dpkernels.ops.sherman_morrison.triton_kernels import (
    both_products_kernel,
    combine_kernel,
    gram_kernel,
    project_kernel,
    subtract_outer_kernel,
)
from dpkernels.ops.sherman_morrison.triton_launch import (
    BLOCK,
    launch_arguments,
    programs_that_fill,
    split,
    variants,
    vector_of,
)

# Rows and columns of the tiles of a matrix, a window that is projected and one that is multiplied.
_MATRIX_TILE = (8, 256)
_PROJECT_TILE = (4, 256)
_GRAM_COLUMNS = 32
# Rows of a window that one program multiplies with each other, and the warps that hold the float64
# products. tl.dot takes 16 rows at least; 64 on 4 warps spill (static report), on 8 they do not.
_GRAM_WARPS = {16: 4, 64: 8}


def rank_one_inverse_update_(
    inverse: Tensor, u: Tensor, v: Tensor | None, tolerance: float
) -> Tensor:
    """``H <- H - (H u)(H^T v)^T / (1 + v^T H u)``; returns float64 (denominator, magnitude).

    One kernel reads H for both products, one reads and writes it; between them are vectors of n.
    """
    n = inverse.shape[0]
    u, right = u.contiguous(), (u if v is None else v).contiguous()
    rows, columns = _MATRIX_TILE
    programs = triton.cdiv(n, rows)
    p = u.new_empty(n)
    partials = u.new_empty((programs if v is not None else 0, n))
    vector = vector_of(inverse)
    if n:
        with torch.cuda.device_of(inverse):
            both_products_kernel[(programs,)](
                inverse,
                u,
                right,
                p,
                partials,
                n // vector,
                **launch_arguments(VECTOR=vector, BOTH=v is not None, ROWS=rows, COLUMNS=columns),
            )
    q = p if v is None else partials.sum(0)
    terms = p.double() * right.double()
    denominator, magnitude = 1 + terms.sum(), 1 + terms.abs().sum()
    if v is None:
        q = p / denominator.abs().sqrt().to(p.dtype)
        p = q * denominator.sign().to(p.dtype)
    else:
        p = p / denominator.to(p.dtype)
    regular = (denominator.abs() > tolerance * magnitude) & magnitude.isfinite()
    if n:
        with torch.cuda.device_of(inverse):
            subtract_outer_kernel[(programs * triton.cdiv(n, columns),)](
                inverse,
                p,
                q,
                regular.to(torch.int32),
                n // vector,
                **launch_arguments(VECTOR=vector, ROWS=rows, COLUMNS=columns),
            )
    return torch.stack((denominator, magnitude))


def _with_columns_adjacent(window: Tensor) -> Tensor:
    return window if window.shape[1] <= 1 or window.stride(1) == 1 else window.contiguous()


def window_gram(u: Tensor, v: Tensor | None, g: Tensor) -> Tensor:
    """``[V U^T, V g]``: float64 ``[k, k + 1]``; V = U if None."""
    k, d = u.shape
    rows = next((rows for rows in _GRAM_WARPS if k <= rows), None)
    if rows is None:
        return _gram_by_matmul(u, v, g)
    u, g = _with_columns_adjacent(u), g.contiguous()
    left = u if v is None else _with_columns_adjacent(v)
    programs, each = split(d, _GRAM_COLUMNS, programs_that_fill(u.device))
    partials = u.new_empty((programs, k, k + 1), dtype=torch.float64)
    vector = vector_of(u, left, g)
    if programs:
        with torch.cuda.device_of(u):
            gram_kernel[(programs,)](
                u,
                left,
                g,
                partials,
                k,
                d // vector,
                u.stride(0) // vector,
                left.stride(0) // vector,
                each,
                **launch_arguments(
                    _GRAM_WARPS[rows],
                    VECTOR=vector,
                    SYMMETRIC=v is None,
                    ROWS=rows,
                    COLUMNS=_GRAM_COLUMNS,
                ),
            )
    return partials.sum(0)


# Columns that are widened at a time where the library's own product is used: 128 rows take 64 MB.
_MATMUL_COLUMNS = 1 << 16


def _gram_by_matmul(u: Tensor, v: Tensor | None, g: Tensor) -> Tensor:
    """The same for windows too tall for one program: enough work for the library's own product."""
    k, d = u.shape
    total = u.new_zeros((k, k + 1), dtype=torch.float64)
    for start in range(0, d, _MATMUL_COLUMNS):
        part = slice(start, start + _MATMUL_COLUMNS)
        right = torch.cat((u[:, part], g[part].unsqueeze(0))).double()
        left = right[:k] if v is None else v[:, part].double()
        total.addmm_(left, right.T)
    return total


def window_project(window: Tensor, g: Tensor) -> Tensor:
    """``W g``: float64 ``[k]``."""
    window, g = _with_columns_adjacent(window), g.contiguous()
    k, d = window.shape
    rows, columns = _PROJECT_TILE
    row_blocks = triton.cdiv(k, rows)
    slices, each = split(d, columns, triton.cdiv(programs_that_fill(window.device), row_blocks))
    partials = window.new_empty((slices, k), dtype=torch.float64)
    vector = vector_of(window, g)
    if slices:
        with torch.cuda.device_of(window):
            project_kernel[(slices * row_blocks,)](
                window,
                g,
                partials,
                k,
                d // vector,
                window.stride(0) // vector,
                slices,
                each,
                **launch_arguments(VECTOR=vector, ROWS=rows, COLUMNS=columns),
            )
    return partials.sum(0)


def window_combine_(out: Tensor, window: Tensor, g: Tensor, weights: Tensor, scale: float) -> None:
    """``out = scale * (g - W^T weights)``, summed in float64."""
    window, g = _with_columns_adjacent(window), g.contiguous()
    k, d = window.shape
    vector = vector_of(out, window, g)
    if d:
        with torch.cuda.device_of(out):
            combine_kernel[(triton.cdiv(d, BLOCK),)](
                out,
                window,
                g,
                weights.contiguous(),
                k,
                d // vector,
                window.stride(0) // vector,
                scale,
                **launch_arguments(VECTOR=vector, COLUMNS=BLOCK),
            )


_SIZES = dict.fromkeys(("k", "column_vectors", "row_vectors"), "i64")


def window_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    return [case for dtype, size in (("*fp32", 4), ("*fp64", 8)) for case in _cases(dtype, size)]


def _cases(dtype: str, size: int) -> list[AheadOfTimeCase]:
    name, vector = dtype[1:], 16 // size
    matrix = {**dict.fromkeys(("matrix", "u", "v", "products", "partials"), dtype)}
    project = {"window": dtype, "grads": dtype, "partials": "*fp64", **_SIZES}
    project |= {"slices": "i32", "blocks_per_slice": "i32"}
    combine = {"out": dtype, "window": dtype, "grads": dtype, "weights": "*fp64", **_SIZES}
    gram = {"u": dtype, "v": dtype, "grads": dtype, "partials": "*fp64", "k": "i64"}
    gram |= dict.fromkeys(("column_vectors", "u_vectors", "v_vectors"), "i64")
    tile = dict(zip(("ROWS", "COLUMNS"), _MATRIX_TILE, strict=True))
    cases = variants(
        project_kernel,
        name,
        project,
        dict(zip(("ROWS", "COLUMNS"), _PROJECT_TILE, strict=True)),
        vector,
        size,
        ("window", "grads"),
    )
    cases += variants(
        combine_kernel,
        name,
        {**combine, "scale": "fp64"},
        {"COLUMNS": BLOCK},
        vector,
        size,
        ("out", "window", "grads"),
    )
    for both in (False, True):
        cases += variants(
            both_products_kernel,
            f"{name}{' both sides' if both else ''}",
            {**matrix, "row_vectors": "i64"},
            {"BOTH": both, **tile},
            vector,
            size,
            ("matrix",),
        )
    subtract = {**dict.fromkeys(("matrix", "p", "q"), dtype), "regular": "*i32"}
    cases += variants(
        subtract_outer_kernel,
        name,
        {**subtract, "row_vectors": "i64"},
        tile,
        vector,
        2 * size,
        ("matrix",),
    )
    for rows, warps in _GRAM_WARPS.items():
        for symmetric in (False, True):
            cases += variants(
                gram_kernel,
                f"{name} {rows} rows{' symmetric' if symmetric else ''}",
                {**gram, "blocks_per_program": "i32"},
                {"SYMMETRIC": symmetric, "ROWS": rows, "COLUMNS": _GRAM_COLUMNS},
                vector,
                size if symmetric else 2 * size,
                ("u", "v", "grads"),
                warps,
            )
    return cases
