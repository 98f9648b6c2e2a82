"""Lengths of packed sequences."""

from __future__ import annotations

from torch import Tensor


def compute_seq_lengths(batch_sizes: Tensor) -> list[int]:
    """Return the length of every sequence, the longest first.

    batch_sizes: int64 ``[T]`` of a ``PackedSequence``: how many sequences have a step t.
    """
    return [int((batch_sizes > i).sum()) for i in range(int(batch_sizes[0]))]
