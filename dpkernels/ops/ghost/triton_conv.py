"""Per-sample norms and gradients of a convolution on GPUs, in Triton.

Patches are implicit: a program computes the address of every element that it needs from the
geometry, so nothing of the size of a patch matrix exists. One program holds a tile of one sample's
gradient (or, for ``gram``, of the products of its positions) and walks along the positions (the
channels). Each step is a float32 product of 16 terms, added up in float64; samples whose terms
cancel too far are computed again with float64 products, decided on the GPU, without a word to the
host.

No GPU was at hand: nothing here was timed. Tiles and warps are the largest that do not spill
(static report, ``make gpu-check``): with steps of 32 tiles of 32 x 32 do on sm_80, 90 and 100.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.ghost.layer import sum_dtype

_TILE = 32
_STEP = 16
# Of gradients with float64 products: those of float64 inputs with a scale spill in tiles of 32 x 32
# on sm_90 (12 bytes) and sm_100 (8), even with eight warps.
_WIDE_TILE = 16
_WARPS = 4
# Two sums of 32 x 32 spill on sm_80 in four warps.
_GRAM_WARPS = 8


@triton.jit
def _pixel(geometry, axis, tap, position):
    """Where along an axis a tap meets the input at a position, and whether that is inside."""
    place = geometry + 6 * axis
    at = position * tl.load(place + 3) + tap * tl.load(place + 5) - tl.load(place + 4)
    return at, (at >= 0) & (at < tl.load(place))


@triton.jit
def _patches(x, geometry, column, columns, position, positions):
    """Elements ``column`` of the patches at ``position``, of one group; zero in the padding.

    geometry: int64, for each of three axes: input, output, kernel, stride, padding, dilation.
    """
    ky, kx = tl.load(geometry + 8), tl.load(geometry + 14)
    oy, ox = tl.load(geometry + 7), tl.load(geometry + 13)
    taps = tl.load(geometry + 2) * ky * kx
    tap = column % taps
    z, inside_z = _pixel(geometry, 0, tap // (ky * kx), position // (oy * ox))
    y, inside_y = _pixel(geometry, 1, tap // kx % ky, position // ox % oy)
    w, inside_w = _pixel(geometry, 2, tap % kx, position % ox)
    inside = inside_z & inside_y & inside_w & (column < columns) & (position < positions)
    channel = (column // taps) * tl.load(geometry) + z
    offset = (channel * tl.load(geometry + 6) + y) * tl.load(geometry + 12) + w
    return tl.load(x + offset, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["groups", "rows", "columns", "positions", "pixels"])
def conv_gradient_kernel(
    x,
    d,
    geometry,
    scale,
    wanted,
    partial_norms,
    grads,
    groups: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    positions: tl.int64,
    pixels: tl.int64,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of the gradient of one group of one sample: its squares, and itself if KEEP.

    rows, columns, pixels: output channels, patch elements and input elements of one group.
    wanted: int8 ``[B]``; samples that are not wanted are left alone. Products are float64 if WIDE.
    """
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    program = tl.program_id(0).to(tl.int64)
    tiles = groups * row_tiles * column_tiles
    sample = program // tiles
    if tl.load(wanted + sample) == 0:
        return
    group = sample * groups + program % tiles // (row_tiles * column_tiles)
    row = program // column_tiles % row_tiles * TILE + tl.arange(0, TILE)
    column = program % column_tiles * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], tl.float64)
    for start in range(0, positions, STEP):
        position = start + tl.arange(0, STEP).to(tl.int64)
        at = d + (group * rows + row[:, None]) * positions + position[None, :]
        inside = (row < rows)[:, None] & (position < positions)[None, :]
        errors = tl.load(at, mask=inside, other=0.0).to(dtype)
        met = _patches(
            x + group * pixels, geometry, column[None, :], columns, position[:, None], positions
        ).to(dtype)
        total += tl.dot(errors, met, input_precision="ieee", out_dtype=dtype).to(tl.float64)
    if KEEP:
        at = grads + (group * rows + row[:, None]) * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(at, total.to(grads.dtype.element_ty), mask=inside)
    if SCALED:
        total *= tl.load(scale + column, mask=column < columns, other=0.0)[None, :]
    tl.store(partial_norms + program, tl.sum(tl.sum(total * total, 1), 0))


@triton.jit(do_not_specialize=["groups", "rows", "columns", "positions", "pixels"])
def conv_gram_kernel(
    x,
    d,
    geometry,
    partial_norms,
    groups: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    positions: tl.int64,
    pixels: tl.int64,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of (patch_s . patch_t)(d_s . d_t), s <= t, of one group of one sample, added up."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    blocks = tl.cdiv(positions, TILE)
    program = tl.program_id(0).to(tl.int64)
    group = program // (blocks * blocks)
    first, second = program // blocks % blocks, program % blocks
    if second < first:
        tl.store(partial_norms + program, tl.zeros((), tl.float64))
        return
    s = first * TILE + tl.arange(0, TILE)
    t = second * TILE + tl.arange(0, TILE)
    met = tl.zeros([TILE, TILE], tl.float64)
    x += group * pixels
    for start in range(0, columns, STEP):
        column = start + tl.arange(0, STEP).to(tl.int64)
        a = _patches(x, geometry, column[None, :], columns, s[:, None], positions).to(dtype)
        b = _patches(x, geometry, column[:, None], columns, t[None, :], positions).to(dtype)
        met += tl.dot(a, b, input_precision="ieee", out_dtype=dtype).to(tl.float64)
    errors = tl.zeros([TILE, TILE], tl.float64)
    for start in range(0, rows, STEP):
        row = start + tl.arange(0, STEP).to(tl.int64)
        at = d + (group * rows + row) * positions
        left = (row < rows)[None, :] & (s < positions)[:, None]
        a = tl.load(at[None, :] + s[:, None], mask=left, other=0.0).to(dtype)
        right = (row < rows)[:, None] & (t < positions)[None, :]
        b = tl.load(at[:, None] + t[None, :], mask=right, other=0.0).to(dtype)
        errors += tl.dot(a, b, input_precision="ieee", out_dtype=dtype).to(tl.float64)
    # A tile beside the diagonal stands for two.
    weight = tl.where(first == second, 1.0, 2.0)
    tl.store(partial_norms + program, tl.sum(tl.sum(met * errors, 1), 0) * weight)


@functools.cache
def _geometry(axes: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    absent = (1, 1, 1, 1, 0, 1)
    rows = [absent] * (3 - len(axes)) + list(axes)
    return torch.tensor(rows, dtype=torch.int64, device=device).flatten()


def _gradients(
    x: Tensor,
    d: Tensor,
    geometry: Tensor,
    scale: Tensor | None,
    wanted: Tensor,
    grads: Tensor,
    sizes: tuple[int, int, int, int, int],
    wide: bool,
    keep: bool,
) -> Tensor:
    """Return squared norms of the wanted samples' weight gradients; write those if ``keep``."""
    groups, rows, columns, _, _ = sizes
    tile = _WIDE_TILE if wide else _TILE
    tiles = groups * triton.cdiv(rows, tile) * triton.cdiv(columns, tile)
    partial = torch.zeros(x.shape[0], tiles, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        conv_gradient_kernel[(partial.numel(),)](
            x,
            d,
            geometry,
            partial if scale is None else scale,
            wanted,
            partial,
            grads if keep else partial,
            *sizes,
            WIDE=wide,
            SCALED=scale is not None,
            KEEP=keep,
            TILE=tile,
            STEP=_STEP,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return partial.sum(1)


def _gram(
    x: Tensor, d: Tensor, geometry: Tensor, sizes: tuple[int, int, int, int, int], wide: bool
) -> Tensor:
    groups, _, _, positions, _ = sizes
    tiles = groups * triton.cdiv(positions, _TILE) ** 2
    partial = torch.empty(x.shape[0], tiles, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        conv_gram_kernel[(partial.numel(),)](
            x,
            d,
            geometry,
            partial,
            *sizes,
            WIDE=wide,
            TILE=_TILE,
            STEP=_STEP,
            num_warps=_GRAM_WARPS,
            **COMPILE_OPTIONS,
        )
    return partial.sum(1)


def conv_norms(
    activations: Tensor,
    errors: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
    scale: Tensor | None,
    formula: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference_conv.conv_norms``; every formula is computed as such."""
    x, d = activations.contiguous(), errors.contiguous()
    batch, out_channels = d.shape[:2]
    columns = x.shape[1] // groups * math.prod(kernel_size)
    dtype, wide = sum_dtype(x.dtype), x.dtype == torch.float64
    grads = x.new_empty((batch, out_channels if keep else 0, columns), dtype=dtype)
    bias_grads = d.flatten(2).sum(2, dtype=torch.float64)
    bound = math.prod(kernel_size) * _squares(x) * _squares(d)
    sq_norms = bound
    if batch > 0:
        axes = zip(x.shape[2:], d.shape[2:], kernel_size, stride, padding, dilation, strict=True)
        geometry = _geometry(tuple(axes), x.device)
        positions, pixels = math.prod(d.shape[2:]), math.prod(x.shape[2:])
        sizes = (groups, out_channels // groups, columns, positions, x[0].numel() // groups)
        every = torch.ones(batch, dtype=torch.int8, device=x.device)
        limit = max(positions, pixels)
        if formula == "gram":
            sq_norms, limit = _gram(x, d, geometry, sizes, wide), 4 * limit
        else:
            sq_norms = _gradients(x, d, geometry, scale, every, grads, sizes, wide, keep)
            limit *= out_channels * columns
        again = ~(sq_norms * limit >= bound) & bound.isfinite()
        # float64 gradients are as good as it gets. Whether any sample is concerned is asked only
        # where asking does not make the host wait.
        if (formula == "gram" or not wide) and (x.is_cuda or bool(again.any())):
            wanted = again.to(torch.int8)
            exact = _gradients(x, d, geometry, scale, wanted, grads, sizes, True, keep)
            sq_norms = torch.where(again, exact, sq_norms)
    if bias:
        scaled = bias_grads if scale is None else bias_grads * scale[-1]
        sq_norms = sq_norms + scaled.square().sum(1)
    sq_norms = torch.where(bound.isfinite(), sq_norms, float("nan"))
    kept_bias = bias_grads.to(dtype) if keep and bias else grads.new_empty((batch, 0))
    return sq_norms, grads, kept_bias


def _squares(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return norms.square()


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which ``conv_norms`` launches its kernels."""
    sizes = dict.fromkeys(("groups", "rows", "columns", "positions", "pixels"), "i64")
    dtypes = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
    cases = []
    for dtype, size in dtypes.items():
        inputs = {"x": f"*{dtype}", "d": f"*{dtype}", "geometry": "*i64", "partial_norms": "*fp64"}
        sums = "fp64" if dtype == "fp64" else "fp32"
        for wide in (False, True) if dtype != "fp64" else (True,):
            tile = _WIDE_TILE if wide else _TILE
            name = f"{dtype} {tile}x{tile}" + (" in fp64" if wide else "")
            for keep, scaled in ((0, 0), (1, 0), (0, 1), (1, 1)):
                cases.append(
                    AheadOfTimeCase(
                        kernel=conv_gradient_kernel,
                        configuration=name + " keep" * keep + " scaled" * scaled,
                        signature={
                            **inputs,
                            "scale": "*fp64",
                            "wanted": "*i8",
                            "grads": f"*{sums}" if keep else "*fp64",
                            **sizes,
                        },
                        constexprs={
                            "WIDE": wide,
                            "SCALED": scaled,
                            "KEEP": keep,
                            "TILE": tile,
                            "STEP": _STEP,
                        },
                        num_warps=_WARPS,
                        bytes_per_element=size,
                    )
                )
            if wide == (dtype == "fp64"):
                cases.append(
                    AheadOfTimeCase(
                        kernel=conv_gram_kernel,
                        configuration=f"{dtype} {_TILE}x{_TILE}",
                        signature={**inputs, **sizes},
                        constexprs={"WIDE": wide, "TILE": _TILE, "STEP": _STEP},
                        num_warps=_GRAM_WARPS,
                        bytes_per_element=size,
                    )
                )
    return cases
