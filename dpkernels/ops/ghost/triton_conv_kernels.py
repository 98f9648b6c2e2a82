"""The Triton kernels of convolution; ``triton_conv.py`` launches them."""

from __future__ import annotations

import triton
import triton.language as tl


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
    patch_lengths,
    error_lengths,
    partials,
    groups: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    positions: tl.int64,
    pixels: tl.int64,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of (patch_s . patch_t)(d_s . d_t), s <= t, of one group of one sample, added up.

    Then, for s < t, how far that may be off in units of the relative error of a dot product:
    |patch_s . patch_t| |d_s| |d_t| + |patch_s| |patch_t| |d_s . d_t|. Terms with s = t are squares
    of the lengths, float64 ``[B, groups, positions]``. Both stand for both orders of s and t.
    """
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    blocks = tl.cdiv(positions, TILE)
    program = tl.program_id(0).to(tl.int64)
    group = program // (blocks * blocks)
    first, second = program // blocks % blocks, program % blocks
    if second < first:
        tl.store(partials + 2 * program, tl.zeros((), tl.float64))
        tl.store(partials + 2 * program + 1, tl.zeros((), tl.float64))
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
    at_s, at_t = group * positions + s, group * positions + t
    p_s = tl.load(patch_lengths + at_s, mask=s < positions, other=0.0)[:, None]
    p_t = tl.load(patch_lengths + at_t, mask=t < positions, other=0.0)[None, :]
    d_s = tl.load(error_lengths + at_s, mask=s < positions, other=0.0)[:, None]
    d_t = tl.load(error_lengths + at_t, mask=t < positions, other=0.0)[None, :]
    above = s[:, None] < t[None, :]
    own = tl.where(s[:, None] == t[None, :], p_s * d_s * p_t * d_t, 0.0)
    products = tl.where(above, 2 * met * errors, own)
    reach = tl.where(above, 2 * (tl.abs(met) * d_s * d_t + tl.abs(errors) * p_s * p_t), 0.0)
    tl.store(partials + 2 * program, tl.sum(tl.sum(products, 1), 0))
    tl.store(partials + 2 * program + 1, tl.sum(tl.sum(reach, 1), 0))
