"""``ModuleValidator``: what keeps a model from private training, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from dpkernels.engine import Unsupported
from dpkernels.engine.rules import layers_of
from dpkernels.opacus.utils.module_utils import clone_module
from dpkernels.opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    UnsupportedModuleError,
)

Validator = Callable[[Any], list[UnsupportedModuleError]]
Fixer = Callable[..., nn.Module]


class ModuleValidator:
    """The checks of the engine in the form that Opacus' users know.

    Recurrent layers and attention are valid as they are. BatchNorm is valid only if it is frozen
    and in evaluation mode: call ``eval()`` on it after every ``model.train()``.
    """

    VALIDATORS: ClassVar[dict[type[nn.Module], Validator]] = {}
    FIXERS: ClassVar[dict[type[nn.Module], Fixer]] = {}

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Return what is wrong with ``module``; raise UnsupportedModuleError if ``strict``."""
        errors: list[UnsupportedModuleError] = []
        if not module.training:
            errors.append(
                IllegalModuleConfigurationError(
                    "the model must be in training mode; call model.train()"
                )
            )
        for child in module.modules():
            if validator := cls.VALIDATORS.get(type(child)):
                errors += validator(child)
        if not errors and any(parameter.requires_grad for parameter in module.parameters()):
            try:
                layers_of(module)
            except Unsupported as error:
                errors.append(NotYetSupportedModuleError(str(error)))
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether ``validate`` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Return a copy of ``module`` in which whatever has a fixer is replaced.

        kwargs: for all fixers; that of BatchNorm knows ``num_groups`` and ``replace_bn_with_in``.
        Parameters are new: build the optimizer afterwards.
        """
        module = clone_module(module)
        for name, child in list(module.named_modules()):
            fixer = cls.FIXERS.get(type(child))
            if fixer is None:
                continue
            new = fixer(child, **kwargs)
            if new is child:
                continue
            like = next(child.parameters(), None)
            if like is not None:
                new.to(like.device)
            if name == "":
                return new
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, new)
        return module

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Return what ``fix`` returns; raise UnsupportedModuleError if that is not valid."""
        fixed = cls.fix(module, **kwargs)
        cls.validate(fixed, strict=True)
        return fixed
