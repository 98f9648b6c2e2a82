"""The noise stream of ``reference.py`` on GPUs, in Triton.

One lane computes one Philox block and uses all four of its words, so the ten rounds are paid once
for four normals. Uniforms and normals are float32; for float64 tensors the normal is widened and
the rest is float64. A program with words that need more bits (``reference.py``) goes through its
tiles again, with the blocks that continue them; of programs with 2,048 elements that is one in 256.

n elements read and written once, about 60 operations an element. No GPU was at hand: nothing here
was timed, and the constants rest on the static report (``make gpu-check``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.noise.reference import ELEMENTS_PER_TILE, NEAR, check_streams

_ELEMENTS = tl.constexpr(ELEMENTS_PER_TILE)
_LANES = tl.constexpr(ELEMENTS_PER_TILE // 4)
_NEAR = tl.constexpr(NEAR)
# 32 tiles of 16 lanes on 128 threads: four neighbouring lanes a thread, so that each of the four
# words is one 16-byte load and store. Static report: 16 elements a thread do not spill.
_TILES = 32
_WARPS = 4
# Tiles and warps for long rows, and for rows shorter than half of such a program: one warp, with as
# many lanes a thread.
_LONG_ROWS = (_TILES, _WARPS)
_SHORT_ROWS = (8, 1)
# The part of the tiles that is in hand at once where words are continued: one lane a thread. All
# would take 128 registers a thread of the NVIDIA targets instead of 40, in every program.
_PARTS_CONTINUED = tl.constexpr(4)
_MASK = 0xFFFFFFFF


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox 4x32-10 of uint32 counters under a key of two uint32 scalars."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _cos_sin_pi(t):
    """``cos(pi t)`` and ``sin(pi t)`` for -1 <= t <= 1, as in ``csrc/common/gaussian.inl``.

    t = q / 2 + r with |r| <= 1/4 is exact. The device libraries' cos and sin take any argument,
    with a branch and a stack frame for the large ones; this has neither.
    """
    shifted = t * 2.0 + 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer
    q = shifted.to(tl.int32, bitcast=True)
    r = t - (shifted - 12582912.0) * 0.5
    s = r * r
    c = s * -2.580689139e-2 + 2.353306304e-1
    c = c * s - 1.335262769
    c = c * s + 4.058712126
    c = c * s - 4.934802201
    c = c * s + 1.0
    d = s * 8.214588661e-2 - 5.992645293e-1
    d = d * s + 2.550164040
    d = d * s - 5.167712780
    d = (d * s + 3.141592654) * r
    odd = (q & 1) != 0
    cosine = tl.where(odd, d, c)
    sine = tl.where(odd, c, d)
    return tl.where(((q + 1) & 2) != 0, -cosine, cosine), tl.where((q & 2) != 0, -sine, sine)


@triton.jit
def _uniform(w0):
    """``w0 2^-32 + 2^-33`` with one rounding: both halves are exact, their sum rounds."""
    low = (w0 & 0xFFFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return (w0 >> 16).to(tl.float32) * 1.52587890625e-05 + low


@triton.jit
def _turn(w1):
    """``int32(w1) 2^-31``, the angle over pi, with one rounding."""
    return w1.to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10


@triton.jit
def _box_muller(w0, w1):
    """Two float32 normals from two uint32 words."""
    # sqrt_rn, because plain sqrt is an approximation on NVIDIA.
    radius = tl.sqrt_rn(-2.0 * tl.log(_uniform(w0)))
    cosine, sine = _cos_sin_pi(_turn(w1))
    return radius * cosine, radius * sine


@triton.jit
def _distance(w0, w1):
    """Return how near a pair of words is to where 32 bits are too few: uint32, below 2 _NEAR."""
    return tl.minimum(w0 + _NEAR, (w1 << 2) + _NEAR)


@triton.jit
def _continued(w0, w1, v0, v1, v2):
    """Two float32 normals from uint32 words that go on in v0, v1, v2 where need be."""
    near_one = w0 >= 0x80000000
    whole = tl.where(near_one, ~w0, w0)
    # Exact, or rounded once to float64; then once to float32.
    head = whole.to(tl.float64) * 2.3283064365386963e-10 + v0.to(tl.float64) * 5.421010862427522e-20
    distance = (head + (v1.to(tl.float64) + 0.5) * 1.262177448353619e-29).to(tl.float32)
    radial = whole < _NEAR
    square = -2.0 * tl.log(tl.where(radial, distance, _uniform(w0)))
    square = tl.where(radial & near_one, distance * (2.0 + distance), square)
    radius = tl.sqrt_rn(square)

    angular = (w1 << 2) + _NEAR < 2 * _NEAR
    offset = (w1 << 2).to(tl.int32, bitcast=True) >> 2
    part = (v2.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    small = (offset.to(tl.float64) + part).to(tl.float32) * 1.4629180792671596e-09  # pi 2^-31
    quarter = (w1 + 0x20000000) >> 30
    odd = (quarter & 1) != 0
    cosine, sine = tl.where(odd, -small, 1.0), tl.where(odd, 1.0, small)
    back = (quarter & 2) != 0
    cosine, sine = tl.where(back, -cosine, cosine), tl.where(back, -sine, sine)
    wide_cosine, wide_sine = _cos_sin_pi(_turn(w1))
    cosine = tl.where(angular, cosine, wide_cosine)
    sine = tl.where(angular, sine, wide_sine)
    return radius * cosine, radius * sine


@triton.jit
def _blocks(first_tile, c2, c3, TILES: tl.constexpr):
    """Return Philox counters and offsets, ``[TILES, 16]``, of the blocks of TILES tiles."""
    tile = first_tile + tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    block = tile * _LANES + lane
    zero = tl.zeros([TILES, _LANES], tl.uint32)
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    return low, high, zero + c2, zero + c3, tile * _ELEMENTS + lane


@triton.jit
def _add_noisy_word(x, offsets, n, z, std, scale):
    inside = offsets < n
    values = tl.load(x + offsets, mask=inside)
    tl.store(x + offsets, scale * (values + std * z.to(values.dtype)), mask=inside)


@triton.jit
def _add_noisy_words(x, offsets, n, z0, z1, z2, z3, std, scale):
    _add_noisy_word(x, offsets, n, z0, std, scale)
    _add_noisy_word(x, offsets + _LANES, n, z1, std, scale)
    _add_noisy_word(x, offsets + 2 * _LANES, n, z2, std, scale)
    _add_noisy_word(x, offsets + 3 * _LANES, n, z3, std, scale)


@triton.jit
def _add_continued_noise(x, first_tile, n, std, scale, k0, k1, c2, c3, TILES: tl.constexpr):
    b0, b1, b2, b3, offsets = _blocks(first_tile, c2, c3, TILES)
    w0, w1, w2, w3 = _philox(b0, b1, b2, b3, k0, k1)
    v0, v1, v2, _ = _philox(b0, b1 | 0x80000000, b2, b3, k0, k1)
    z0, z1 = _continued(w0, w1, v0, v1, v2)
    v0, v1, v2, _ = _philox(b0, b1 | 0xC0000000, b2, b3, k0, k1)
    z2, z3 = _continued(w2, w3, v0, v1, v2)
    _add_noisy_words(x, offsets, n, z0, z1, z2, z3, std, scale)


@triton.jit
def _add_noise_to_tiles(x, first, n, std, scale, k0, k1, c2, c3, TILES: tl.constexpr):
    """Noise of the stream (k0, k1, c2, c3) for TILES tiles, from tile ``first`` on, of n elements.

    std and scale are float64, or Python's numbers.
    """
    # The interpreter passes Python floats; adding them to a float64 zero keeps all their bits.
    std = (tl.zeros((), tl.float64) + std).to(x.dtype.element_ty)
    scale = (tl.zeros((), tl.float64) + scale).to(x.dtype.element_ty)
    b0, b1, b2, b3, offsets = _blocks(first, c2, c3, TILES)
    w0, w1, w2, w3 = _philox(b0, b1, b2, b3, k0, k1)
    if tl.min(tl.minimum(_distance(w0, w1), _distance(w2, w3))) >= 2 * _NEAR:
        z0, z1 = _box_muller(w0, w1)
        z2, z3 = _box_muller(w2, w3)
        _add_noisy_words(x, offsets, n, z0, z1, z2, z3, std, scale)
    else:
        part: tl.constexpr = TILES // _PARTS_CONTINUED
        for tile in range(0, TILES, part):
            _add_continued_noise(x, first + tile, n, std, scale, k0, k1, c2, c3, part)


# Nothing is specialised on the values of key and counter, which change with every step.
@triton.jit(do_not_specialize=["vectors", "k0", "k1", "c2", "c3"])
def _add_noise_kernel(
    x,
    vectors: tl.int64,
    std: tl.float64,
    scale: tl.float64,
    k0: tl.uint32,
    k1: tl.uint32,
    c2: tl.uint32,
    c3: tl.uint32,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """Noise for TILES tiles of the ``vectors * VECTOR`` elements of x."""
    first = tl.program_id(0).to(tl.int64) * TILES
    k0, k1, c2, c3 = k0.to(tl.uint32), k1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    _add_noise_to_tiles(x, first, vectors * VECTOR, std, scale, k0, k1, c2, c3, TILES)


@triton.jit(do_not_specialize=["rows", "vectors", "stride", "programs"])
def _add_row_noise_kernel(
    x,
    streams,
    rows: tl.int64,
    vectors: tl.int64,
    stride: tl.int64,
    programs: tl.int64,
    std: tl.float64,
    scale: tl.float64,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """Noise for TILES tiles of one row of ``vectors * VECTOR`` elements of x.

    Rows begin ``stride * VECTOR`` elements apart, and each has so many programs. streams: int64
    ``[2, rows]``, keys and counters.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // programs
    first = program % programs * TILES
    key, counter = tl.load(streams + row), tl.load(streams + rows + row)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c2, c3 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    x += row * (stride * VECTOR)
    _add_noise_to_tiles(x, first, vectors * VECTOR, std, scale, k0, k1, c2, c3, TILES)


def _vector(x: Tensor, *numbers: int) -> int:
    """Return how many elements of ``x`` a thread can load at once: 16 bytes of them, or one.

    numbers: of elements, in a row and between rows, say. They reach the kernel in this unit, which
        tells the compiler that no 16-byte load is unaligned or goes beyond the end.
    """
    vector = 16 // x.element_size()
    whole = all(number % vector == 0 for number in numbers)
    return vector if whole and x.data_ptr() % 16 == 0 else 1


def add_gaussian_noise_(xs: list[Tensor], std: float, key: int, counter: int, scale: float) -> None:
    """``x <- scale * (x + std * z)`` for every tensor; tensor i takes stream (key, counter + i)."""
    for index, x in enumerate(xs):
        if x.numel() == 0:
            continue
        flat = x.contiguous()
        stream = counter + index
        vector = _vector(flat, x.numel())
        grid = (triton.cdiv(x.numel(), _TILES * ELEMENTS_PER_TILE),)
        with torch.cuda.device_of(x):
            _add_noise_kernel[grid](
                flat,
                x.numel() // vector,
                std,
                scale,
                key & _MASK,
                key >> 32 & _MASK,
                stream & _MASK,
                stream >> 32 & _MASK,
                VECTOR=vector,
                TILES=_TILES,
                num_warps=_WARPS,
                **COMPILE_OPTIONS,
            )
        if flat is not x:
            x.copy_(flat)


def add_row_noise_(x: Tensor, std: float, keys: Tensor, counters: Tensor, scale: float) -> None:
    """``x_i <- scale * (x_i + std * z_i)`` for every row; row i takes (keys[i], counters[i]).

    One launch. Rows are contiguous; keys and counters are on the CPU.
    """
    check_streams(keys, counters)
    if x.numel() == 0:
        return
    n, stride = x[0].numel(), x.stride(0)
    vector = _vector(x, n, stride)
    tiles, warps = _SHORT_ROWS if 2 * n < _TILES * ELEMENTS_PER_TILE else _LONG_ROWS
    programs = triton.cdiv(n, tiles * ELEMENTS_PER_TILE)
    with torch.cuda.device_of(x):
        _add_row_noise_kernel[(x.shape[0] * programs,)](
            x,
            torch.stack((keys, counters)).to(x.device),
            x.shape[0],
            n // vector,
            stride // vector,
            programs,
            std,
            scale,
            VECTOR=vector,
            TILES=tiles,
            num_warps=warps,
            **COMPILE_OPTIONS,
        )


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the kernels are launched."""
    numbers = {"std": "fp64", "scale": "fp64", "vectors": "i64"}
    stream = dict.fromkeys(("k0", "k1", "c2", "c3"), "u32")
    rows = {"streams": "*i64", "rows": "i64", "stride": "i64", "programs": "i64"}
    launches = (
        (_add_noise_kernel, stream, (), _TILES, _WARPS),
        (_add_row_noise_kernel, rows, ("streams",), *_LONG_ROWS),
        (_add_row_noise_kernel, rows, ("streams",), *_SHORT_ROWS),
    )
    return [
        AheadOfTimeCase(
            kernel=kernel,
            configuration=f"{dtype} {tiles} tiles vector {vector}"
            + ("" if aligned else " unaligned"),
            signature={"x": f"*{dtype}", **numbers, **arguments},
            constexprs={"VECTOR": vector, "TILES": tiles},
            num_warps=warps,
            bytes_per_element=2 * size,
            aligned=(*also, "x") if aligned else also,
        )
        for kernel, arguments, also, tiles, warps in launches
        for dtype, size in (("fp32", 4), ("fp64", 8))
        for vector, aligned in ((16 // size, True), (1, True), (1, False))
    ]
