"""InstanceNorm with running averages: they would leave with the model, without noise."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from dpkernels.opacus.utils.module_utils import clone_module
from dpkernels.opacus.validators.errors import (
    IllegalModuleConfigurationError,
    UnsupportedModuleError,
)
from dpkernels.opacus.validators.utils import register_module_fixer, register_module_validator

_KINDS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@register_module_validator(_KINDS)
def validate(module: _InstanceNorm) -> list[UnsupportedModuleError]:
    """Return that running averages are not private, if there are any."""
    if not module.track_running_stats:
        return []
    return [
        IllegalModuleConfigurationError(
            f"{module} keeps running averages of the data, which would leave with the model "
            "without noise; build it with track_running_stats=False, or call ModuleValidator.fix"
        )
    ]


@register_module_fixer(_KINDS)
def fix(module: _InstanceNorm, **_: Any) -> nn.Module:
    """Return a copy without running averages; a module that has none as it is."""
    if not module.track_running_stats:
        return module
    new: _InstanceNorm = clone_module(module)  # type: ignore[assignment]
    new.track_running_stats = False
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, None)
    return new
