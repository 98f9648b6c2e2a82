"""Embeddings with a forward pass of their own around ``nn.Embedding``'s: scaled ones, mostly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.embedding import EmbeddingLayer


def wraps_embedding(module: nn.Module) -> bool:
    """Return whether the module takes indices alone and calls ``nn.Embedding``'s forward pass.

    BART and Gemma of transformers multiply what is looked up by a constant like that.
    """
    own = type(module).forward
    if not isinstance(module, nn.Embedding) or own is nn.Embedding.forward:
        return False
    code = getattr(own, "__code__", None)
    if code is None or len(inspect.signature(own).parameters) != 2:
        return False
    return {"super", "forward"} <= set(code.co_names)


class _LookUps(TorchFunctionMode):
    """Sends look-ups in one table through a function."""

    def __init__(self, weight: Tensor, look_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._weight, self._look_up = weight, look_up

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``, or the look-up in its place."""
        if func is functional.embedding and len(args) > 1 and args[1] is self._weight:
            return self._look_up(args[0])
        return func(*args, **(kwargs or {}))


class WrappedEmbeddingLayer(EmbeddingLayer):
    """The look-up inside is the layer; what the module does with the result is plain autograd.

    If the module uses its table in another way as well, autograd has a gradient for it, which is
    refused in the backward pass.
    """

    rule = "embedding"

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output."""
        look_up = super().forward

        def captured(indices: Tensor) -> Tensor:
            return look_up(site, plain, indices)

        with _LookUps(self.module.weight, captured):
            return plain(*args, **kwargs)
