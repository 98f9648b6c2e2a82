"""Learning rates over a training, as functions of the share of its steps that were taken.

The number of steps is planned before the first one, because noise is calibrated for it. So there is
no state to keep: a resumed training has the rates of an undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def set_learning_rate(
    optimizer: Optimizer, lr: float, schedule: str, taken: int, steps: int
) -> None:
    """Set the rate of the step after ``taken`` of ``steps``: from ``lr`` down to 0 after the last.

    schedule: one of ``SCHEDULES``.
    """
    rate = lr * SCHEDULES[schedule](taken / steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
