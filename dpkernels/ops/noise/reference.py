"""The noise stream in plain PyTorch, on any device.

The stream is a function of (key, counter, element index) and of nothing else:

- Elements are dealt out in tiles of 64 = 16 blocks x 4 words. Element ``e`` takes word
  ``(e // 16) % 4`` of Philox block ``(e // 64) * 16 + e % 16``, so that 8 or 16 SIMD lanes, each
  with its own block, store whole vectors.
- Block ``j`` of (key, counter) is Philox 4x32-10 of the 128-bit counter
  ``(j mod 2^32, j >> 32, counter mod 2^32, counter >> 32)`` under the 64-bit key.
- Words (0, 1) and (2, 3) give two normals each by Box-Muller:
  ``u = w0 2^-32 + 2^-33`` and ``t = int32(w1) 2^-31``, both rounded once to float32, then
  ``sqrt(-2 log u) * (cos(pi t), sin(pi t))``. The smallest ``u`` is 2^-33: |z| <= 6.77.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCKS_PER_TILE = 16
ELEMENTS_PER_TILE = 64

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counters: Tensor, key: int) -> Tensor:
    """Philox 4x32-10 (Salmon et al. 2011): int64 ``[..., 4]`` words in [0, 2^32), to the same.

    key: 64 bits, signed or not. int64 products wrap modulo 2^64, which is all that is needed.
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
    key: int,
    counter: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Elements 0 to n-1 of the stream (key, counter): ``[n]`` of ``dtype``.

    With dtype float64 these are the exact values, which every backend approximates in float32:
    the compiled kernels widen float32 normals for float64 tensors.
    """
    tiles = -(-n // ELEMENTS_PER_TILE)
    blocks = torch.arange(tiles * BLOCKS_PER_TILE, dtype=torch.int64, device=device)
    low, high = torch.full_like(blocks, counter & _MASK), torch.full_like(blocks, counter >> 32)
    words = philox(torch.stack((blocks & _MASK, blocks >> 32, low, high & _MASK), -1), key)
    normals = [*_box_muller(words[:, 0], words[:, 1], dtype)]
    normals += _box_muller(words[:, 2], words[:, 3], dtype)
    by_tile = torch.stack(normals).view(4, tiles, BLOCKS_PER_TILE)
    return by_tile.transpose(0, 1).reshape(-1)[:n]


def _box_muller(w0: Tensor, w1: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    uniform = (w0.double() * 2.0**-32 + 2.0**-33).float().to(dtype)
    signed = torch.where(w1 >= 2**31, w1 - 2**32, w1)
    angle = (signed.double() * 2.0**-31).float().to(dtype) * math.pi
    radius = (-2.0 * uniform.log()).sqrt()
    return radius * angle.cos(), radius * angle.sin()


def add_gaussian_noise_(xs: list[Tensor], std: float, key: int, counter: int, scale: float) -> None:
    """``x <- scale * (x + std * z)`` for every tensor; tensor i takes stream (key, counter + i)."""
    for index, x in enumerate(xs):
        z = standard_normals(x.numel(), key, counter + index, x.device, x.dtype)
        x.add_(z.view_as(x), alpha=std).mul_(scale)
