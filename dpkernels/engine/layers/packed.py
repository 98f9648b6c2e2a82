"""Packed sequences as padded ones, with samples as the first axis.

A ``PackedSequence`` holds the steps of all samples in one axis, the longest sample first. Padded,
each sample has a row of its own, in the order in which the caller packed them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


@dataclass(frozen=True)
class Padding:
    """How long the sequences of a batch are.

    lengths: int64 ``[B]``, on the CPU. padded: bool ``[B, T]``, True after the end of a sequence.
    backwards: int64 ``[B, T]``, the steps of each sequence from last to first; its padding stays.
    """

    packed: PackedSequence
    lengths: Tensor
    padded: Tensor
    backwards: Tensor

    @classmethod
    def of(cls, packed: PackedSequence) -> tuple[Tensor, Padding]:
        """Return the sequences ``[B, T, n]``, padded with zeros at the end, and what is padding."""
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        steps = torch.arange(x.shape[1], device=x.device)
        ends = lengths.to(x.device).unsqueeze(1)
        padded = steps >= ends
        backwards = torch.where(padded, steps, ends - 1 - steps)
        return x, cls(packed, lengths, padded, backwards)

    def reversed(self, x: Tensor) -> Tensor:
        """Return ``[B, T, n]`` with each sequence turned around; padding stays at the end."""
        return x.gather(1, self.backwards.unsqueeze(-1).expand_as(x))

    def last(self, x: Tensor) -> Tensor:
        """Return the last step of each sequence, ``[B, n]``."""
        ends = (self.lengths.to(x.device) - 1).view(-1, 1, 1)
        return x.gather(1, ends.expand(-1, 1, x.shape[-1])).squeeze(1)

    def repacked(self, x: Tensor) -> PackedSequence:
        """Return ``[B, T, n]`` without padding, packed as the input was."""
        order = self.packed.sorted_indices
        lengths = self.lengths
        if order is not None:
            x, lengths = x.index_select(0, order), lengths[order.cpu()]
        data = pack_padded_sequence(x, lengths, batch_first=True).data
        return PackedSequence(data, self.packed.batch_sizes, order, self.packed.unsorted_indices)
