"""``GradSampleModule`` and ``GradSampleHooks``: the model that ``make_private`` returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

# Every mode is served by the one engine, and gives the same numbers.
MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")
_PREFIX = "_module."


class GradSampleHooks:
    """A hold on a model in private training; ``cleanup()`` makes it an ordinary one again.

    There is no ``grad_sample``: gradients of samples are never written down one by one, and are not
    handed out, as they have no noise.
    """

    _module: nn.Module

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean", **_: Any
    ) -> None:
        self._module = m
        self._end: Callable[[], None] | None = None
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction

    def _attach(self, end: Callable[[], None]) -> None:
        """Note what ends private training, for ``cleanup``."""
        self._end = end

    def cleanup(self) -> None:
        """Give the model back as it was; steps are not private afterwards."""
        if self._end is not None:
            self._end()
            self._end = None

    remove_hooks = cleanup


class GradSampleModule(nn.Module):
    """A model whose calls go to the one inside, ``_module``, as do attributes that it lacks.

    ``state_dict`` is that of the model inside, without a prefix; ``load_state_dict`` takes it with
    and without Opacus' ``_module.``. There is no ``grad_sample``: see ``GradSampleHooks``.
    """

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean", **_: Any
    ) -> None:
        super().__init__()
        self._module = m
        # Not a list of hooks that a copy would share, and no submodule.
        self._hooks = GradSampleHooks(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._forget: Callable[[], None] | None = None
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction

    def _attach(self, end: Callable[[], None], forget: Callable[[], None]) -> None:
        """Note what ends private training, and what drops a step's samples in ``zero_grad``."""
        self._hooks._attach(end)
        self._forget = forget

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model inside."""
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the model inside."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load it into the model inside, with or without Opacus' prefix."""
        plain = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return self._module.load_state_dict(plain, strict, assign)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the samples since the last step, as the optimizer's does."""
        super().zero_grad(set_to_none)
        if self._forget is not None:
            self._forget()

    def cleanup(self) -> None:
        """Give the model inside back as it was; steps are not private afterwards."""
        self._hooks.cleanup()
        self._forget = None

    remove_hooks = cleanup

    def to_standard_module(self) -> nn.Module:
        """Return the model inside as an ordinary one."""
        self.cleanup()
        return self._module

    def __deepcopy__(self, memo: dict[int, Any]) -> GradSampleModule:
        """Return a copy that is not in private training: a copy of the noise would repeat it."""
        copied = copy.deepcopy(self._module, memo)
        new = type(self)(copied, batch_first=self.batch_first, loss_reduction=self.loss_reduction)
        return new.train(self.training)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"
