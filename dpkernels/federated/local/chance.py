"""A client's own chance in a round: the order of its records in each epoch, and dropout masks.

Both are functions of the client's seed and of how many epochs went before, and of nothing that
other clients do. Orders are the same whichever way local training is computed. Masks are drawn here
for stacked and chained models; the loop lets PyTorch draw its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Masks come from a stream of their own, so that drawing them leaves the orders as they are. torch's
# CPU generator keeps the low 32 bits of its seed: the two seeds must differ in those.
_MASKS = 0x7F4A7C15


def orders_of(seed: int) -> torch.Generator:
    """Return the generator of a client's orders: one ``randperm`` of its records per epoch."""
    return torch.Generator().manual_seed(seed)


def mask_seed(seed: int) -> int:
    """Return the seed of a client's dropout masks."""
    return seed ^ _MASKS


class Levels:
    """Random levels of all clients for one epoch after the other: dropout keeps what is below one.

    seeds: of the clients. counts: records of each. positions: batch positions in an epoch, padded.
    widths, levels: features of each dropout layer, and 256 or 65536.

    Random bits are ten times cheaper than Bernoulli draws (14 us against 420 us for 500 x 64 on
    one core).
    """

    def __init__(
        self,
        seeds: Sequence[int],
        counts: Sequence[int],
        positions: int,
        widths: Sequence[int],
        levels: Sequence[int],
    ) -> None:
        self._counts, self._widths, self._positions = counts, widths, positions
        self._generators = [torch.Generator().manual_seed(mask_seed(seed)) for seed in seeds]
        self._raw = []
        for width, count in zip(widths, levels, strict=True):
            dtype = torch.uint8 if count == 256 else torch.uint16
            words = -(-positions * width * dtype.itemsize // 8)
            self._raw.append((torch.zeros(len(seeds), words, dtype=torch.int64), dtype))

    def next_epoch(self) -> list[Tensor]:
        """Return uint8 or uint16 ``[k, positions, width]`` of every layer; kept till the next.

        What belongs to positions without a record is arbitrary.
        """
        drawn = []
        for (raw, dtype), width in zip(self._raw, self._widths, strict=True):
            for row, count, generator in zip(raw, self._counts, self._generators, strict=True):
                words = -(-count * width * dtype.itemsize // 8)
                row[:words].random_(-(2**63), None, generator=generator)
            used = raw.view(dtype)[:, : self._positions * width]
            drawn.append(used.unflatten(1, (self._positions, width)))
        return drawn


class Masks:
    """Scaled dropout masks of all clients for one epoch after the other.

    Arguments as of ``Levels``; rates: dropout probability of each layer.

    A record is kept with probability round(2^b (1 - rate)) / 2^b, where b = 8 if that is exact and
    else 16, and scaled by one over that: the mean is exact.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        counts: Sequence[int],
        positions: int,
        widths: Sequence[int],
        rates: Sequence[float],
        like: Tensor,
    ) -> None:
        levels = [256 if (256 * rate).is_integer() else 65536 for rate in rates]
        self._levels = Levels(seeds, counts, positions, widths, levels)
        self._kept = [like.new_empty(len(seeds), positions, width) for width in widths]
        self._below = [
            round(count * (1.0 - rate)) for count, rate in zip(levels, rates, strict=True)
        ]
        self._scales = [
            count / below if below else 0.0
            for count, below in zip(levels, self._below, strict=True)
        ]

    def next_epoch(self) -> list[Tensor]:
        """Return the masks of every dropout layer, ``[k, positions, width]``; kept till the next.

        What belongs to positions without a record is arbitrary, but finite.
        """
        layers = zip(self._levels.next_epoch(), self._kept, self._below, self._scales, strict=True)
        for drawn, kept, below, scale in layers:
            if drawn.dtype == torch.uint8:
                # A rate of 0 keeps 256 of 256 levels, which is no uint8.
                torch.le(drawn, below - 1, out=kept) if below else kept.zero_()
            else:
                kept.copy_(drawn.to(torch.int32) < below)
            kept.mul_(scale)
        return self._kept
