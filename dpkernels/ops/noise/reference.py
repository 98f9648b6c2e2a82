"""The noise stream in plain PyTorch, on any device.

The stream is a function of (key, counter, element index) and of nothing else:

- Elements are dealt out in tiles of 64 = 16 blocks x 4 words. Element ``e`` takes word
  ``(e // 16) % 4`` of Philox block ``(e // 64) * 16 + e % 16``, so that 8 or 16 SIMD lanes, each
  with its own block, store whole vectors.
- Block ``j`` of (key, counter) is Philox 4x32-10 of the 128-bit counter
  ``(j mod 2^32, j >> 32, counter mod 2^32, counter >> 32)`` under the 64-bit key.
- Words (0, 1) and (2, 3) give two normals each by Box-Muller:
  ``u = w0 2^-32 + 2^-33`` and ``t = int32(w1) 2^-31``, both rounded once to float32, then
  ``sqrt(-2 log u) * (cos(pi t), sin(pi t))``.
- 32 bits are too few at three places. With u near 0 the tail would end at 6.77 sigma. With u near
  1, or t near a multiple of 1/2, rounding would make a normal exactly 0, one in 12 million, and
  release an element without noise. A word w0 within 2^12 of such a place, or w1 within 2^10, is
  continued by words v of another block: that of ``j + 2^63`` for the pair (0, 1), and of
  ``j + 2^63 + 2^62`` for (2, 3).

      d = (w0 + (v0 + (v1 + 1/2) 2^-32) 2^-32) 2^-32,  u = d
                        (w0 near 2^32: with 2^32 - 1 - w0 for w0, and 1 - u = d)
      o = (w1 - k 2^30 + (v2 + 1/2) 2^-32) 2^-31,      t = k / 2 + o

  Each is exact or rounded once to float64, then rounded once to float32. One pair in 262,144 is
  continued. All others have the normals that 32 bits give.

No block is used for two things: the index of an ordinary one is below 2^61 (a tensor has less than
2^63 elements), and ``NoiseKey`` derives children from counters of 2^63 and more, which noise never
has.

The smallest u is 2^-97, so that |z| reaches 11.6. A normal that is drawn from exact uniforms lies
beyond, or in the cell at the end, with probability ``UNREACHABLE_MASS`` = 2^-96; elsewhere it
differs from ours by rounding. That mass is part of the mechanism: a run states it for every element
that it adds noise to, and accountants add it to delta (``privacy/mechanism.py``). Rounding itself,
of normals and of the noisy sum, is not accounted.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BLOCKS_PER_TILE = 16
ELEMENTS_PER_TILE = 64

# Of each element's noise: what exact uniforms would put at the tail's last cell or beyond.
UNREACHABLE_MASS = 2.0**-96

# Words this near to a place where 32 bits are too few are continued. Fewer would leave normals on a
# grid that can be seen; with more, too many programs of a GPU would take the long way.
NEAR = 2**12
# Where the blocks that continue others begin: of pairs (0, 1), and how far from there of (2, 3).
TAIL_BLOCKS = 2**63
_PAIR = 2**62

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

# Without the values: a key in a message would tell the noise.
_NEGATIVE = "add_row_noise_: counters must be in [0, 2^63), got a negative one; RowKeys makes them"
_REPEATED = (
    "add_row_noise_: two rows have the same key and counter, so that their difference would show "
    "the data without noise; RowKeys hands out each pair once"
)


def philox(counters: Tensor, key: int | Tensor) -> Tensor:
    """Philox 4x32-10 (Salmon et al. 2011): int64 ``[..., 4]`` words in [0, 2^32), to the same.

    key: 64 bits, signed or not; or many, int64 that broadcasts to ``[...]``. int64 products wrap
        modulo 2^64, which is all that is needed.
    """
    c0, c1, c2, c3 = counters.unbind(-1)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), -1)


def standard_normals(
    n: int,
    key: int | Tensor,
    counter: int | Tensor,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Elements 0 to n-1 of the stream (key, counter): ``[n]`` of ``dtype``.

    key and counter may be int64 ``[k]`` on the device, for k streams at once: ``[k, n]``. Row i is
    that of (key[i], counter[i]) alone, bit for bit.

    With dtype float64 these are the exact values, which every backend approximates in float32:
    the compiled kernels widen float32 normals for float64 tensors.
    """
    tiles = -(-n // ELEMENTS_PER_TILE)
    blocks = torch.arange(tiles * BLOCKS_PER_TILE, dtype=torch.int64, device=device)
    words = _words(blocks, 0, _column(key), _column(counter))
    normals = []
    for pair in (0, 1):
        w0, w1 = words[..., 2 * pair], words[..., 2 * pair + 1]
        at = is_continued(w0, w1).nonzero(as_tuple=True)
        space = TAIL_BLOCKS + pair * _PAIR
        more = _words(blocks[at[-1]], space, _of_rows(key, at[0]), _of_rows(counter, at[0]))
        z = torch.stack(_box_muller(w0, w1, dtype), -1)
        z[at] = torch.stack(_continued(w0[at], w1[at], more, dtype), -1)
        normals.append(z)
    by_block: Tensor = torch.cat(normals, -1).unflatten(-2, (tiles, BLOCKS_PER_TILE))
    return by_block.mT.flatten(-3)[..., :n]


def _column(x: int | Tensor) -> int | Tensor:
    return x[:, None] if isinstance(x, Tensor) else x


def _of_rows(x: int | Tensor, rows: Tensor) -> int | Tensor:
    return x[rows] if isinstance(x, Tensor) else x


def _words(blocks: Tensor, space: int, key: int | Tensor, counter: int | Tensor) -> Tensor:
    """Words ``[..., 4]`` of the blocks ``[n]``, int64 below 2^61, in the space that begins there.

    key, counter: one for all, or int64 that broadcasts with the blocks to ``[...]``.
    """
    zero = torch.zeros_like(blocks)
    low, high = zero + (counter & _MASK), zero + (counter >> 32 & _MASK)
    counters = (blocks & _MASK, blocks >> 32 | space >> 32, low, high)
    return philox(torch.stack(torch.broadcast_tensors(*counters), -1), key)


def is_continued(w0: Tensor, w1: Tensor) -> Tensor:
    """Where a pair of words, int64 in [0, 2^32), needs more bits: bool of the same shape."""
    radial, angular = (w0 + NEAR) & _MASK, ((w1 << 2) + NEAR) & _MASK
    return torch.minimum(radial, angular) < 2 * NEAR


def _box_muller(w0: Tensor, w1: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = _angle(w1, dtype)
    radius = (-2.0 * _uniform(w0, dtype).log()).sqrt()
    return radius * angle.cos(), radius * angle.sin()


def _uniform(w0: Tensor, dtype: torch.dtype) -> Tensor:
    return (w0.double() * 2.0**-32 + 2.0**-33).float().to(dtype)


def _angle(w1: Tensor, dtype: torch.dtype) -> Tensor:
    signed = torch.where(w1 >= 2**31, w1 - 2**32, w1)
    return (signed.double() * 2.0**-31).float().to(dtype) * math.pi


def _continued(w0: Tensor, w1: Tensor, more: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two normals ``[n]`` from words ``[n]`` of which one at least goes on in ``more`` ``[n, 4]``.

    d is below 2^-20 and o below 2^-21, so that -2 log(1 - d) = d (2 + d), sin(pi o) = pi o and
    cos(pi o) = 1 are right to 1e-11.
    """
    v = more.double()
    near_one = w0 >= 2**31
    whole = torch.where(near_one, _MASK - w0, w0)
    d = whole.double() * 2.0**-32 + v[:, 0] * 2.0**-64 + (v[:, 1] + 0.5) * 2.0**-96
    d = d.float().to(dtype)
    square = torch.where(near_one, d * (2 + d), -2.0 * d.log())
    ordinary = -2.0 * _uniform(w0, dtype).log()
    radius = torch.where(whole < NEAR, square, ordinary).sqrt()

    quarter = (w1 + 2**29) >> 30 & 3
    offset = ((w1 + 2**29) & (2**30 - 1)) - 2**29
    o = (offset.double() + (v[:, 2] + 0.5) * 2.0**-32).float().to(dtype) * 2.0**-31
    small, one = math.pi * o, torch.ones_like(o)
    near = ((w1 << 2) + NEAR & _MASK) < 2 * NEAR
    angle = _angle(w1, dtype)
    cosine = torch.stack((one, -small, -one, small)).gather(0, quarter[None])[0]
    sine = torch.stack((small, one, -small, -one)).gather(0, quarter[None])[0]
    cosine = torch.where(near, cosine, angle.cos())
    sine = torch.where(near, sine, angle.sin())
    return radius * cosine, radius * sine


def add_gaussian_noise_(xs: list[Tensor], std: float, key: int, counter: int, scale: float) -> None:
    """``x <- scale * (x + std * z)`` for every tensor; tensor i takes stream (key, counter + i)."""
    for index, x in enumerate(xs):
        z = standard_normals(x.numel(), key, counter + index, x.device, x.dtype)
        x.add_(z.view_as(x), alpha=std).mul_(scale)


def add_row_noise_(x: Tensor, std: float, keys: Tensor, counters: Tensor, scale: float) -> None:
    """``x_i <- scale * (x_i + std * z_i)`` for every row; row i takes (keys[i], counters[i])."""
    check_streams(keys, counters)
    if x.numel() == 0:
        return
    keys, counters = keys.to(x.device), counters.to(x.device)
    z = standard_normals(x[0].numel(), keys, counters, x.device, x.dtype)
    x.add_(z.view(x.shape), alpha=std).mul_(scale)


def check_streams(keys: Tensor, counters: Tensor) -> None:
    """Raise ValueError unless all counters are >= 0 and no two streams are the same.

    keys, counters: int64 ``[k]`` on the CPU. A compiled graph has no values to look at: it checks
    when it runs, and raises RuntimeError.
    """
    if torch.compiler.is_compiling():
        torch._assert_async((counters >= 0).all(), _NEGATIVE)
        torch._assert_async(~_some_repeat(keys, counters), _REPEATED)
        return
    if bool((counters < 0).any()):
        raise ValueError(_NEGATIVE)
    # Keys alone differ, as a rule. For 10,000 of them NumPy's sort takes 0.02 ms with AVX-512,
    # PyTorch's 0.33 ms, and two of those for pairs 0.9 ms.
    ordered = np.sort(keys.numpy())
    if bool((ordered[1:] == ordered[:-1]).any()) and bool(_some_repeat(keys, counters)):
        raise ValueError(_REPEATED)


def _some_repeat(keys: Tensor, counters: Tensor) -> Tensor:
    """Whether two (key, counter) pairs are the same: one bool."""
    by_counter, order = counters.sort()
    # The sort is stable: equal keys end up side by side in the order of their counters.
    by_key, order = keys[order].sort(stable=True)
    return ((by_key.diff() == 0) & (by_counter[order].diff() == 0)).any()
