"""Checks of what ``make_private`` is given, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpkernels.engine.capture import has_forward_in_place
from dpkernels.engine.sharding import sharding_group
from dpkernels.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from dpkernels.opacus.grad_sample.grad_sample_module import MODES, GradSampleModule
from dpkernels.ops.checks import check_finite


def check_arguments(
    grad_sample_mode: str,
    criterion: Callable[..., Any] | None,
    batch_first: bool,
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
    if not batch_first:
        raise ValueError(
            "make_private: batch_first must be True: samples are the first axis of the model's "
            "inputs here; transpose them, and build recurrent layers with batch_first=True"
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


def check_not_private_yet(module: nn.Module) -> None:
    """Raise ValueError for a model that is in private training already."""
    # torch.compile puts a forward pass in place, too; the engine says why that is refused.
    parts = (part for part in module.modules() if type(part).__name__ != "OptimizedModule")
    if any(has_forward_in_place(part) for part in parts):
        raise ValueError(
            "make_private: module is in private training already; call to_standard_module() on "
            "the model that the first make_private returned, and build a new optimizer"
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
