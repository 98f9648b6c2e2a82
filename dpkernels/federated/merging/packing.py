"""Integers of b bits as real bytes and back, and bytes that are read with their lengths checked."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_BITS = 32

# Codes at a time: 32 bytes of work each, so 2 MiB, which a cache holds. A multiple of 8, so that a
# chunk of any width is whole bytes.
_CHUNK = 1 << 16


def packed_bytes(count: int, bits: int) -> int:
    """Return how many bytes ``count`` codes of ``bits`` bits take: the last is filled with zeros.

    Raises ValueError for bits that are not 1 to 32.
    """
    _check_bits(bits)
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> bytes:
    """Return the codes side by side, high bit first, in ``packed_bytes(codes.numel(), bits)``.

    codes: int64, any shape, 0 to 2^bits - 1; read row by row. 32 bytes of work for each of 65,536
    at a time.

    Raises ValueError for another dtype, codes that do not fit, or bits that are not 1 to 32.
    """
    _check_bits(bits)
    if codes.dtype != torch.int64:
        raise ValueError(f"pack: codes must be int64, got {codes.dtype}")
    flat = codes.detach().cpu().reshape(-1)
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= 1 << bits):
        raise ValueError(
            f"pack: codes of {bits} bits must be 0 to {(1 << bits) - 1}, got {int(flat.min())} to "
            f"{int(flat.max())}"
        )
    words = flat.numpy().astype(">u4")
    parts = []
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].view(np.uint8).reshape(-1, 4)
        parts.append(np.packbits(np.unpackbits(chunk, axis=1)[:, MAX_BITS - bits :]).tobytes())
    return b"".join(parts)


def unpack(data: bytes, bits: int, count: int) -> Tensor:
    """Return the ``[count]`` int64 codes that ``pack`` wrote.

    Raises ValueError for a length other than ``packed_bytes(count, bits)``, for bits behind the
    last code that are not 0 (a payload has one spelling), or bits that are not 1 to 32.
    """
    wanted = packed_bytes(count, bits)
    if count < 0 or len(data) != wanted:
        raise ValueError(
            f"unpack: {count} codes of {bits} bits must be {max(wanted, 0)} bytes, got {len(data)}"
        )
    spare = 8 * wanted - count * bits
    if spare and data[-1] & ((1 << spare) - 1):
        raise ValueError(f"unpack: the last {spare} bits must be 0, got {data[-1]:08b}")
    codes = np.empty(count, np.int64)
    raw = np.frombuffer(data, np.uint8)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        first = start * bits // 8
        chunk = raw[first : first + packed_bytes(size, bits)]
        words = np.zeros((size, MAX_BITS), np.uint8)
        words[:, MAX_BITS - bits :] = np.unpackbits(chunk, count=size * bits).reshape(size, bits)
        codes[start : start + size] = np.packbits(words, axis=1).view(">u4")[:, 0]
    return torch.from_numpy(codes)


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits: must be 1 to {MAX_BITS}, got {bits}")


class Reader:
    """Bytes from elsewhere, read from the front; whatever is too short is a ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    @property
    def left(self) -> int:
        """How many bytes have not been read."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes. Raises ValueError if there are fewer."""
        if not 0 <= size <= self.left:
            raise ValueError(
                f"payload: {size} bytes wanted at {self._at}, {self.left} left; was it cut off?"
            )
        self._at += size
        return self._data[self._at - size : self._at].tobytes()

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Return the next values, as ``struct`` lays them out. Raises ValueError if cut off."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def floats(self, count: int) -> Tensor:
        """Return the next float32 values, ``[count]`` float64. Raises ValueError if not finite."""
        values = np.frombuffer(self.take(4 * count), "<f4")
        if not np.isfinite(values).all():
            raise ValueError("payload: scales must be finite, got NaN or infinity")
        return torch.from_numpy(values.astype(np.float64))

    def text(self) -> str:
        """Return a string of at most 65,535 bytes. Raises ValueError if it is not UTF-8."""
        (size,) = self.unpack("<H")
        raw = self.take(size)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"payload: names must be UTF-8, got {raw[:20]!r}") from error

    def codes(self, count: int, bits: int) -> Tensor:
        """Return the next ``[count]`` int64 codes of ``bits`` bits; raises as ``unpack`` does."""
        return unpack(self.take(packed_bytes(count, bits)), bits, count)


def floats(values: Tensor) -> bytes:
    """Return values as little-endian float32, as ``Reader.floats`` reads them."""
    return values.detach().cpu().reshape(-1).numpy().astype("<f4").tobytes()


def text(value: str) -> bytes:
    """Return a string as ``Reader.text`` reads it. Raises ValueError for more than 65,535 bytes."""
    raw = value.encode("utf-8")
    if len(raw) > 0xFFFF:
        raise ValueError(f"text: a name must be at most 65,535 bytes, got {len(raw)}")
    return struct.pack("<H", len(raw)) + raw
