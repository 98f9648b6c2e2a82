"""Registration of validators and fixers; the name of this module is Opacus'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from dpkernels.opacus.validators.module_validator import Fixer, ModuleValidator, Validator

Kinds = type[nn.Module] | Sequence[type[nn.Module]]


def register_module_validator(
    target_class_or_classes: Kinds, validator_class: type[ModuleValidator] = ModuleValidator
) -> Callable[[Validator], Validator]:
    """Have the decorated function check modules of just these classes; it returns errors."""

    def register(function: Validator) -> Validator:
        validator_class.VALIDATORS.update(dict.fromkeys(_kinds(target_class_or_classes), function))
        return function

    return register


def register_module_fixer(
    target_class_or_classes: Kinds, validator_class: type[ModuleValidator] = ModuleValidator
) -> Callable[[Fixer], Fixer]:
    """Have the decorated function replace modules of just these classes; it returns a module."""

    def register(function: Fixer) -> Fixer:
        validator_class.FIXERS.update(dict.fromkeys(_kinds(target_class_or_classes), function))
        return function

    return register


def _kinds(classes: Kinds) -> Sequence[type[nn.Module]]:
    return classes if isinstance(classes, Sequence) else [classes]
