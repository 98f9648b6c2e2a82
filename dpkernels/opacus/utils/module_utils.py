"""Questions about modules and their parameters that training scripts ask."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def has_trainable_params(module: nn.Module) -> bool:
    """Return whether a parameter of the module itself, not of its children, is trained."""
    return requires_grad(module)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Return whether a parameter of the module is trained; with ``recurse``, of its children."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of all that have parameters of their own."""
    for name, child in module.named_modules():
        if any(True for _ in child.parameters(recurse=False)):
            yield name, child


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of all that have trained parameters of their own."""
    for name, child in module.named_modules():
        if requires_grad(child):
            yield name, child


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of all that are trained."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def clone_module(module: nn.Module) -> nn.Module:
    """Return a copy that shares no memory with ``module``."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Return the submodule of that name; raise AttributeError if there is none."""
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, Tensor], sd2: Mapping[str, Tensor]) -> bool:
    """Return whether two have the same names, and values that are equal but for rounding."""
    return sd1.keys() == sd2.keys() and all(torch.allclose(x, sd2[name]) for name, x in sd1.items())
