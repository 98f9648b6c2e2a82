"""Models and optimizers that are wrapped by hand, and how they find each other.

``GradSampleModule(model)`` and ``DPOptimizer(optimizer=...)`` know nothing of each other but the
parameters that both have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn


class Wrapped(Protocol):
    """A model that is to be trained privately: ``GradSampleModule`` or ``GradSampleHooks``."""

    _module: nn.Module
    batch_first: bool
    loss_reduction: str

    def _attach(self, end: Callable[[], None], forget: Callable[[], None]) -> None: ...


class Waiting(Protocol):
    """An optimizer that is to be private as soon as there is a wrapped model of its parameters."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        ...

    def attach(self, model: Wrapped) -> None:
        """Begin private training of ``model``."""
        ...


_models: WeakSet[Any] = WeakSet()
_waiting: WeakSet[Any] = WeakSet()


def add_model(model: Wrapped) -> None:
    """Make a wrapped model known; an optimizer that waits for it is attached."""
    _models.add(model)
    for optimizer in list(_waiting):
        if _belong_together(model, optimizer):
            _waiting.discard(optimizer)
            optimizer.attach(model)


def add_optimizer(optimizer: Waiting) -> None:
    """Attach an optimizer to the wrapped model of its parameters, or let it wait for one."""
    for model in list(_models):
        if _belong_together(model, optimizer):
            optimizer.attach(model)
            return
    _waiting.add(optimizer)


def withdraw(optimizer: Waiting) -> None:
    """Let an optimizer wait no longer: something else trains its parameters."""
    _waiting.discard(optimizer)


def _belong_together(model: Wrapped, optimizer: Waiting) -> bool:
    """Return whether the model has all parameters of the optimizer, and trains no others."""
    own = {id(parameter) for parameter in model._module.parameters()}
    trained = {id(p) for p in model._module.parameters() if p.requires_grad}
    updated = {id(parameter) for parameter in optimizer.params}
    return trained <= updated <= own
