"""Models that are chains of linear layers: what they are made of, or why they are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True)
class Elementwise:
    """ReLU, tanh or dropout. rate: of a dropout layer; 0 while the model evaluates."""

    kind: Literal["relu", "tanh", "dropout"]
    rate: float = 0.0


@dataclass(frozen=True)
class Block:
    """A linear layer and what is applied to its inputs.

    weight, bias: where they begin in the vector of all parameters; bias None without one.
    """

    before: tuple[Elementwise, ...]
    inputs: int
    outputs: int
    weight: int
    bias: int | None


Chain = tuple[Block, ...]

LINEAR_LAYERS = (nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Dropout, nn.Identity)


def chain_of(model: nn.Module, record: tuple[int, ...]) -> Chain | str:
    """Return the blocks of ``model``, or what makes it another kind of model.

    record: the shape of one record. A chain is a (nested) ``nn.Sequential`` of Flatten, Linear,
    ReLU, Tanh, Dropout and Identity that ends with a Linear, every parameter trained and used once.
    """
    begins: dict[Tensor, int] = {}
    begin = 0
    for p in model.parameters():
        if not p.requires_grad:
            return "it has parameters that are not trained"
        begins[p], begin = begin, begin + p.numel()
    blocks: list[Block] = []
    before: list[Elementwise] = []
    flat = len(record) == 1
    used: set[nn.Module] = set()
    for module in sequence(model, LINEAR_LAYERS):
        if isinstance(module, str):
            return module
        if type(module) is nn.Linear:
            if not flat:
                return "its first Linear takes records that are not flat"
            if module in used:
                return "a Linear is used twice"
            used.add(module)
            bias = None if module.bias is None else begins[module.bias]
            shape = module.in_features, module.out_features
            blocks.append(Block(tuple(before), *shape, begins[module.weight], bias))
            before = []
        elif type(module) is nn.Flatten:
            if (module.start_dim, module.end_dim) != (1, -1):
                return "a Flatten leaves more than one axis"
            flat = True
        elif type(module) is nn.Dropout:
            if module.training and module.p:
                before.append(Elementwise("dropout", float(module.p)))
        elif type(module) is not nn.Identity:
            before.append(Elementwise("relu" if type(module) is nn.ReLU else "tanh"))
    if not blocks or before:
        return "it does not end with a Linear"
    return tuple(blocks)


def sequence(model: nn.Module, allowed: tuple[type[nn.Module], ...]) -> Iterator[nn.Module | str]:
    """Yield the layers of nested ``nn.Sequential`` in order, or why that is not all there is."""
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks:
        yield f"{type(model).__name__} has hooks"
    elif type(model) is nn.Sequential:
        for child in model:
            yield from sequence(child, allowed)
    elif type(model) in allowed:
        yield model
    else:
        yield f"{type(model).__name__} is no layer of a chain"
