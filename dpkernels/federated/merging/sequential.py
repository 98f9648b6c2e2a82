"""Sequential networks as chains of layers whose hidden units can be permuted, added and joined.

A unit is a channel of a convolution or an output of a linear layer. What comes between two layers
with weights acts on every unit by itself, so a permutation of the rows of one layer is undone by
that of the columns of the next. A flattened channel is H W columns, and moves as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels.federated.local.chain import sequence

_UNIT_BY_UNIT = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.ELU,
    nn.GELU,
    nn.Identity,
    nn.LeakyReLU,
    nn.MaxPool2d,
    nn.ReLU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Tanh,
)
_LAYERS = (nn.Conv2d, nn.Linear, nn.Flatten, *_UNIT_BY_UNIT)


@dataclass(frozen=True)
class Parameters:
    """The names of one layer's parameters in the state dict (bias None without one), and its shape.

    units, before, positions: what the model has; see ``Incoming``.
    """

    module: str
    weight: str
    bias: str | None
    units: int
    before: int
    positions: int


@dataclass(frozen=True)
class Incoming:
    """What the units of one layer receive, in float64.

    weight: ``[units, units before, positions]``; positions are kh kw of a convolution, H W of the
    linear layer after a flatten, else 1. bias: ``[units]`` or None.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def vectors(self) -> Tensor:
        """One row for each unit, ``[units, units before * positions (+ 1 with a bias)]``."""
        rows = self.weight.flatten(1)
        return rows if self.bias is None else torch.cat([rows, self.bias.unsqueeze(1)], dim=1)

    def of_vectors(self, rows: Tensor) -> Incoming:
        """Return what ``rows`` [units, as ``vectors``] are: the reverse of ``vectors``."""
        bias = None if self.bias is None else rows[:, -1]
        weights = rows if self.bias is None else rows[:, :-1]
        return Incoming(weights.reshape(len(rows), *self.weight.shape[1:]), bias)


def chain_of_units(caller: str, model: nn.Module) -> tuple[Parameters, ...]:
    """Return the layers of ``model`` that have weights, in order.

    Taken is a (nested) ``nn.Sequential`` of Conv2d (one group), Linear, one Flatten between them
    and layers that act on each unit by itself (activations, pools, dropout), with one Linear at
    the end. Raises ValueError, in the name of ``caller``, with what is in the way.
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[Parameters] = []
    images: bool | None = None
    last: nn.Module | None = None
    for module in sequence(model, _LAYERS):
        reason = module if isinstance(module, str) else _in_the_way(module, images)
        if isinstance(module, nn.Conv2d | nn.Linear):
            name = names[module]
            prefix = f"{name}." if name else ""
            bias = None if module.bias is None else f"{prefix}bias"
            units, inputs = module.weight.shape[:2]
            before = found[-1].units if found else inputs
            positions = module.weight[0].numel() // before
            parameters = Parameters(name, f"{prefix}weight", bias, units, before, positions)
            if any(layer.module == name for layer in found):
                reason = reason or f"{name} is used twice"
            found.append(parameters)
            images, last = isinstance(module, nn.Conv2d), module
        elif isinstance(module, nn.Flatten):
            images = False
        if reason is not None:
            raise ValueError(
                f"{caller}: model must be an nn.Sequential of Conv2d, Linear, Flatten, activations "
                f"and pools, whose units can be permuted; {reason}"
            )
    if not isinstance(last, nn.Linear):
        raise ValueError(f"{caller}: model must end with a Linear, got {type(last).__name__}")
    return tuple(found)


def _in_the_way(module: nn.Module, images: bool | None) -> str | None:
    """Return why ``module`` cannot come after ``images`` (None: not known), or None."""
    if isinstance(module, nn.Conv2d):
        if module.groups != 1:
            return f"a Conv2d has {module.groups} groups"
        if images is False:
            return "a Conv2d comes after what is flat"
    if isinstance(module, nn.Linear) and images:
        return "a Linear comes after images that were not flattened"
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return "a Flatten leaves more than one axis"
    return None


def read(
    caller: str, client: int, layers: Sequence[Parameters], state: Mapping[str, Tensor]
) -> list[Incoming]:
    """Return the parameters in ``state``, that of client number ``client``, layer by layer.

    Widths are those of the state, not of the model. Raises ValueError where names are missing or
    unknown, where layers do not fit together, and for numbers that are not finite.
    """
    wanted = {name for layer in layers for name in (layer.weight, layer.bias) if name is not None}
    if state.keys() != wanted:
        raise ValueError(
            f"{caller}: states[{client}] must have the model's parameters; they differ in "
            f"{', '.join(sorted(state.keys() ^ wanted))}"
        )
    found: list[Incoming] = []
    for layer in layers:
        weight = state[layer.weight].detach().double()
        bias = None if layer.bias is None else state[layer.bias].detach().double()
        if not (weight.isfinite().all() and (bias is None or bias.isfinite().all())):
            raise ValueError(
                f"{caller}: states[{client}] has numbers in {layer.module} that are not finite; "
                "leave out a client whose training diverged"
            )
        before = len(found[-1].weight) if found else layer.before
        if weight.ndim < 2 or weight[0].numel() != before * layer.positions:
            raise ValueError(
                f"{caller}: states[{client}][{layer.weight!r}] must take {before} units at "
                f"{layer.positions} positions, got shape {list(weight.shape)}"
            )
        found.append(Incoming(weight.reshape(len(weight), before, layer.positions), bias))
    if len(found[-1].weight) != layers[-1].units:
        raise ValueError(
            f"{caller}: states[{client}] must have the model's {layers[-1].units} outputs, got "
            f"{len(found[-1].weight)}; only numbers of hidden units may differ"
        )
    return found


def resized(
    model: nn.Module, layers: Sequence[Parameters], parts: Sequence[Incoming]
) -> nn.Sequential:
    """Return a copy of ``model`` with the widths and the parameters of ``parts``.

    Names, dtypes and devices stay. The caller's random numbers are not touched.
    """
    found = copy.deepcopy(model)
    for layer, part in zip(layers, parts, strict=True):
        module = found.get_submodule(layer.module)
        assert isinstance(module, nn.Conv2d | nn.Linear)
        units, before, positions = part.weight.shape
        if isinstance(module, nn.Conv2d):
            module.out_channels, module.in_channels = units, before
            shape = (units, before, *module.kernel_size)
        else:
            module.out_features, module.in_features = units, before * positions
            shape = (units, before * positions)
        module.weight = nn.Parameter(part.weight.reshape(shape).to(module.weight))
        if part.bias is not None:
            assert module.bias is not None
            module.bias = nn.Parameter(part.bias.to(module.bias))
    assert isinstance(found, nn.Sequential)
    return found
