"""Modules of the user's with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.broadcast import Shapes, broadcast_forward, find_shapes
from dpkernels.engine.layers.fallback import Fallback
from dpkernels.engine.layers.layer import Layer, Norms, Rows, Unsupported, added_up
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan


class BareLayer(Layer):
    """Direct parameters of any module, by copies for each sample if it takes them, else ``vmap``.

    Which of the two is found out at the first call with inputs of new shapes. Either way one use
    hands over per-sample gradients ``[B, *shape]``, and children have rules of their own.
    """

    rule = "broadcast parameter"

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(name, module, parameters)
        self._fallback = Fallback(self)
        self._shapes: dict[Any, Shapes | None] = {}

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0]
        batch = site.batch if site.batch is not None or not tensors else tensors[0].shape[0]
        inputs = [x for x in tensors if x.shape[0] == batch]
        if batch is None or not inputs:
            raise Unsupported(
                f"{self.describe()}: it is called without an input that has samples as its first "
                f"axis, so that nothing tells the samples' parts in {', '.join(self.parameters)} "
                "apart; use these parameters in the forward() of a module that is given the samples"
            )
        # Sizes of batches come and go; what has rows of its own for two samples has them for more.
        sizes = tuple((x.shape[1:] if x.shape[0] == batch else x.shape, x.dtype) for x in tensors)
        kind = inputs[0].device.type
        key = (sizes, min(batch, 2), torch.is_autocast_enabled(kind), self.module.training)
        if key not in self._shapes:
            self._shapes[key] = find_shapes(self, plain, batch, inputs[0].dim(), args, kwargs)
        shapes = self._shapes[key]
        if shapes is None:
            self.rule = "vmap"
            return self._fallback.forward(site, plain, batch, args, kwargs)
        shapes = tuple((batch, *shape[1:]) for shape in shapes)
        return broadcast_forward(self, site, plain, shapes, args, kwargs)

    def errors(self, captured: Captured) -> Sequence[Tensor]:
        """Return all of them: gradients of each sample."""
        return captured

    def norms(self, captured: Captured, sides: Any) -> Norms:
        """Return norms of the gradients ``[B, *shape]``."""
        # A parameter that is one number has gradients [B].
        return Rows.of([g.unsqueeze(-1) for g in captured])

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return what was captured."""
        return tuple(g.to(sum_dtype(g.dtype)) for g in captured)

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses' gradients added up."""
        return added_up(uses)

    def plan(self, captured: Captured, sides: Any) -> Plan:
        """Return what storing, measuring and adding up the gradients costs."""
        elements = sum(g.numel() for g in captured)
        kept = sum(g.numel() * sum_dtype(g.dtype).itemsize for g in captured)
        total = kept // max(1, captured[0].shape[0])
        if self.rule == "vmap":
            reason = (
                "fallback: the module runs forward and backward once more, each sample alone, and "
                "a gradient for each sample is stored"
            )
            repeated = self._fallback.flops or 0
        else:
            reason = "autograd's gradient of a copy for each sample is stored"
            repeated = 0
        return Plan("stored", repeated + 4 * elements, 2 * kept + total, kept, reason)
