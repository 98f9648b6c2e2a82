"""Modules that cannot be trained privately, replaced by ones that can."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_GROUPS = 32  # Wu and He 2018, section 4.1


def batch_norm_to_group_norm(model: nn.Module, groups: int = _GROUPS) -> nn.Module:
    """Return ``model`` with every BatchNorm replaced, in place, by a GroupNorm.

    groups: at most so many; of a layer with C channels, the greatest common divisor of both is
        taken. Scale and shift are kept, so that trained ones are a start.

    A BatchNorm that is the model itself is returned as a new module. Call it before the optimizer
    is built: parameters are new.
    """
    if groups < 1:
        raise ValueError(f"batch_norm_to_group_norm: groups must be >= 1, got {groups}")
    if isinstance(model, _BatchNorm):
        return _group_norm(model, groups)
    for name, child in model.named_children():
        setattr(model, name, batch_norm_to_group_norm(child, groups))
    return model


def _group_norm(module: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = module.num_features
    new = nn.GroupNorm(math.gcd(channels, groups), channels, eps=module.eps, affine=module.affine)
    if module.affine:
        with torch.no_grad():
            new.weight.copy_(module.weight)
            new.bias.copy_(module.bias)
        new = new.to(module.weight.device, module.weight.dtype)
        new.weight.requires_grad_(module.weight.requires_grad)
        new.bias.requires_grad_(module.bias.requires_grad)
    return new.train(module.training)
