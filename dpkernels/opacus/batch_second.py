"""``batch_first=False``: models whose inputs are ``[T, B, ...]``, samples on the second axis.

The engine takes the first axis of every layer for samples. So the model is called through a shell
that is given samples first. Layers that work on each position alone are given samples first, too:
axes are swapped before them and swapped back after them. What the model computes is the same.
Recurrent layers and attention have a ``batch_first`` of their own, which they follow.

Which axis holds samples is a matter of how many axes there are, never of their lengths: the second
of the model's inputs from 2 axes on, of token indices likewise, and of features and of the model's
outputs from 3 axes on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from dpkernels.engine.in_place import InPlace

_BY_POSITION = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
_OWN_FLAG = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


class BatchSecond:
    """A model with samples on the second axis, for an engine that wants them on the first.

    shell: what the engine is given. ``begin()`` comes after it was attached, ``end()`` before that
    is undone.

    Raises ValueError for trained layers whose samples could not be told from their positions.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = _layers_by_position(model)
        self._handles: list[RemovableHandle] = []
        self._in_place: InPlace | None = None
        self._routed: Any = None  # what the engine has put in place of the model's own forward pass
        self.shell = _Shell(model)

    def begin(self) -> None:
        """Let calls of the model go through the shell."""
        model, shell = self._model, self.shell
        for layer in self._layers:
            if layer is not model:
                self._handles += [
                    layer.register_forward_pre_hook(_swap_given, with_kwargs=True),
                    layer.register_forward_hook(_swap_result, prepend=True),
                ]
        self._routed = vars(model).get("forward")
        if self._routed is not None:
            shell.own = self._routed

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _swapped((args, kwargs), 2)
            return _swapped(shell(*args, **kwargs), 3)

        self._in_place = model.forward = InPlace(model, call)

    def end(self) -> None:
        """Give the model its own calls back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if vars(self._model).get("forward") is not self._in_place:
            return
        del self._model.forward
        if self._routed is not None:
            self._model.forward, self._routed = self._routed, None


class _Shell(nn.Module):
    """The model with samples as the first axis of its inputs and outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.own: Callable[..., Any] = MethodType(type(model).forward, model)
        self.is_layer = isinstance(model, _BY_POSITION)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as it wants to be called; a single layer takes samples first."""
        if self.is_layer:
            return self.own(*args, **kwargs)
        args, kwargs = _swapped((args, kwargs), 2)
        return _swapped(self.own(*args, **kwargs), 3)


def _layers_by_position(model: nn.Module) -> list[nn.Module]:
    """Return the trained layers that work on each position alone."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "make_private: batch_first=False is for one process; transpose the inputs, and pass "
            "batch_first=True"
        )
    layers: list[nn.Module] = []
    inside_attention = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }
    for name, module in model.named_modules():
        if id(module) in inside_attention or isinstance(module, _OWN_FLAG):
            continue
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        if not isinstance(module, _BY_POSITION):
            raise ValueError(
                f"make_private: batch_first=False is for Linear, Embedding, LayerNorm, RMSNorm, "
                f"attention and recurrent layers, got {name or 'the model itself'} "
                f"({type(module).__name__}); transpose the inputs, and pass batch_first=True"
            )
        layers.append(module)
    return layers


def _swap_given(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    least = 2 if isinstance(module, nn.Embedding) else _least_axes(module)
    swapped: tuple[tuple[Any, ...], dict[str, Any]] = _swapped((args, kwargs), least)
    return swapped


def _swap_result(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    swapped: Tensor = _swapped(output, _least_axes(module))
    return swapped


def _least_axes(module: nn.Module) -> int:
    """Return from how many axes of features on the second one holds samples."""
    return 2 + len(getattr(module, "normalized_shape", (1,)))


def _swapped(tree: Any, least: int) -> Any:
    """Return ``tree`` with the first two axes of tensors of at least so many axes swapped."""
    return tree_map(
        lambda x: x.transpose(0, 1) if isinstance(x, torch.Tensor) and x.dim() >= least else x,
        tree,
    )
