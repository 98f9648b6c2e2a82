"""The buffers that clipped gradients are added up in, one piece of memory for all parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpkernels.engine.layers.layer import Layer
from dpkernels.ops.ghost.layer import sum_dtype


class Sums:
    """Sums of one logical step: float32 (float64 for float64 parameters) beside the parameters.

    parameters: all of them. layers: what owns them; each belongs to one, tied ones to their group.
    Memory is taken when the first layer is added and given away with the step. It serves again once
    nobody holds a gradient of that step any more, so that nobody sees one change: new pages for 3
    million parameters cost 5% of a step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[Layer]) -> None:
        self._parameters = list(parameters)
        self._layers = list(layers)
        self._groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in self._parameters:
            key = parameter.device, sum_dtype(parameter.dtype)
            self._groups.setdefault(key, []).append(parameter)
        self._flat: list[Tensor] = []
        self._given: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._of_layer: dict[Layer, list[Tensor]] = {}
        self._written: set[Layer] = set()

    @property
    def widest(self) -> torch.dtype:
        """The widest dtype of any sum."""
        wide = any(dtype == torch.float64 for _, dtype in self._groups)
        return torch.float64 if wide else torch.float32

    def of(self, layer: Layer) -> tuple[list[Tensor], bool]:
        """Return the layer's buffers, and whether they hold something to add to."""
        if not self._flat:
            self._allocate()
        there = layer in self._written
        self._written.add(layer)
        return self._of_layer[layer], there

    def release(self) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        """Give the buffers away: one flat tensor a device and dtype, and each parameter's view.

        Layers that nothing was added to, in a step without samples all of them, are zero.
        """
        if not self._flat:
            self._allocate()
        for layer, buffers in self._of_layer.items():
            if layer not in self._written:
                for buffer in buffers:
                    buffer.zero_()
        flat, views = self._flat, self._views
        self._given = dict(zip(self._groups, flat, strict=True))
        self.discard()
        return flat, views

    def discard(self) -> None:
        """Forget everything that was added."""
        self._flat, self._views, self._of_layer, self._written = [], {}, {}, set()

    def _allocate(self) -> None:
        for key, parameters in self._groups.items():
            sizes = [parameter.numel() for parameter in parameters]
            flat = self._given.pop(key, None)
            if flat is None or not _is_ours_alone(flat):
                flat = torch.empty(sum(sizes), device=key[0], dtype=key[1])
            self._flat.append(flat)
            for parameter, part in zip(parameters, flat.split(sizes), strict=True):
                self._views[parameter] = part.view(parameter.shape)
        for layer in self._layers:
            self._of_layer[layer] = [self._views[p] for p in layer.parameters.values()]


def _is_ours_alone(flat: Tensor) -> bool:
    """Return whether no other tensor shares the memory; False where torch cannot say."""
    users = getattr(torch._C, "_storage_Use_Count", None)
    # The tensor, and the storage object that is asked.
    return users is not None and users(flat.untyped_storage()._cdata) == 2
