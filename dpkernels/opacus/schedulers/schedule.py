"""What the schedules of noise and of clipping share: when a number of the optimizer changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class Schedule:
    """Sets one attribute of a ``DPOptimizer`` at every ``step()``, as learning rates are set.

    The accountant is told the noise multiplier of each step as it is then. A schedule must not look
    at the data: what it sets is public.
    """

    attribute: str

    def __init__(self, optimizer: Optimizer, *, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, self.attribute):
            raise ValueError(
                f"{type(self).__name__}: optimizer must have {self.attribute}, as the one that "
                f"make_private returns has, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    def value(self) -> float:
        """Return the number for ``last_epoch``."""
        raise NotImplementedError

    def wanted(self) -> float:
        """Return the number by the name that subclasses outside of here define it under."""
        return self.value()

    def current(self) -> float:
        """Return the number as it is."""
        return float(getattr(self.optimizer, self.attribute))

    def step(self) -> None:
        """Go on to the next epoch, or step, if it is called after each."""
        self.last_epoch += 1
        setattr(self.optimizer, self.attribute, self.wanted())

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer and functions, which a file cannot hold."""
        return {
            key: value
            for key, value in vars(self).items()
            if key != "optimizer" and not callable(value)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; the optimizer's number is not changed by it."""
        vars(self).update(state_dict)


class Exponential(Schedule):
    """Multiplies by ``gamma`` at every step but the first."""

    def __init__(self, optimizer: Optimizer, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def value(self) -> float:
        """Return the last value times gamma."""
        return self.current() * (1.0 if self.last_epoch == 0 else self.gamma)


class Steps(Schedule):
    """Multiplies by ``gamma`` at every ``step_size``-th step."""

    def __init__(
        self, optimizer: Optimizer, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        if step_size < 1:
            raise ValueError(f"{type(self).__name__}: step_size must be >= 1, got {step_size}")
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def value(self) -> float:
        """Return the last value, times gamma if it is time."""
        due = self.last_epoch != 0 and self.last_epoch % self.step_size == 0
        return self.current() * (self.gamma if due else 1.0)


class Product(Schedule):
    """Multiplies the number of the beginning by ``factor(last_epoch)``."""

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], *, last_epoch: int = -1
    ) -> None:
        self._base: float = getattr(optimizer, self.attribute, 1.0)
        self._factor = factor
        super().__init__(optimizer, last_epoch=last_epoch)

    def value(self) -> float:
        """Return base times factor."""
        return self._base * self._factor(self.last_epoch)
