"""Tensors of a model that a forward pass must leave alone: its buffers and parameters.

What a forward pass writes into them depends on its samples and leaves with the model, without
noise: running statistics, the rows that ``nn.Embedding(max_norm=...)`` rescales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpkernels.engine.layers.layer import Unsupported
from dpkernels.engine.sharding import is_sharded

# Tensors, how often each was written to, and where it lies, which ``x.data = y`` changes. Tensors
# themselves, because the id of one that is gone may be another's.
Versions = list[tuple[Tensor, int, int]]


_PIECE = 2**20


class State:
    """The buffers and parameters of a model, and how often each was written to."""

    def __init__(self, model: nn.Module, trained: Iterable[Tensor]) -> None:
        self._owners = list(model.named_modules())
        self._children = [list(module._modules.values()) for _, module in self._owners]
        self._trained = {id(parameter) for parameter in trained}
        self._norms = [x for x in self._owners if isinstance(x[1], _BatchNorm)]
        # FSDP swaps parameters for whole ones in every call.
        self._sharded = any(is_sharded(parameter) for parameter in model.parameters())

    def versions(self) -> Versions:
        """Return what changes if a tensor is written to or replaced; 0.1 us for each."""
        return [(x, x._version, _place(x)) for _, _, x in self._tensors()]

    def _tensors(self) -> Iterator[tuple[tuple[str, nn.Module], str, Tensor]]:
        """Yield the module's name, the module, the attribute's name, and the tensor."""
        for owner in self._owners:
            module = owner[1]
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    yield owner, key, buffer
            if not self._sharded:
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        yield owner, key, parameter

    def _sums(self) -> list[float]:
        """Return a sum of each tensor that changes with its values."""
        return [_weighted_sum(x) for _, _, x in self._tensors()]

    def check_unchanged(self, before: Versions) -> None:
        """Raise Unsupported, with its name, if a tensor is not what it was."""
        now = list(self._tensors())
        for (x, version, place), (owner, key, y) in zip(before, now, strict=False):
            if x is not y or version != y._version or place != _place(y):
                raise _changed(key, *owner)
        if len(now) != len(before):
            owner, key, _ = now[-1] if now else (self._owners[0], "a buffer", None)
            raise _changed(key, *owner)

    def check_structure(self) -> None:
        """Raise Unsupported for modules or trained parameters that came after ``make_private``.

        Nothing would clip their gradients. 0.3 us for each module.
        """
        for (name, module), children in zip(self._owners, self._children, strict=True):
            same = list(module._modules.values()) == children
            if same and not self._sharded:
                same = all(
                    p is None or not p.requires_grad or id(p) in self._trained
                    for p in module._parameters.values()
                )
            if not same:
                raise Unsupported(
                    f"{name or 'the model itself'} ({type(module).__name__}) has a module or a "
                    "trained parameter that it did not have when the model was made private, so "
                    "that its gradient would be neither clipped nor noisy; call detach(), then "
                    "make_private again"
                )

    def check_modes(self) -> None:
        """Raise Unsupported if a BatchNorm would normalise over the batch."""
        for name, module in self._norms:
            if module.training:
                raise Unsupported(
                    f"{name or 'the model itself'} ({type(module).__name__}) is in training mode: "
                    "it normalises over the batch and keeps running averages of it; call eval() on "
                    "it after every model.train(), or replace it: "
                    "dpkernels.batch_norm_to_group_norm(model)"
                )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put buffers that change back, and raise Unsupported for them, and for new ones.

        A parameter that changes is refused, but not put back: copies of all of them would
        take the model's memory once more. Values are compared, too: writes to ``x.data`` count as
        none.
        """
        before, values = self.versions(), self._sums()
        slots = [
            (module._buffers, key, buffer, buffer._version, buffer.clone())
            for _, module in self._owners
            for key, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        try:
            yield
            self.check_unchanged(before)
            for (owner, key, _), now, value in zip(
                self._tensors(), self._sums(), values, strict=True
            ):
                if now != value and now == now:
                    raise _changed(key, *owner)
        finally:
            for buffers, key, buffer, version, value in slots:
                if buffer._version != version or _weighted_sum(buffer) != _weighted_sum(value):
                    with torch.no_grad():
                        buffer.copy_(value)
                buffers[key] = buffer


def _place(x: Tensor) -> int:
    return x.data_ptr() if x.layout is torch.strided else 0


def _weighted_sum(x: Tensor) -> float:
    values = x.detach() if x.layout is torch.strided else x.detach().coalesce().values()
    flat = values.reshape(-1)
    if x.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # In pieces, so that no copy of a large table is made in float64.
    total = 0.0
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].double()
        total += float((piece * torch.arange(1, len(piece) + 1, device=x.device)).sum())
    return total


def _changed(key: str, name: str, module: nn.Module) -> Unsupported:
    return Unsupported(
        f"{key} of {name or 'the model itself'} ({type(module).__name__}): the forward pass writes "
        "to this tensor, a buffer or parameter, so that samples would leave with the model without "
        "noise; keep no running state in a model that is trained privately"
    )
