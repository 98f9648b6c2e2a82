"""Registration of grad samplers, and classes by mode; the name of this module is Opacus'."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from dpkernels.opacus.grad_sample.grad_sample_module import MODES, GradSampleHooks, GradSampleModule

Function = TypeVar("Function", bound=Callable[..., Any])
Kinds = type[nn.Module] | Sequence[type[nn.Module]]


def register_grad_sampler(target_class_or_classes: Kinds) -> Callable[[Function], Function]:
    """Return the decorated function as it is, with a warning: the engine does not call it.

    The engine's own rules cover any module: it finds out how parameters are used, and computes
    gradients of samples by copies of them or under ``torch.func.vmap``, checked against the forward
    pass. A function of the caller's cannot be checked, and a wrong one would break the bound.
    """
    return _unused("register_grad_sampler", target_class_or_classes)


def register_norm_sampler(target_class_or_classes: Kinds) -> Callable[[Function], Function]:
    """Return the decorated function as it is, with a warning, as ``register_grad_sampler`` does."""
    return _unused("register_norm_sampler", target_class_or_classes)


def get_gsm_class(grad_sample_mode: str) -> type[GradSampleModule]:
    """Return the class for a mode: the same for all of them."""
    _check_mode(grad_sample_mode)
    return GradSampleModule


def get_hooks_class(grad_sample_mode: str) -> type[GradSampleHooks]:
    """Return the class for a mode: the same for all of them."""
    _check_mode(grad_sample_mode)
    return GradSampleHooks


def prepare_module(
    model: nn.Module,
    grad_sample_mode: str,
    wrap_model: bool = True,
    **kwargs: Any,
) -> GradSampleModule | GradSampleHooks:
    """Return the model wrapped, or a hold on it; kwargs are the class's own."""
    kind = get_gsm_class(grad_sample_mode) if wrap_model else get_hooks_class(grad_sample_mode)
    return kind(model, **kwargs)


wrap_model = prepare_module


def _unused(name: str, kinds: Kinds) -> Callable[[Function], Function]:
    classes = kinds if isinstance(kinds, Sequence) else [kinds]
    warnings.warn(
        f"{name}: the function for {', '.join(kind.__name__ for kind in classes)} is not called; "
        "the engine finds gradients of samples by itself, for any module",
        stacklevel=3,
    )
    return lambda function: function


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(
            f"grad_sample_mode must be one of {', '.join(MODES)}, which all give the same numbers, "
            f"got {mode!r}"
        )
