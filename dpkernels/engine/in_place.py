"""Methods that private training puts in place of a module's own, and what copies have instead.

A copy of a model in private training (``copy.deepcopy``, ``torch.save``) is not private: nothing
clips its gradients or adds noise to them. It computes as the model does, and refuses to train until
``make_private`` makes it private, or ``make_plain`` says that it need not be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpkernels.engine.capture import Capture

_METHODS = ("forward", "zero_grad")


class InPlace:
    """A method in place of the module's own; a copy of the module has a ``Copied`` one.

    Copied as it is, it would go on computing with the weights of the module it was made for.

    method: its name. capture: what the whole model is attached to, if the module is the model.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        capture: Capture | None = None,
        method: str = "forward",
    ) -> None:
        update_wrapper(self, getattr(module, method))
        self._module, self._call, self._method = module, call, method
        self.capture = capture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what takes the place of the module's own."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Copied, (), {"module": self._module, "method": self._method}


class Copied:
    """The method of a copy: the class's own, but gradients of the module's parameters are refused.

    Made by ``copy`` and ``pickle`` alone, which set its attributes.
    """

    module: nn.Module
    method: str

    def __init__(self) -> None:
        self._guards: dict[nn.Parameter, Callable[[], None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the class does."""
        if self.method == "forward" and torch.is_grad_enabled():
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter not in self._guards:
                    self._guards[parameter] = parameter.register_hook(_refuse).remove
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Copied, (), {"module": self.module, "method": self.method}

    def remove(self) -> None:
        """Give the module its class's own method back."""
        for remove in self._guards.values():
            remove()
        delattr(self.module, self.method)


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError(
        "this model is a copy of one in private training, and its gradients would be neither "
        "clipped nor noisy; call make_private on the copy, or dpkernels.make_plain(copy) to train "
        "it without privacy"
    )


def make_plain(model: nn.Module) -> nn.Module:
    """Let a copy of a model in private training be trained without privacy; return it.

    model: what ``copy.deepcopy`` or ``torch.load`` gave; one that is in private training itself is
    left as it is: ``PrivateTraining.detach()`` ends that.
    """
    for module in model.modules():
        for method in _METHODS:
            own = vars(module).get(method)
            if isinstance(own, Copied):
                own.remove()
    return model


def has_forward_in_place(module: nn.Module) -> bool:
    """Return whether the module computes something else than its class says."""
    own = vars(module).get("forward")
    if own is None or isinstance(own, Copied):
        return False
    return getattr(own, "__func__", None) is not type(module).forward


def capture_of(model: nn.Module) -> Capture | None:
    """Return what the model is attached to, if it is."""
    own = vars(model).get("forward")
    return own.capture if isinstance(own, InPlace) else None
