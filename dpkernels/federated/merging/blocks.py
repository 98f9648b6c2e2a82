"""Which parameters have an F, client by client the same, and how they make up a block of weights.

A block is what F acts on: a matrix X ``[O, I]`` for K-FAC, with the bias as its last column, or one
parameter in its own shape for a diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.merging.states import State
from dpkernels.fisher import Diagonal, Fisher, Kronecker


@dataclass(frozen=True)
class Block:
    """Parameters that F ties together: ``(weight, bias)``, either None, or one of a diagonal.

    shape: of the block.
    """

    weight: str | None
    bias: str | None
    kronecker: bool
    shape: tuple[int, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def join(self, state: State) -> Tensor:
        """Return the block's weights out of a state, a new tensor or a view."""
        if not self.kronecker:
            return state[self.parameters[0]].detach()
        columns = []
        if self.weight is not None:
            columns.append(state[self.weight].detach().reshape(self.shape[0], -1))
        if self.bias is not None:
            columns.append(state[self.bias].detach().reshape(-1, 1))
        return torch.cat(columns, 1) if len(columns) > 1 else columns[0]

    def add_to(self, state: dict[str, Tensor], moved: Tensor) -> None:
        """Add what a block moved by, of ``shape``, to its parameters in ``state``: new tensors."""
        parts = [moved] if len(self.parameters) == 1 else [moved[:, :-1], moved[:, -1]]
        for name, part in zip(self.parameters, parts, strict=True):
            state[name] = state[name] + part.reshape(state[name].shape)


Factors = Kronecker | Diagonal


def blocks_of(
    states: Sequence[State], fishers: Sequence[Fisher], clients: Sequence[int]
) -> tuple[list[Block], list[list[Factors]]]:
    """Return the blocks, those of K-FAC first, and for each of them the clients' factors.

    clients: their numbers, for messages.

    Raises ValueError where clients differ in what has an F or of which kind, where a parameter is
    not in the states, has two, or is of integers, and for a factor of another shape, dtype, device,
    or one that is not finite.
    """
    pairs = zip(fishers, clients, strict=True)
    ordered = [_by_parameters(fisher, client) for fisher, client in pairs]
    first = ordered[0]
    for client, layers in zip(clients[1:], ordered[1:], strict=True):
        _check_same(first, layers, clients[0], client)
    names = sorted(first, key=lambda parameters: isinstance(first[parameters], Diagonal))
    blocks = [_block(states[0], first[parameters], clients[0]) for parameters in names]
    factors = [[layers[parameters] for layers in ordered] for parameters in names]
    for block, found in zip(blocks, factors, strict=True):
        for client, layer in zip(clients, found, strict=True):
            _check_factors(block, layer, client, states[0])
    return blocks, factors


def _by_parameters(fisher: Fisher, client: int) -> dict[tuple[str, ...], Factors]:
    """Return the layers by what they cover: layers' own names need not agree."""
    found: dict[tuple[str, ...], Factors] = {}
    seen: set[str] = set()
    for name, layer in fisher.layers.items():
        if not layer.parameters or seen.intersection(layer.parameters):
            raise ValueError(
                f"merge: layer {name!r} of fishers[{client}] must cover parameters of its own, got "
                f"{list(layer.parameters)}"
            )
        seen.update(layer.parameters)
        found[layer.parameters] = layer
    return found


def _check_same(
    first: Mapping[tuple[str, ...], Factors],
    other: Mapping[tuple[str, ...], Factors],
    client: int,
    other_client: int,
) -> None:
    kinds, other_kinds = _kinds(first), _kinds(other)
    for name in [*kinds, *other_kinds]:
        one, another = kinds.get(name, "no F"), other_kinds.get(name, "no F")
        if one != another:
            raise ValueError(
                f"merge: every client must have an F of the same kind for {name!r}, got {one} in "
                f"fishers[{client}] and {another} in fishers[{other_client}]; take it out of all "
                "of them, and it is averaged"
            )


def _kinds(layers: Mapping[tuple[str, ...], Factors]) -> dict[str, str]:
    return {
        name: f"{type(layer).__name__} of {', '.join(parameters)}"
        for parameters, layer in layers.items()
        for name in parameters
    }


def _block(state: State, layer: Factors, client: int) -> Block:
    for name in layer.parameters:
        if name not in state:
            raise ValueError(f"merge: fishers[{client}] has an F of {name!r}, but no state has it")
        if not state[name].is_floating_point():
            raise ValueError(
                f"merge: {name!r} has an F and must be of floating point, got {state[name].dtype}"
            )
    if isinstance(layer, Diagonal):
        return Block(layer.parameter, None, False, tuple(state[layer.parameter].shape))
    rows = [state[name].shape[0] if state[name].dim() else 1 for name in layer.parameters]
    if len(set(rows)) != 1 or rows[0] < 1:
        raise ValueError(
            f"merge: {' and '.join(layer.parameters)} must have as many rows, got {rows}"
        )
    columns = sum(state[name].numel() // rows[0] for name in layer.parameters)
    return Block(layer.weight, layer.bias, True, (rows[0], columns))


def _check_factors(block: Block, layer: Factors, client: int, state: State) -> None:
    if isinstance(layer, Diagonal):
        wanted = {"values": (layer.values, block.shape)}
    else:
        rows, columns = block.shape
        wanted = {"g": (layer.g, (rows, rows)), "a": (layer.a, (columns, columns))}
    device = state[block.parameters[0]].device
    for name, (tensor, shape) in wanted.items():
        what = f"merge: {name} of {' and '.join(block.parameters)} in fishers[{client}]"
        if tuple(tensor.shape) != tuple(shape) or tensor.device != device:
            raise ValueError(
                f"{what} must be {list(shape)} on {device}, got {list(tensor.shape)} on "
                f"{tensor.device}"
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ValueError(f"{what} must be finite numbers of floating point")
    if isinstance(layer, Diagonal) and bool((layer.values < 0).any()):
        raise ValueError(
            f"merge: values of {layer.parameter} in fishers[{client}] must be >= 0, got "
            f"{float(layer.values.min()):g}"
        )
