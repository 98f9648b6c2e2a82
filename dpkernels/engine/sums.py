"""The buffers that clipped gradients are added up in, a few parameters to a piece of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels.engine.layers.layer import Layer
from dpkernels.ops.ghost.layer import sum_dtype

# Noise is added to a piece at once: a call for each of 12 tensors of 670,000 elements in all takes
# 1.35 times as long. Larger pieces would be there long before they are filled: full-rank training
# of an MLP 784-512-512-10 takes 1.41 times the memory of plain training with 8 MB, 1.23 with 1 MB.
_PIECE_BYTES = 1 << 20
# So many microbatches are added up in float32, before the sum goes to float64. To go there takes 20
# bytes of traffic for each element, a microbatch of one sample about 20; most steps never do.
_MICROBATCHES = 8


@dataclass(eq=False)
class _Piece:
    """Parameters of one device and dtype that are neighbours in memory."""

    device: torch.device
    dtype: torch.dtype
    parameters: list[nn.Parameter]
    elements: int = 0

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Sums:
    """Sums of one logical step: float32 (float64 for float64 parameters) beside the parameters.

    layers: what owns parameters; each parameter belongs to one, tied ones to their group.

    unit: a power of two; buffers hold sums divided by it.

    Each addition to a float32 buffer rounds by up to 2^-24 of what has been reached, and one sample
    more or less changes how all that follow it round: 20,000 microbatches of one sample moved a sum
    by 1.31 times its bound. So where there are more than 8 microbatches, the sum of every 8 goes to
    a float64 buffer, which is rounded at the end. One of N samples, a microbatch each, then moves
    the sum by N 2^-20 C beyond its bound C at most, were all roundings to conspire; before, by
    N^2 2^-24 C.

    Memory is taken piece by piece as layers are added, while what they were made from is given up,
    and given away with the step, so that nobody who holds a gradient of an earlier step sees it
    change.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)
        self._pieces = _pieces(layers)
        self._piece_of = {p: piece for piece in self._pieces for p in piece.parameters}
        self._flat: dict[_Piece, Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._written: set[Layer] = set()
        self._wide: dict[_Piece, Tensor] = {}
        self._microbatches = 0
        self.unit = 1.0

    @property
    def widest(self) -> torch.dtype:
        """The widest dtype of any sum."""
        wide = any(piece.dtype == torch.float64 for piece in self._pieces)
        return torch.float64 if wide else torch.float32

    def of(self, layer: Layer) -> tuple[list[Tensor], bool]:
        """Return the layer's buffers, and whether they hold something to add to."""
        there = layer in self._written
        self._written.add(layer)
        return [self._view(parameter) for parameter in layer.parameters.values()], there

    def replace(self, replaced: Mapping[Layer, Layer]) -> None:
        """Let others own the parameters of some layers."""
        self._layers = [replaced.get(layer, layer) for layer in self._layers]
        self._written = {replaced.get(layer, layer) for layer in self._written}

    def begin_microbatch(self) -> None:
        """Say that what is added from now on is of another microbatch."""
        if self._microbatches == _MICROBATCHES:
            self._widen()
        self._microbatches += 1

    def _widen(self) -> None:
        """Add what the buffers hold to those in float64; what is added next overwrites it."""
        self._zero_unwritten()
        for piece, flat in self._flat.items():
            if piece in self._wide:
                self._wide[piece] += flat
            else:
                # A copy of float64 sums too: the buffer is written again.
                self._wide[piece] = flat.to(torch.float64, copy=True)
        self._written = set()
        self._microbatches = 0

    def _zero_unwritten(self) -> None:
        """Set to zero what memory was taken for, but nothing added to."""
        for layer in self._layers:
            if layer not in self._written:
                for parameter in layer.parameters.values():
                    if parameter in self._views:
                        self._views[parameter].zero_()

    def raise_unit(self, unit: float) -> None:
        """Divide what is there, and what is added from now on, by ``unit``, or more as it is.

        A power of two changes no digit, only where float32 ends.
        """
        if unit > self.unit:
            for flat in (*self._flat.values(), *self._wide.values()):
                flat *= self.unit / unit
            self.unit = unit

    def release(self) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        """Give the buffers away: flat tensors that hold everything, and each parameter's view.

        Layers that nothing was added to, in a step without samples all of them, are zero.
        """
        for piece in self._pieces:
            if piece not in self._flat:
                self._allocate(piece)
        self._zero_unwritten()
        for piece, wide in self._wide.items():
            self._flat[piece].copy_(wide.add_(self._flat[piece]))
        flat, views = [self._flat[piece] for piece in self._pieces], self._views
        self.discard()
        return flat, views

    def discard(self) -> None:
        """Forget everything that was added."""
        self._flat, self._views, self._written = {}, {}, set()
        self._wide, self._microbatches = {}, 0
        self.unit = 1.0

    def _view(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._views:
            self._allocate(self._piece_of[parameter])
        return self._views[parameter]

    def _allocate(self, piece: _Piece) -> None:
        flat = torch.empty(piece.elements, device=piece.device, dtype=piece.dtype)
        self._flat[piece] = flat
        parts = flat.split([parameter.numel() for parameter in piece.parameters])
        for parameter, part in zip(piece.parameters, parts, strict=True):
            self._views[parameter] = part.view(parameter.shape)


def _pieces(layers: Sequence[Layer]) -> list[_Piece]:
    """Return the parameters in pieces of whole layers, closed when they are large enough."""
    pieces: list[_Piece] = []
    open_pieces: dict[tuple[torch.device, torch.dtype], _Piece] = {}
    for layer in layers:
        for parameter in layer.parameters.values():
            key = parameter.device, sum_dtype(parameter.dtype)
            if key not in open_pieces:
                open_pieces[key] = _Piece(*key, [])
                pieces.append(open_pieces[key])
            piece = open_pieces[key]
            piece.parameters.append(parameter)
            piece.elements += parameter.numel()
        open_pieces = {k: p for k, p in open_pieces.items() if p.nbytes < _PIECE_BYTES}
    return pieces
