"""Layers whose input has no axis of samples, served by a module around them that has one.

A table of relative positions is looked up once for all samples, and a weight may be used by
another module than its own. Then nothing at the layer tells samples apart. The nearest module that
is given samples, and returns them, runs once more for each sample alone, with the layer's
parameters as the arguments; its other layers keep their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.fallback import Fallback
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.slots import Slots
from dpkernels.engine.layers.stored import StoredLayer

if TYPE_CHECKING:
    from dpkernels.engine.capture import Capture


class LiftedLayer(StoredLayer):
    """A layer of a ``Lift``: the same name and parameters as the layer that it takes the place of.

    around: the module that is repeated for it, for messages.
    """

    rule = "lifted"

    def __init__(self, layer: Layer, around: str) -> None:
        super().__init__(layer.name, layer.module, layer.parameters)
        self._around = around
        self.slots = Slots.of(layer.module, self.parameters)
        self.fallback: Fallback | None = None

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the layer's output as it is: the module around it delivers."""
        return plain(*args, **kwargs)

    def cost(self) -> tuple[int, str]:
        """Return flops of the repeated module, and which it is."""
        flops, how = (0, "not seen yet") if self.fallback is None else self.fallback.cost()
        return flops, f"served by {self._around}; {how}"


class Lift:
    """A module that delivers for layers inside of it.

    name, module: the module that is repeated. layers: those that it serves, which compute plainly
    from now on. replaced: what delivers in their place.
    """

    def __init__(self, name: str, module: nn.Module, layers: Sequence[Layer]) -> None:
        described = f"{name or 'the model itself'} ({type(module).__name__})"
        self.module = module
        self.replaced: dict[Layer, Layer] = {x: LiftedLayer(x, described) for x in layers}
        self.layers = [x for x in self.replaced.values() if isinstance(x, LiftedLayer)]
        inside = ", ".join(layer.describe() for layer in layers)
        self._fallback = Fallback(
            f"{described}, repeated for {inside}",
            module,
            Slots.joined(layer.slots for layer in self.layers),
        )
        for lifted in self.layers:
            lifted.fallback = self._fallback
        for layer in layers:
            layer.lifted = True

    def forward(
        self,
        capture: Capture,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute the module's output, whose backward pass delivers for every layer inside."""
        sites = [capture.site(layer) for layer in self.layers]
        batch = sites[0].batch
        if batch is None:
            return plain(*args, **kwargs)

        def deliver(*gradients: Tensor) -> None:
            first = 0
            for site in sites:
                last = first + len(site.layer.parameters)
                site.deliver(*gradients[first:last])
                first = last

        return self._fallback.forward(sites[0], deliver, plain, batch, args, kwargs)
