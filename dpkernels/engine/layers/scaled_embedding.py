"""Embeddings with a forward pass of their own around ``nn.Embedding``'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.embedding import EmbeddingLayer, captured_embedding


def wraps_embedding(module: nn.Module) -> bool:
    """Return whether the module calls ``nn.Embedding``'s forward pass, in one of its own.

    In transformers, BART and Gemma multiply what is looked up by a constant, and OPT looks up
    positions that it makes of its arguments.
    """
    own = type(module).forward
    if not isinstance(module, nn.Embedding) or own is nn.Embedding.forward:
        return False
    code = getattr(own, "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)


class LookUps(TorchFunctionMode):
    """Sends look-ups in some tables through a function of indices and table."""

    def __init__(
        self, weights: Iterable[Tensor], look_up: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._weights, self._look_up = list(weights), look_up

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``, or the look-up in its place."""
        if func is functional.embedding and any(args[1] is weight for weight in self._weights):
            return self._look_up(args[0], args[1])
        return func(*args, **(kwargs or {}))


class WrappedEmbeddingLayer(EmbeddingLayer):
    """The look-up inside is the layer; what the module does with the result is plain autograd.

    If the module uses its table in another way as well, autograd has a gradient for it, which is
    refused in the backward pass.

    positions: whether indices are shared by all samples, ``[T]`` or ``[1, T]``, so that they are
    looked up for each sample. ``Lifting`` finds that out.
    """

    rule = "embedding"
    positions = False

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output."""

        def captured(indices: Tensor, weight: Tensor) -> Tensor:
            if self.positions and site.batch is not None:
                indices = for_each_sample(indices, site.batch)
            return captured_embedding(indices, weight, site)

        with LookUps([self.module.weight], captured):
            return plain(*args, **kwargs)

    def note_input(self, shape: Sequence[int], shared: bool, batch: int) -> None:
        """Learn nothing: arguments of the module need not be indices."""


def for_each_sample(indices: Tensor, batch: int) -> Tensor:
    """Return indices ``[T]`` or ``[1, ...]`` as ``[batch, ...]``."""
    shape = indices.shape if indices.dim() == 1 else indices.shape[1:]
    return indices.expand(batch, *shape)
