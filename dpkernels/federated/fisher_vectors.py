"""Fisher information as a vector: what a client uploads, and what the server makes of it.

Both sides know the layout from names and shapes of the parameters, which are public.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dpkernels.federated.problem import Layer
from dpkernels.federated.triangles import packed, packed_size, unpacked
from dpkernels.fisher import Diagonal, Fisher, Kronecker

Kind: TypeAlias = Literal["kronecker", "diagonal"]


@dataclass(frozen=True)
class Factored:
    """A module whose weight ``[O, *]``, with or without a bias, has Kronecker factors.

    a, g: sizes of the factors: inputs (and one for the bias), and outputs.
    """

    name: str
    weight: Layer
    bias: Layer | None

    @property
    def a(self) -> int:
        """Size of A."""
        return math.prod(self.weight.shape[1:]) + (self.bias is not None)

    @property
    def g(self) -> int:
        """Size of G."""
        return self.weight.shape[0]


@dataclass(frozen=True)
class Part:
    """Elements of a Fisher's vector that belong together: A or G of a module, or its diagonal.

    module: its name. side: which it is. begin, size: where in the vector. n: of the matrix.
    """

    module: str
    side: Literal["a", "g", "diagonal"]
    begin: int
    size: int
    n: int

    @property
    def slice(self) -> slice:
        """Where it is in the vector."""
        return slice(self.begin, self.begin + self.size)


@dataclass(frozen=True)
class FisherLayout:
    """Which element of the vector is what.

    ``kronecker``: for each module with a ``weight`` of two or more axes the packed triangles of A
    and of G, of the norms of the matrices. Other parameters (norms, biases alone, the packed
    weights of recurrent layers) have nothing in it: the server averages them.
    ``diagonal``: an element for each parameter's, in the order of ``layers``.

    layers: the model's parameters, as ``Problem.layers`` has them.
    """

    kind: Kind
    layers: tuple[Layer, ...]

    @cached_property
    def factored(self) -> tuple[Factored, ...]:
        """The modules that have Kronecker factors; none for ``diagonal``."""
        if self.kind == "diagonal":
            return ()
        own = {layer.name: layer for layer in self.layers}
        return tuple(
            Factored(_module(name), layer, own.get(name.removesuffix("weight") + "bias"))
            for name, layer in own.items()
            if name.rpartition(".")[2] == "weight" and len(layer.shape) > 1
        )

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """A and G of one module after the other, or the diagonals of all modules."""
        return tuple(self._parts())

    def _parts(self) -> Iterator[Part]:
        begin = 0
        for block in self.factored:
            for side, n in (("a", block.a), ("g", block.g)):
                size = packed_size(n)
                yield Part(block.name, "a" if side == "a" else "g", begin, size, n)
                begin += size
        if self.kind == "diagonal":
            for name, layers in groupby(self.layers, lambda layer: _module(layer.name)):
                size = sum(math.prod(layer.shape) for layer in layers)
                yield Part(name, "diagonal", begin, size, size)
                begin += size

    @property
    def size(self) -> int:
        """How many elements the vector has."""
        return sum(part.size for part in self.parts)


def packed_fisher(layout: FisherLayout, fisher: Fisher) -> Tensor:
    """Return the blocks of ``fisher`` that the layout has, ``[size]``; the wider dtype of them.

    Raises ValueError where one of them is missing or of another kind.
    """
    if layout.kind == "diagonal":
        values = {x.parameter: x.values for x in fisher.layers.values() if isinstance(x, Diagonal)}
        for layer in layout.layers:
            if layer.name not in values:
                raise _missing(layer.name, "diagonal", fisher)
        return _joined([values[layer.name].flatten() for layer in layout.layers])
    blocks = {x.weight: x for x in fisher.layers.values() if isinstance(x, Kronecker)}
    found = []
    for block in layout.factored:
        one = blocks.get(block.weight.name)
        if one is None:
            raise _missing(block.weight.name, "Kronecker", fisher)
        if (len(one.a), len(one.g)) != (block.a, block.g):
            raise ValueError(
                f"packed_fisher: factors of {block.name!r} must be of sizes {block.a} and "
                f"{block.g}, got {len(one.a)} and {len(one.g)}"
            )
        found += [packed(one.a[None])[0], packed(one.g[None])[0]]
    return _joined(found)


def unpacked_fisher(layout: FisherLayout, vector: Tensor, records: int = 0) -> Fisher:
    """Return what ``packed_fisher`` made ``vector`` of, ``[size]``; parameters without F in none.

    records: what the Fisher says of how many there were.
    """
    if len(vector) != layout.size:
        raise ValueError(
            f"unpacked_fisher: a vector of {layout.size} elements is wanted, got {len(vector)}"
        )
    if layout.kind == "diagonal":
        pieces = vector.split([math.prod(x.shape) for x in layout.layers])
        return Fisher(
            {
                x.name: Diagonal(x.name, piece.view(x.shape))
                for x, piece in zip(layout.layers, pieces, strict=True)
            },
            {},
            records,
        )
    matrices = {(p.module, p.side): unpacked(vector[p.slice], p.n) for p in layout.parts}
    blocks: dict[str, Kronecker | Diagonal] = {
        block.name: Kronecker(
            block.weight.name,
            None if block.bias is None else block.bias.name,
            matrices[block.name, "a"],
            matrices[block.name, "g"],
        )
        for block in layout.factored
    }
    covered = {name for block in blocks.values() for name in block.parameters}
    without = {x.name: "it has no factors" for x in layout.layers if x.name not in covered}
    return Fisher(blocks, without, records)


def _missing(name: str, kind: str, fisher: Fisher) -> ValueError:
    why = fisher.without.get(name, f"it has no {kind} block")
    return ValueError(
        f"packed_fisher: {name!r} has none of what the server expects ({why}); take the other "
        "fisher, or freeze it"
    )


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(pieces)) if pieces else torch.empty(0)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
