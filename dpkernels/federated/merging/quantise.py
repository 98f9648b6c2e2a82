"""Real numbers as integer codes: uniform over a signed range, or uniform in the logarithm.

FedFisher's quantiser (Appendix C, formula 84) has l_q = 2^(floor(32/s_q) - 1) - 1 levels on each
side of zero and one scale for a tensor. Ours for weights is the same with a scale for each row; for
the diagonal of a Fisher matrix, which spans dozens of octaves (-57 to +2 on LeNet), it is uniform
in log2 f, so that the *relative* error is bounded: the minimiser of sum_i f_i (w - w_i)^2 depends
on ratios of the f_i, and a uniform code writes 0 for all below 2^-16 of the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.merging.packing import Reader, floats, pack, packed_bytes

# Rows of fewer values share one scale: 4 bytes beside 24 for 16 values of 12 bits is 17% more.
_SHORTEST_ROW = 16


def levels(bits: int) -> int:
    """Return l_q = 2^(bits - 1) - 1, the levels on each side of zero of a code of ``bits`` bits.

    Raises ValueError for bits that are not 2 to 32: one bit has no level but zero.
    """
    if not 2 <= bits <= 32:
        raise ValueError(f"bits: a signed code must have 2 to 32, got {bits}")
    return (1 << (bits - 1)) - 1


def paper_bits(s_q: int) -> int:
    """Return floor(32/s_q), the bits that the paper's factor s_q leaves of 32.

    Raises ValueError for factors that are not 1 to 16.
    """
    if not 1 <= s_q <= 16:
        raise ValueError(f"s_q: must be 1 to 16, got {s_q}")
    return 32 // s_q


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes int64 and scales float64 of the rows of x ``[R, n]``: ``[R, n]``, ``[R]``.

    code = l_q + sign(x) round(l_q |x| / scale), scale = max |x| over the row, rounded up to
    float32. |x - dequantise(...)| <= scale / (2 l_q): half a step. Formula (84) is the case of one
    row; rounding is to the nearest, ties to even, as in the authors' code. 5 flops an element.

    Raises ValueError for bits that are not 2 to 32.
    """
    top = levels(bits)
    exact = x.detach().to(torch.float64)
    scales = _up_to_float32(exact.abs().amax(1)) if exact.numel() else exact.new_zeros(len(x))
    steps = torch.where(scales > 0, scales, 1.0)
    codes = torch.round(exact / steps[:, None] * top).clamp(-top, top).to(torch.int64)
    return codes + top, scales


def dequantise(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return scale (code - l_q) / l_q, float64: codes ``[R, n]`` int64, scales ``[R]``.

    Raises ValueError for codes above 2 l_q, negative scales, or bits that are not 2 to 32.
    """
    top = levels(bits)
    if codes.numel() and int(codes.max()) > 2 * top:
        raise ValueError(f"codes: must be 0 to {2 * top} with {bits} bits, got {int(codes.max())}")
    if bool((scales < 0).any()):
        raise ValueError(f"scales: must be >= 0, got {float(scales.min())}")
    return (codes - top).to(torch.float64) / top * scales[:, None]


def quantise_log(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes ``[n]`` int64 and the range ``[2]`` float64 of values x ``[n]`` >= 0.

    code = 0 for zero, else 1 + round((log2 x - low) / step), step = (high - low) / (2^bits - 2),
    with low and high the extremes of log2 x, rounded outwards to float32. Zeros come back exactly,
    others within a factor of 2^(step / 2), and all of them >= 0.

    Raises ValueError for bits that are not 2 to 32, or negative values.
    """
    levels(bits)
    exact = x.detach().to(torch.float64)
    if bool((exact < 0).any()):
        raise ValueError(f"quantise_log: values must be >= 0, got {float(exact.min())}")
    positive = exact > 0
    logs = torch.log2(exact[positive])
    codes = torch.zeros(len(exact), dtype=torch.int64)
    if not len(logs):
        return codes, torch.zeros(2, dtype=torch.float64)
    span = torch.stack([-_up_to_float32(-logs.min()), _up_to_float32(logs.max())])
    top = (1 << bits) - 2
    width = span[1] - span[0]
    places = (logs - span[0]) / torch.where(width > 0, width, 1.0) * top
    codes[positive] = 1 + torch.round(places).clamp(0, top).to(torch.int64)
    return codes, span


def dequantise_log(codes: Tensor, span: Tensor, bits: int) -> Tensor:
    """Return 2^(low + (code - 1) step), 0 for code 0; float64 ``[n]``, finite and >= 0.

    Raises ValueError for a range that is not low <= high <= 128 (float32's), or codes above
    2^bits - 1.
    """
    low, high = (float(end) for end in span)
    top = (1 << bits) - 2
    if not low <= high <= 128:
        raise ValueError(f"span: must be low <= high <= 128, got {low} and {high}")
    if codes.numel() and int(codes.max()) > top + 1:
        raise ValueError(f"codes: must be 0 to {top + 1}, got {int(codes.max())}")
    values = torch.exp2(low + (codes - 1).to(torch.float64) / top * (high - low))
    return torch.where(codes > 0, values, 0.0)


def _up_to_float32(values: Tensor) -> Tensor:
    """Return the least float32 numbers that are not below float64 values, as float64."""
    near = values.to(torch.float32)
    above = torch.nextafter(near, torch.full_like(near, math.inf))
    return torch.where(near.to(torch.float64) < values, above, near).to(torch.float64)


@dataclass(frozen=True)
class Uniform:
    """How a tensor of that shape is sent by ``quantise``: scales in float32, then packed codes.

    rows: a scale for each row ``[O, ...]``, where rows are at least 16 long; else one for all.
    """

    shape: tuple[int, ...]
    bits: int
    rows: bool = True

    @property
    def _matrix(self) -> tuple[int, int]:
        count = math.prod(self.shape)
        rows = self.shape[0] if self.rows and len(self.shape) > 1 else 1
        return (rows, count // rows) if count >= rows * _SHORTEST_ROW else (1, count)

    @property
    def length(self) -> int:
        """How many bytes ``encode`` returns."""
        rows, columns = self._matrix
        return 4 * rows + packed_bytes(rows * columns, self.bits)

    def encode(self, x: Tensor) -> bytes:
        """Return what is sent of x, of the shape above."""
        codes, scales = quantise(x.detach().cpu().reshape(self._matrix), self.bits)
        return floats(scales) + pack(codes, self.bits)

    def decode(self, reader: Reader) -> Tensor:
        """Return the tensor, float64. Raises ValueError for bytes that ``encode`` never writes."""
        rows, columns = self._matrix
        scales = reader.floats(rows)
        codes = reader.codes(rows * columns, self.bits).view(rows, columns)
        return dequantise(codes, scales, self.bits).view(self.shape)


@dataclass(frozen=True)
class Logarithmic:
    """How a tensor >= 0 of that shape is sent by ``quantise_log``: its range, then packed codes."""

    shape: tuple[int, ...]
    bits: int

    @property
    def length(self) -> int:
        """How many bytes ``encode`` returns."""
        return 8 + packed_bytes(math.prod(self.shape), self.bits)

    def encode(self, x: Tensor) -> bytes:
        """Return what is sent of x, of the shape above."""
        codes, span = quantise_log(x.detach().cpu().reshape(-1), self.bits)
        return floats(span) + pack(codes, self.bits)

    def decode(self, reader: Reader) -> Tensor:
        """Return the tensor, float64. Raises ValueError for bytes that ``encode`` never writes."""
        span = reader.floats(2)
        codes = reader.codes(math.prod(self.shape), self.bits)
        return dequantise_log(codes, span, self.bits).view(self.shape)
