"""Checks of a model before private training, and replacements for what cannot be trained."""

# Imported for their validators and fixers, which they register.
from dpkernels.opacus.validators import batch_norm, instance_norm
from dpkernels.opacus.validators.module_validator import ModuleValidator
from dpkernels.opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = [
    "ModuleValidator",
    "batch_norm",
    "instance_norm",
    "register_module_fixer",
    "register_module_validator",
]
