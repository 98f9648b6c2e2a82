"""Schedules of the clipping norm."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from dpkernels.opacus.schedulers.schedule import Exponential, Product, Schedule, Steps


class _GradClipScheduler(Schedule):
    """Sets ``max_grad_norm``; a subclass may define ``get_max_grad_norm()``."""

    attribute = "max_grad_norm"

    def get_max_grad_norm(self) -> float:
        """Return the clipping norm for ``last_epoch``."""
        return self.value()

    def wanted(self) -> float:
        """Return the clipping norm for ``last_epoch``."""
        return self.get_max_grad_norm()


class ExponentialGradClip(Exponential, _GradClipScheduler):
    """Multiplies the clipping norm by ``gamma`` at every step but the first."""


class StepGradClip(Steps, _GradClipScheduler):
    """Multiplies the clipping norm by ``gamma`` at every ``step_size``-th step."""


class LambdaGradClip(Product, _GradClipScheduler):
    """Multiplies the clipping norm of the beginning by ``scheduler_function(last_epoch)``."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scheduler_function: Callable[[int], float],
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, scheduler_function, last_epoch=last_epoch)
