"""``make_functional``, which training scripts import from here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def make_functional(
    mod: nn.Module, disable_autograd_tracking: bool = False
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return ``mod`` as a function of its parameters' values, and the values.

    disable_autograd_tracking: detach the values.
    """
    names = [name for name, _ in mod.named_parameters()]
    skeleton = copy.deepcopy(mod).to("meta")

    def call(values: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(skeleton, parameters, args, kwargs)

    values: tuple[Tensor, ...] = tuple(mod.parameters())
    if disable_autograd_tracking:
        values = tuple(value.detach() for value in values)
    return call, values
