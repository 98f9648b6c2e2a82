"""What an upload is of: names and shapes of parameters, and which of them has what kind of F.

The server knows this beforehand, so that an upload need not carry it; one that is to be read by
anybody does, in a few bytes a name.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dpkernels.federated.merging.packing import Reader, text
from dpkernels.fisher.information import Fisher, Kronecker

Kind = Literal["kronecker", "diagonal"]

_KINDS: tuple[Kind, ...] = ("kronecker", "diagonal")
_NONE = 0xFFFF
_MOST_AXES = 8


@dataclass(frozen=True)
class LayerLayout:
    """One entry of ``Fisher.layers``; a diagonal's parameter is its ``weight``."""

    name: str
    kind: Kind
    weight: str | None
    bias: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a state, and what is kept of F.

    shapes: of every tensor of the state, in its order. layers: in the order of ``Fisher.layers``.
    without: as in ``Fisher``.

    Raises ValueError for an axis of length 0 or of 2^32 and more, more than 8 axes or 65,534
    parameters, layers whose parameters are not in the state, appear twice, or do not belong
    together.
    """

    shapes: Mapping[str, tuple[int, ...]]
    layers: tuple[LayerLayout, ...]
    without: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if max(len(self.shapes), len(self.layers), len(self.without)) >= _NONE:
            raise ValueError(f"layout: must have fewer than {_NONE:,} parameters and layers")
        for name, shape in self.shapes.items():
            if len(shape) > _MOST_AXES or not all(1 <= length < 1 << 32 for length in shape):
                raise ValueError(
                    f"layout: {name} must have at most {_MOST_AXES} axes of length 1 to 2^32 - 1, "
                    f"got {list(shape)}"
                )
        seen: set[str] = set()
        names: set[str] = set()
        for layer in self.layers:
            unknown = [name for name in layer.parameters if name not in self.shapes]
            twice = [name for name in layer.parameters if name in seen]
            if unknown or twice or layer.name in names or not layer.parameters:
                raise ValueError(
                    f"layout: {layer.name} must cover parameters of the state that no other layer "
                    f"covers, got {list(layer.parameters)}"
                )
            seen.update(layer.parameters)
            names.add(layer.name)
            if len(set(layer.parameters)) != len(layer.parameters):
                raise ValueError(f"layout: {layer.name} has {layer.weight} as weight and bias")
            if layer.kind == "kronecker":
                self.factors(layer)
            elif layer.weight is None or layer.bias is not None:
                raise ValueError(f"layout: {layer.name} must have one parameter for its diagonal")

    @classmethod
    def of(cls, state: Mapping[str, Tensor], fisher: Fisher) -> Layout:
        """Return the layout of what a client holds. Raises ValueError as the class does."""
        layers = []
        for name, layer in fisher.layers.items():
            if isinstance(layer, Kronecker):
                layers.append(LayerLayout(name, "kronecker", layer.weight, layer.bias))
            else:
                layers.append(LayerLayout(name, "diagonal", layer.parameter))
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return cls(shapes, tuple(layers), dict(fisher.without))

    @property
    def size(self) -> int:
        """How many values the state has: the paper's d."""
        return sum(map(math.prod, self.shapes.values()))

    def factors(self, layer: LayerLayout) -> tuple[int, int]:
        """Return the sizes of A and G of a Kronecker layer.

        Raises ValueError for a weight of one axis, or a bias of another length than its rows.
        """
        weight = () if layer.weight is None else self.shapes[layer.weight]
        bias = () if layer.bias is None else self.shapes[layer.bias]
        rows = weight[0] if weight else math.prod(bias)
        if (layer.weight is not None and len(weight) < 2) or (
            layer.bias is not None and bias != (rows,)
        ):
            raise ValueError(
                f"layout: {layer.name} must have a weight [O, ...] and a bias [O], got "
                f"{list(weight)} and {list(bias)}"
            )
        columns = math.prod(weight[1:]) if weight else 0
        return columns + (layer.bias is not None), rows

    def encode(self) -> bytes:
        """Return it in a few bytes a name."""
        places = {name: place for place, name in enumerate(self.shapes)}
        parts = [struct.pack("<HHH", len(self.shapes), len(self.layers), len(self.without))]
        for name, shape in self.shapes.items():
            parts += [text(name), struct.pack(f"<B{len(shape)}I", len(shape), *shape)]
        for layer in self.layers:
            ends = [_NONE if end is None else places[end] for end in (layer.weight, layer.bias)]
            parts += [text(layer.name), struct.pack("<BHH", _KINDS.index(layer.kind), *ends)]
        for name, reason in self.without.items():
            parts += [text(name), text(reason)]
        return b"".join(parts)

    @classmethod
    def decode(cls, reader: Reader) -> Layout:
        """Return what ``encode`` wrote. Raises ValueError for anything else."""
        parameters, layers, without = reader.unpack("<HHH")
        shapes: dict[str, tuple[int, ...]] = {}
        for _ in range(parameters):
            name = reader.text()
            (axes,) = reader.unpack("<B")
            if name in shapes:
                raise ValueError(f"layout: {name!r} is there twice")
            shapes[name] = reader.unpack(f"<{axes}I")
        names = list(shapes)
        found = []
        for _ in range(layers):
            name = reader.text()
            kind, weight, bias = reader.unpack("<BHH")
            if kind >= len(_KINDS) or any(
                place != _NONE and place >= parameters for place in (weight, bias)
            ):
                raise ValueError(f"layout: {name!r} is of an unknown kind or parameter")
            named = [None if end == _NONE else names[end] for end in (weight, bias)]
            found.append(LayerLayout(name, _KINDS[kind], *named))
        reasons = [(reader.text(), reader.text()) for _ in range(without)]
        return cls(shapes, tuple(found), dict(reasons))

    def digest(self) -> bytes:
        """Return 8 bytes that tell it from another by accident, for who has it beforehand."""
        return hashlib.sha256(self.encode()).digest()[:8]
