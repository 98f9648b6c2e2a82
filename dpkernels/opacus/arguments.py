"""Checks of what ``make_private`` is given, before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpkernels.engine.in_place import has_forward_in_place
from dpkernels.engine.sharding import sharding_group
from dpkernels.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from dpkernels.opacus.grad_sample.grad_sample_module import MODES, GradSampleModule
from dpkernels.opacus.holding import is_held
from dpkernels.ops.checks import check_finite


def check_arguments(
    grad_sample_mode: str,
    criterion: Callable[..., Any] | None,
    loss_reduction: str,
    sample_rate: float | None,
    expected_batch_size: float | None,
) -> None:
    """Raise ValueError for what is wrong whatever the model is."""
    if grad_sample_mode == "no_op":
        raise ValueError(
            "make_private: grad_sample_mode='no_op' has the caller fill in gradients of samples, "
            "which cannot be checked to be what they claim; leave it out: the engine computes "
            "those of any model"
        )
    if grad_sample_mode not in MODES:
        raise ValueError(
            f"make_private: grad_sample_mode must be one of {', '.join(MODES)}, which all give the "
            f"same numbers, got {grad_sample_mode!r}"
        )
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f"make_private: loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}"
        )
    given = getattr(criterion, "reduction", loss_reduction)
    if "ghost" in grad_sample_mode and given != loss_reduction:
        raise ValueError(
            f"make_private: criterion has reduction={given!r}, but loss_reduction is "
            f"{loss_reduction!r}; make them the same"
        )
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise ValueError(
            f"make_private: sample_rate must be in (0, 1], got {sample_rate}; it is the expected "
            "batch size divided by the number of records"
        )
    if expected_batch_size is not None:
        check_finite("make_private", "expected_batch_size", expected_batch_size, above=0.0)


def whole_number(op: str, name: str, value: Any) -> int:
    """Return an integer of any kind, numpy's say; raise ValueError unless it is at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{op}: {name} must be an integer >= 1, got {value!r}")
    return number


def check_can_begin(module: nn.Module) -> None:
    """Raise ValueError for a model in a private training that this package has not begun."""
    # torch.compile puts a forward pass in place, too; the engine says why that is refused.
    parts = (part for part in module.modules() if type(part).__name__ != "OptimizedModule")
    if not is_held(module) and any(has_forward_in_place(part) for part in parts):
        raise ValueError(
            "make_private: module is in private training that dpkernels.make_private began; call "
            "detach() on what that returned, and build a new optimizer"
        )


@dataclass(frozen=True)
class Processes:
    """The model out of what it is wrapped in, and who trains it.

    trained: what the engine is given. inside: the model itself, to be checked.
    group: of those who train it together; None for this process alone.
    """

    trained: nn.Module
    inside: nn.Module
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, module: nn.Module) -> Processes:
        """Return them for what ``make_private`` is given."""
        if isinstance(module, GradSampleModule):
            module = module._module
        if isinstance(module, DifferentiallyPrivateDistributedDataParallel):
            return cls(module.module, module.module, dist.group.WORLD)
        if isinstance(module, DistributedDataParallel):
            return cls(module, module.module, module.process_group)
        return cls(module, module, sharding_group(module, None))
