"""Schedules of the noise multiplier."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from dpkernels.opacus.schedulers.schedule import Exponential, Product, Schedule, Steps


class _NoiseScheduler(Schedule):
    """Sets ``noise_multiplier``; a subclass may define ``get_noise_multiplier()``."""

    attribute = "noise_multiplier"

    def get_noise_multiplier(self) -> float:
        """Return the noise multiplier for ``last_epoch``."""
        return self.value()

    def wanted(self) -> float:
        """Return the noise multiplier for ``last_epoch``."""
        return self.get_noise_multiplier()


class ExponentialNoise(Exponential, _NoiseScheduler):
    """Multiplies the noise multiplier by ``gamma`` at every step but the first."""


class StepNoise(Steps, _NoiseScheduler):
    """Multiplies the noise multiplier by ``gamma`` at every ``step_size``-th step."""


class LambdaNoise(Product, _NoiseScheduler):
    """Multiplies the noise multiplier of the beginning by ``noise_lambda(last_epoch)``."""

    def __init__(
        self, optimizer: Optimizer, *, noise_lambda: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, noise_lambda, last_epoch=last_epoch)
