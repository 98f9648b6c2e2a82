"""What private training puts before and after an optimizer's own step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpkernels.engine.in_place import InPlace
from dpkernels.engine.step import Step


def discard_with(model: nn.Module, step: Step) -> Callable[[], None]:
    """Let ``model.zero_grad()`` forget microbatches, as it forgets gradients; return the undo."""
    plain = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        plain(set_to_none)
        step.discard()

    model.zero_grad = InPlace(model, zero_grad, method="zero_grad")  # type: ignore[method-assign]
    return lambda: delattr(model, "zero_grad")


def hook_into(
    optimizer: Optimizer, step: Step, parameters: Iterable[nn.Parameter]
) -> Callable[[], None]:
    """Put the noisy gradient before every step of the optimizer; return what undoes it.

    After the step, once parameters are updated, the preconditioner is told, if it wants to know.
    """
    private = {id(parameter) for parameter in parameters}

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def check() -> None:
            _check_closure(*args, *kwargs.values())
            _check_scale(optimizer)
            _check_updated(optimizer, private)

        step.noisy_gradient(check)

    def zero_grad(set_to_none: bool = True) -> None:
        plain(set_to_none)
        step.discard()

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if follow := getattr(step.preconditioner, "after_step", None):
            follow()

    plain = optimizer.zero_grad
    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        del optimizer.zero_grad

    return undo


def _check_closure(*given: object) -> None:
    if any(callable(x) for x in given):
        raise RuntimeError(
            "optimizer.step(closure): a closure asks for several gradients in one step, each of "
            "which would need noise of its own; call backward(), then step()"
        )


def _check_scale(optimizer: Optimizer) -> None:
    """Raise RuntimeError in ``GradScaler.step``, which tells fused optimizers its scale."""
    if all(getattr(optimizer, name, None) is None for name in ("grad_scale", "found_inf")):
        return
    # What the scaler would take back itself after a step, so that the next one can be plain.
    for attribute in ("grad_scale", "found_inf"):
        vars(optimizer).pop(attribute, None)
    raise RuntimeError(
        "torch.amp.GradScaler follows gradients that are not private; call optimizer.step(), and "
        "scale the loss by a fixed number that is make_private's loss_scale"
    )


def _check_updated(optimizer: Optimizer, private: set[int]) -> None:
    """Raise RuntimeError if a step would use a gradient without noise, or move what is frozen.

    private: ids of the parameters that get noisy gradients. 10 us for 60 parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = id(parameter) in private
            if parameter.requires_grad is not known or not (known or parameter.grad is None):
                raise RuntimeError(
                    f"optimizer.step(): a parameter of shape {list(parameter.shape)} was added, "
                    "frozen or unfrozen after make_private, so that it would be trained without "
                    "noise, or by noise alone; call detach(), then make_private again"
                )
