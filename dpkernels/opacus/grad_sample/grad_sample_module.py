"""``GradSampleModule`` and ``GradSampleHooks``: models that are to be trained privately."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dpkernels.engine import Unsupported, make_plain
from dpkernels.engine.in_place import capture_of
from dpkernels.engine.rules import layers_of
from dpkernels.opacus.grad_sample.pairing import add_model

# Every mode is served by the one engine, and gives the same numbers.
MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")
_PREFIX = "_module."


class UnsupportedInside(Unsupported, NotImplementedError):
    """A model that cannot be trained privately; Opacus raises NotImplementedError for it."""


class _Held:
    """What both have: private training to end, samples to forget, and hooks to be silent.

    There is no ``grad_sample``: gradients of samples are never written down one by one, and are not
    handed out, as they have no noise.

    strict: raise NotImplementedError at once for a model that cannot be trained privately, and not
        when private training begins.
    """

    _module: nn.Module
    _end: Callable[[], None] | None
    _forget: Callable[[], None] | None

    def _hold(self, batch_first: bool, loss_reduction: str, strict: bool) -> None:
        self._end = self._forget = None
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.hooks_enabled = True
        if strict:
            _check_trainable(self._module)
        add_model(self)

    def _attach(self, end: Callable[[], None], forget: Callable[[], None]) -> None:
        """Note what ends private training, and what drops a step's samples in ``zero_grad``."""
        self._end, self._forget = end, forget

    def enable_hooks(self) -> None:
        """Follow calls of the model again, after ``disable_hooks``."""
        self.hooks_enabled = True

    def disable_hooks(self) -> None:
        """Let calls of the model compute as if nobody listened; they cannot be trained on."""
        self.hooks_enabled = False

    def forbid_grad_accumulation(self) -> None:
        """Do nothing: the run that accounts for steps sees to it."""

    def allow_grad_accumulation(self) -> None:
        """Do nothing: the run that accounts for steps sees to it."""

    def set_grad_sample_to_none(self) -> None:
        """Forget the samples since the last step."""
        if self._forget is not None:
            self._forget()

    def cleanup(self) -> None:
        """Give the model back as it was; steps are not private afterwards."""
        if self._end is not None:
            self._end()
        self._end = self._forget = None

    remove_hooks = cleanup


class GradSampleHooks(_Held):
    """A hold on a model in private training; ``cleanup()`` makes it an ordinary one again."""

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        **_: Any,
    ) -> None:
        self._module = m
        self._hold(batch_first, loss_reduction, strict)


class GradSampleModule(_Held, nn.Module):
    """A model whose calls go to the one inside, ``_module``, as do attributes that it lacks.

    Parameters, and keys of ``state_dict``, have the prefix ``_module.``, as Opacus' have;
    ``load_state_dict``, of this or of a model that contains it, takes them with and without it.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        self._module = m
        self._warned = False
        self._hold(batch_first, loss_reduction, strict)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model inside."""
        if self._end is None and self.training and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                "GradSampleModule: the model is not in private training, so that gradients are "
                "neither clipped nor noisy; build a DPOptimizer over its parameters, or call "
                "PrivacyEngine.make_private",
                stacklevel=3,
            )
        with self._silent():
            return self._module(*args, **kwargs)

    def _silent(self) -> AbstractContextManager[None]:
        capture = None if self.hooks_enabled else capture_of(self._module)
        return nullcontext() if capture is None else capture.paused()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Give names without Opacus' prefix the prefix; called for nested models, too."""
        for name in list(state_dict):
            if name.startswith(prefix) and not name.startswith(prefix + _PREFIX):
                own = prefix + _PREFIX + name.removeprefix(prefix)
                state_dict.setdefault(own, state_dict.pop(name))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the samples since the last step, as the optimizer's does."""
        super().zero_grad(set_to_none)
        self.set_grad_sample_to_none()

    def cleanup(self) -> None:
        """Give the model inside back as it was; steps are not private afterwards."""
        super().cleanup()
        self._warned = True  # the caller knows

    remove_hooks = cleanup

    def to_standard_module(self) -> nn.Module:
        """Return the model inside as an ordinary one; of a copy, too, which refuses to train."""
        self.cleanup()
        return make_plain(self._module)

    def _copied(self, module: nn.Module) -> GradSampleModule:
        """Return one around ``module``, which is not in private training."""
        return _restored(type(self), module, self.batch_first, self.loss_reduction, self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradSampleModule:
        """Return a copy that is not in private training: a copy of the noise would repeat it."""
        return self._copied(copy.deepcopy(self._module, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, for ``torch.save``, the model without the private training that it is in."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        # A copy of the modules, whose forward passes are their own, around the same tensors.
        module = copy.deepcopy(self._module, {id(x): x for x in tensors})
        given = type(self), module, self.batch_first, self.loss_reduction, self.training
        return _restored, given

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"


def _restored(
    kind: type[GradSampleModule],
    module: nn.Module,
    batch_first: bool,
    loss_reduction: str,
    training: bool,
) -> GradSampleModule:
    new = kind(module, batch_first=batch_first, loss_reduction=loss_reduction, strict=False)
    # Of this module alone: those inside may have modes of their own.
    new.training = training
    return new


def _check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    try:
        layers_of(model)
    except Unsupported as error:
        raise UnsupportedInside(str(error)) from error
