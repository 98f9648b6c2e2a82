"""Modules of the user's with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.broadcast import Shapes, broadcast_forward, find_shapes
from dpkernels.engine.layers.fallback import Fallback
from dpkernels.engine.layers.layer import Unsupported
from dpkernels.engine.layers.slots import Slots
from dpkernels.engine.layers.stored import StoredLayer


class BareLayer(StoredLayer):
    """Direct parameters of any module, by copies for each sample if it takes them, else repeated.

    Which of the two is found out at the first call with inputs of new shapes. Either way one use
    hands over per-sample gradients ``[B, *shape]``, and children have rules of their own.

    parameters: by dotted path: those in a ``ParameterDict`` of the module are its own, too.
    """

    rule = "broadcast parameter"

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(name, module, parameters)
        self.slots = Slots.of(module, self.parameters)
        self._fallback = Fallback(self.describe(), module, self.slots)
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
        # Whichever rule serves this call: another batch may be as long as a mask by chance.
        self._fallback.note_common(tree_leaves((args, kwargs)), batch)
        # Sizes of batches come and go; what has rows of its own for two samples has them for more.
        sizes = tuple((x.shape[1:] if x.shape[0] == batch else x.shape, x.dtype) for x in tensors)
        kind = inputs[0].device.type
        key = (sizes, min(batch, 2), torch.is_autocast_enabled(kind), self.module.training)
        if key not in self._shapes:
            self._shapes[key] = find_shapes(self, plain, batch, inputs[0].dim(), args, kwargs)
        shapes = self._shapes[key]
        if shapes is None:
            self.rule = "vmap"
            return self._fallback.forward(site, site.deliver, plain, batch, args, kwargs)
        shapes = tuple((batch, *shape[1:]) for shape in shapes)
        return broadcast_forward(self, site, plain, shapes, args, kwargs)

    def cost(self) -> tuple[int, str]:
        """Return flops of the repeated pass, and how the gradients come about."""
        if self.rule == "vmap":
            return self._fallback.cost()
        return 0, "autograd's gradient of a copy for each sample is stored"
