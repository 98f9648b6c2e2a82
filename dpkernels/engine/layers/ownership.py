"""Which module's rule serves a parameter that modules do not use where they keep it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.utils import parametrize

from dpkernels.engine.layers.bare import BareLayer
from dpkernels.engine.layers.layer import Layer

_CONTAINERS = (nn.ParameterDict, nn.ParameterList)


def is_container(module: nn.Module) -> bool:
    """Return whether the module only keeps parameters, for the module around it.

    So does that of ``torch.nn.utils.parametrize``, whose module computes a weight from them.
    """
    if isinstance(module, parametrize.ParametrizationList):
        return True
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def contained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield trained parameters in containers that are attributes of ``module``, by dotted path.

    Adapters of PEFT keep theirs like that: ``ia3_l.default``. A module that has no forward pass, or
    only calls its children, uses none.
    """
    if isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward:
        return
    children = dict(module.named_children())
    if parametrize.is_parametrized(module):
        kept = children.pop("parametrizations")
        children |= {f"parametrizations.{name}": child for name, child in kept.named_children()}
    for name, child in children.items():
        if is_container(child):
            for path, parameter in child.named_parameters(name):
                if parameter.requires_grad:
                    yield path, parameter


def without_aliases(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers without parameters that a module keeps, but a layer inside of it uses.

    The head of BERT keeps the bias of its decoder, a linear layer, under a name of its own. If the
    module uses it itself as well, autograd has a gradient for it, which is refused in the backward
    pass.
    """
    layers = list(layers)
    used = {
        parameter
        for layer in layers
        if not isinstance(layer, BareLayer)
        for part in layer.sublayers or (layer,)
        for parameter in part.parameters.values()
    }
    kept: list[Layer] = []
    for layer in layers:
        if isinstance(layer, BareLayer) and used.intersection(layer.parameters.values()):
            inside = {p for child in layer.module.children() for p in child.parameters()}
            own = {
                name: parameter
                for name, parameter in layer.parameters.items()
                if parameter not in used or parameter not in inside
            }
            if not own:
                continue
            layer = BareLayer(layer.name, layer.module, own)
        kept.append(layer)
    return kept
