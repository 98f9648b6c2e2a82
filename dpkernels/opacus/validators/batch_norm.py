"""BatchNorm: each sample's output depends on the others, so it is replaced, unless it is frozen.

Frozen and in evaluation mode it scales and shifts by constants, and mixes nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpkernels.engine import batch_norm_to_group_norm
from dpkernels.opacus.validators.errors import (
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedModuleError,
)
from dpkernels.opacus.validators.utils import register_module_fixer, register_module_validator

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}


def is_constant(module: _BatchNorm) -> bool:
    """Return whether a BatchNorm is frozen, in evaluation mode, and has running averages."""
    trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return not (trained or module.training) and module.running_mean is not None


@register_module_validator(_KINDS)
def validate(module: _BatchNorm) -> list[UnsupportedModuleError]:
    """Return that it must be replaced, unless it is constant."""
    if is_constant(module):
        return []
    return [
        ShouldReplaceModuleError(
            f"{module} normalises over the batch, so that one sample's gradient depends on the "
            "others; ModuleValidator.fix(model) replaces it by GroupNorm, and one that is frozen "
            "(requires_grad_(False)) and in evaluation mode (eval()) may stay"
        )
    ]


@register_module_fixer(_KINDS)
def fix(
    module: _BatchNorm, *, num_groups: int | None = None, replace_bn_with_in: bool = False, **_: Any
) -> nn.Module:
    """Return a GroupNorm, or an InstanceNorm, of as many channels; a constant one as it is.

    num_groups: it must divide the channels; by default the greatest common divisor with 32.
    """
    if is_constant(module):
        return module
    if replace_bn_with_in:
        if num_groups is not None:
            raise ValueError(
                "fix: num_groups is for GroupNorm and replace_bn_with_in for InstanceNorm; pass "
                "one of them"
            )
        if type(module) not in _INSTANCE_NORMS:
            raise UnsupportableModuleError(
                f"fix: there is no InstanceNorm for {type(module).__name__}; leave out "
                "replace_bn_with_in"
            )
        return _INSTANCE_NORMS[type(module)](module.num_features)
    if num_groups is None:
        return batch_norm_to_group_norm(module)
    if num_groups < 1 or module.num_features % num_groups:
        raise ValueError(
            f"fix: num_groups must divide the {module.num_features} channels of {module}, got "
            f"{num_groups}"
        )
    return batch_norm_to_group_norm(module, num_groups)
