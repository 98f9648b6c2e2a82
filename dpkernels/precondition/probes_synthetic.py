"""What probes that are drawn from nothing but a generator have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

# A number of classes, each as likely as any other; or what draws ``size`` targets.
Labels = int | Callable[[int, Generator], Tensor]


class Synthetic:
    """A probe that has seen no data."""

    @property
    def not_private(self) -> None:
        """Nothing is in the way of a guarantee."""
        return None


def check_labels(op: str, classes: Labels) -> None:
    """Raise ValueError unless there is at least one class, or a function."""
    if not callable(classes) and classes < 1:
        raise ValueError(
            f"{op}: classes must be at least 1, or a function (size, generator) -> targets, got "
            f"{classes}"
        )


def draw_labels(classes: Labels, size: int, generator: Generator) -> Tensor:
    """Return targets ``[size]``: uniform classes, int64, or what the function draws."""
    if callable(classes):
        return classes(size, generator)
    return torch.randint(classes, (size,), generator=generator, device=generator.device)


def describe_labels(classes: Labels) -> str:
    """Return what the targets are, for a report."""
    return "targets by a function" if callable(classes) else f"{classes} uniform classes"
