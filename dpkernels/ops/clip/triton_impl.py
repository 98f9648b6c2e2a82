"""Clipping of materialised per-sample gradients on GPUs, in Triton.

All of this is bound by memory. Rows of up to 16384 float32 are read from DRAM once: a program
keeps a tile of whole rows in registers while it takes their norms, their factors and its share of
the sum. Longer rows are read twice, the second time from the last row to the first,
because the L2 cache still holds the rows that the norms read last. Taking the rows in groups that
fit in L2 would save the rest of the second read, but a group of 25 MB (half the L2 of an H100)
comes out of DRAM in 8 microseconds and needs four more launches, which cost at least that.

Squared norms are float64: a conversion and a fused multiply-add for each element. That is hidden
behind the loads where float64 runs at half or a quarter of the float32 rate (data-centre GPUs)
and close to the memory bound at 1/64 of it (consumer GPUs).

Sums are deterministic: every program writes a partial sum, and a second kernel adds those up in a
fixed order. Addresses are int64. Row strides are free; columns must be neighbours, so tensors with
another column stride are copied first.

No GPU was at hand: nothing here was timed. Tile sizes follow from bytes in flight and from the
static report (``make gpu-check``): no spills on any target.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.clip.reference import sum_dtype, valid
from dpkernels.ops.clip.triton_kernels import (
    add_rows_kernel,
    clip_and_sum_kernel,
    factors_kernel,
    sq_norms_kernel,
    weighted_sum_kernel,
)

# A tile is 32 float32 (16 float64) elements a thread. With the running sum that is half of the 128
# registers a thread may have when 16 warps share an SM, and the 16 warps then have 64 KB in flight;
# an H100 needs about 20 KB a SM (3.3 TB/s x 800 ns / 132) to keep its memory busy.
_TILE_BYTES = 16 * 1024
_TILE_WARPS = 4
# Every row of a tile costs a thread an address and a float64 factor: 32 rows spill on sm_90 and
# gfx942 (static report), 8 do not.
_MAX_TILE_ROWS = 8
_WARPS_PER_SM = 16
# Columns of a tile that holds whole rows. The widest is one float32 row on 16 warps: more threads
# would leave too few registers for tile and sum. Every width costs a compilation, so the short
# ones, which are bound by launches rather than by memory, are further apart. float64 has no 4096:
# it spills on sm_90 (static report).
_WIDTHS = {
    torch.float32: (128, 512, 2048, 4096, 8192, 16384),
    torch.float64: (128, 512, 2048, 8192),
}
# Columns of a tile that goes along the rows: 4 KB of neighbouring float32.
_LONG_WIDTHS = (128, 1024)
# Tiles for adding up partial sums. Many partials mean short rows: few columns to share out, so the
# loop over the partials is kept short. Few partials mean long rows.
_MANY_PARTIALS = (64, 64)
_FEW_PARTIALS = (8, 512)
_FACTOR_BLOCK = 256
# Without a GPU (interpreter): small, so that tests see rows and columns split.
_INTERPRETED_SMS = 2


class _Tile(NamedTuple):
    """Rows and columns that a program holds at a time, and the warps that share them."""

    rows: int
    columns: int
    warps: int

    def arguments(self) -> dict[str, Any]:
        """Return the launch arguments of a kernel that works on such tiles."""
        blocks = {"BLOCK_B": self.rows, "BLOCK_D": self.columns}
        return {**blocks, "num_warps": self.warps, **COMPILE_OPTIONS}


def _tiles(widths: tuple[int, ...], dtype: torch.dtype) -> list[_Tile]:
    """Return the tiles of these widths for sums in ``dtype``, as far as 16 warps can hold them."""
    elements = _TILE_BYTES // dtype.itemsize
    tiles = []
    for width in widths:
        rows = min(max(1, elements // width), _MAX_TILE_ROWS)
        tiles.append(_Tile(rows, width, _TILE_WARPS * max(1, width // elements)))
    return [tile for tile in tiles if tile.warps <= _WARPS_PER_SM]


def _tile_of_whole_rows(columns: int, dtype: torch.dtype) -> _Tile | None:
    """Return the narrowest tile that holds rows of ``columns``, or None if none does."""
    return next((tile for tile in _tiles(_WIDTHS[dtype], dtype) if columns <= tile.columns), None)


def _tile_along_rows(columns: int, dtype: torch.dtype) -> _Tile:
    """Return the tile for rows that are gone through in blocks of columns."""
    tiles = _tiles(_LONG_WIDTHS, dtype)
    return next((tile for tile in tiles if columns <= tile.columns), tiles[-1])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(grads: Tensor, tile: _Tile) -> int:
    """Return how many programs fill the GPU that ``grads`` is on."""
    return _multiprocessors(grads.device) * _WARPS_PER_SM // tile.warps


def _with_columns_adjacent(grads: list[Tensor]) -> list[Tensor]:
    return [g if g.shape[1] <= 1 or g.stride(1) == 1 else g.contiguous() for g in grads]


def _vector(g: Tensor) -> int:
    """Return how many elements of ``g`` a thread can load at once: 16 bytes of them, or one.

    Sizes and strides reach the kernels in this unit, which tells the compiler that addresses and
    ends of rows are multiples of 16 bytes.
    """
    vector = 16 // g.element_size()
    wide = g.shape[1] % vector == 0 and g.stride(0) % vector == 0 and g.data_ptr() % 16 == 0
    return vector if wide else 1


def _add_rows_(out: Tensor, partials: Tensor, accumulate: bool) -> None:
    """``out[d] (+)= sum_p partials[p, d]``; no partials at all are a sum of zero."""
    if out.numel() == 0:
        return
    rows, columns = _FEW_PARTIALS if partials.shape[0] <= _FEW_PARTIALS[0] else _MANY_PARTIALS
    with torch.cuda.device_of(out):
        add_rows_kernel[(triton.cdiv(out.numel(), columns),)](
            out,
            partials,
            partials.shape[0],
            out.numel(),
            ACCUMULATE=accumulate,
            BLOCK_P=rows,
            BLOCK_D=columns,
            num_warps=_TILE_WARPS,
            **COMPILE_OPTIONS,
        )


def _partial_sq_norms(g: Tensor) -> Tensor:
    """Return ``[S, B]``, sums of squares over S ranges of columns; S = 0 for empty rows."""
    batch, columns = g.shape
    tile = _tile_along_rows(columns, torch.float64)
    row_tiles = triton.cdiv(batch, tile.rows)
    if row_tiles == 0 or columns == 0:
        return g.new_empty((0, batch), dtype=torch.float64)
    wanted = triton.cdiv(_programs(g, tile), row_tiles)
    blocks = triton.cdiv(columns, tile.columns)
    blocks_per_split = triton.cdiv(blocks, wanted)
    splits = triton.cdiv(blocks, blocks_per_split)
    partials = g.new_empty((splits, batch), dtype=torch.float64)
    vector = _vector(g)
    with torch.cuda.device_of(g):
        sq_norms_kernel[(row_tiles * splits,)](
            g,
            partials,
            batch,
            columns // vector,
            g.stride(0) // vector,
            splits,
            blocks_per_split,
            VECTOR=vector,
            **tile.arguments(),
        )
    return partials


def row_sq_norms(grads: list[Tensor], per_tensor: bool) -> Tensor:
    """Squared norms of the rows in float64: ``[L, B]`` per tensor, or ``[B]`` over all tensors."""
    partials = [_partial_sq_norms(g) for g in _with_columns_adjacent(grads)]
    if not per_tensor:
        partials = [torch.cat(partials)]
    sq_norms = grads[0].new_empty((len(partials), grads[0].shape[0]), dtype=torch.float64)
    for row, parts in zip(sq_norms, partials, strict=True):
        _add_rows_(row, parts, accumulate=False)
    return sq_norms if per_tensor else sq_norms[0]


def _factor_arguments(
    max_norm: float, normalise: bool, gamma: float, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Return ``max_norm, gamma, cap`` as the kernels take them."""
    return (max_norm, gamma, torch.finfo(dtype).max) if normalise else (max_norm, 0.0, 1.0)


def clip_factors(
    sq_norms: Tensor, max_norms: list[float], normalise: bool, gamma: float, dtype: torch.dtype
) -> Tensor:
    """Clip factors ``[L, B]`` from squared norms ``[L, B]``, rounded towards zero."""
    factors = torch.empty(sq_norms.shape, dtype=dtype, device=sq_norms.device)
    batch = sq_norms.shape[1]
    if batch == 0:
        return factors
    for source, target, bound in zip(sq_norms.contiguous(), factors, max_norms, strict=True):
        with torch.cuda.device_of(sq_norms):
            factors_kernel[(triton.cdiv(batch, _FACTOR_BLOCK),)](
                source,
                target,
                batch,
                *_factor_arguments(bound, normalise, gamma, dtype),
                BLOCK=_FACTOR_BLOCK,
                num_warps=_TILE_WARPS,
                **COMPILE_OPTIONS,
            )
    if len(max_norms) > 1:
        factors.masked_fill_(~valid(sq_norms).all(0), 0.0)
    return factors


def weighted_row_sum_(
    out: list[Tensor], grads: list[Tensor], factors: Tensor, accumulate: bool
) -> None:
    """``out[l] (+)= sum_b factors[l, b] * grads[l][b]``; a factor of 0 ignores its row, NaN too."""
    factors = factors.contiguous().expand(len(grads), -1)
    for target, g, weights in zip(out, _with_columns_adjacent(grads), factors, strict=True):
        _add_rows_(target, _partial_weighted_sums(g, weights), accumulate)


def _partial_weighted_sums(g: Tensor, weights: Tensor) -> Tensor:
    """Return ``[S, D]``, weighted sums over S ranges of rows; S = 0 for no rows."""
    batch, columns = g.shape
    tile = _tile_along_rows(columns, weights.dtype)
    column_blocks = triton.cdiv(columns, tile.columns)
    if batch == 0 or column_blocks == 0:
        return weights.new_empty((0, columns))
    wanted = triton.cdiv(_programs(g, tile), column_blocks)
    row_tiles = triton.cdiv(batch, tile.rows)
    rows_per_split = triton.cdiv(row_tiles, wanted) * tile.rows
    splits = triton.cdiv(batch, rows_per_split)
    partials = weights.new_empty((splits, columns))
    vector = _vector(g)
    with torch.cuda.device_of(g):
        weighted_sum_kernel[(column_blocks * splits,)](
            g,
            weights,
            partials,
            batch,
            columns // vector,
            g.stride(0) // vector,
            splits,
            rows_per_split,
            VECTOR=vector,
            **tile.arguments(),
        )
    return partials


def clip_and_sum_(
    out: list[Tensor],
    grads: list[Tensor],
    max_norms: list[float],
    normalise: bool,
    gamma: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """Clip every row and add the rows up into ``out``; return ``(sq_norms, factors)``, ``[L, B]``.

    One bound in ``max_norms`` clips the norm over all tensors, one bound for each tensor clips
    them one by one.
    """
    grads = _with_columns_adjacent(grads)
    tile = _tile_of_whole_rows(grads[0].shape[1], out[0].dtype)
    # Of several tensors all norms must be known before any row is added: a NaN in one of them drops
    # the sample from all.
    if len(grads) == 1 and tile is not None:
        sq_norms, factors = _clip_and_sum_fused_(
            out[0], grads[0], tile, max_norms[0], normalise, gamma, accumulate
        )
        return sq_norms.unsqueeze(0), factors.unsqueeze(0)
    sq_norms = row_sq_norms(grads, len(max_norms) > 1).reshape(len(max_norms), -1)
    factors = clip_factors(sq_norms, max_norms, normalise, gamma, sum_dtype(grads[0].dtype))
    weighted_row_sum_(out, grads, factors, accumulate)
    return sq_norms, factors


def _clip_and_sum_fused_(
    out: Tensor,
    g: Tensor,
    tile: _Tile,
    max_norm: float,
    normalise: bool,
    gamma: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """Do one tensor whose rows fit in ``tile``; return its squared norms and factors, ``[B]``."""
    batch, columns = g.shape
    dtype = out.dtype
    tiles = triton.cdiv(batch, tile.rows)
    tiles_per_program = max(1, triton.cdiv(tiles, _programs(g, tile)))
    programs = triton.cdiv(tiles, tiles_per_program)
    sq_norms, factors = g.new_empty(batch, dtype=torch.float64), g.new_empty(batch, dtype=dtype)
    partials = g.new_empty((programs, columns), dtype=dtype)
    vector = _vector(g)
    if programs:
        with torch.cuda.device_of(g):
            clip_and_sum_kernel[(programs,)](
                g,
                partials,
                sq_norms,
                factors,
                batch,
                columns // vector,
                g.stride(0) // vector,
                tiles_per_program,
                *_factor_arguments(max_norm, normalise, gamma, dtype),
                VECTOR=vector,
                **tile.arguments(),
            )
    _add_rows_(out, partials, accumulate)
    return sq_norms, factors


_TRITON_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_BOUNDS = dict.fromkeys(("max_norm", "gamma", "cap"), "fp64")
_SHAPE = dict.fromkeys(("rows", "column_vectors", "row_vectors"), "i64")


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    cases = [case for dtype in _TRITON_NAMES for case in _tiled_cases(dtype)]
    for name, size in (("fp32", 4), ("fp64", 8)):
        cases.append(
            AheadOfTimeCase(
                kernel=factors_kernel,
                configuration=name,
                signature={"sq_norms": "*fp64", "factors": f"*{name}", "n": "i64", **_BOUNDS},
                constexprs={"BLOCK": _FACTOR_BLOCK},
                num_warps=_TILE_WARPS,
                bytes_per_element=8 + size,
            )
        )
        pointers = {"out": f"*{name}", "partials": f"*{name}"}
        cases += [
            AheadOfTimeCase(
                kernel=add_rows_kernel,
                configuration=f"{name} {rows}x{columns}{' accumulate' if accumulate else ''}",
                signature={**pointers, "rows": "i64", "columns": "i64"},
                constexprs={"ACCUMULATE": accumulate, "BLOCK_P": rows, "BLOCK_D": columns},
                num_warps=_TILE_WARPS,
                bytes_per_element=size,
            )
            for rows, columns in (_MANY_PARTIALS, _FEW_PARTIALS)
            for accumulate in (False, True)
        ]
    return cases


def _tiled_cases(dtype: torch.dtype) -> list[AheadOfTimeCase]:
    """Return the cases of the kernels that read gradients of ``dtype``."""
    grads, total = f"*{_TRITON_NAMES[dtype]}", f"*{_TRITON_NAMES[sum_dtype(dtype)]}"
    fused = {"grads": grads, "partial_sums": total, "sq_norms": "*fp64", "factors": total}
    fused |= {**_SHAPE, "tiles_per_program": "i32", **_BOUNDS}
    norms = {"grads": grads, "partial_norms": "*fp64", **_SHAPE}
    norms |= {"splits": "i32", "blocks_per_split": "i64"}
    sums = {"grads": grads, "factors": total, "partial_sums": total, **_SHAPE}
    sums |= {"splits": "i32", "rows_per_split": "i64"}
    cases = []
    for kernel, signature, tiles in (
        (clip_and_sum_kernel, fused, _tiles(_WIDTHS[sum_dtype(dtype)], sum_dtype(dtype))),
        (sq_norms_kernel, norms, _tiles(_LONG_WIDTHS, torch.float64)),
        (weighted_sum_kernel, sums, _tiles(_LONG_WIDTHS, sum_dtype(dtype))),
    ):
        for tile in tiles:
            for vector, aligned in ((16 // dtype.itemsize, True), (1, True), (1, False)):
                arguments = {"VECTOR": vector, "BLOCK_B": tile.rows, "BLOCK_D": tile.columns}
                cases.append(
                    AheadOfTimeCase(
                        kernel=kernel,
                        configuration=f"{grads[1:]} {tile.rows}x{tile.columns} vector {vector}"
                        + ("" if aligned else " unaligned"),
                        signature=signature,
                        constexprs=arguments,
                        num_warps=tile.warps,
                        bytes_per_element=dtype.itemsize,
                        aligned=("grads",) if aligned else (),
                    )
                )
    return cases
