"""Checkpoints in the form that Opacus' users know, with what a private run needs beside it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import nn

from dpkernels.opacus.accountants import IAccountant
from dpkernels.opacus.optimizers import DPOptimizer
from dpkernels.run.checkpoint import write_atomically

Destination = str | os.PathLike[str] | IO[bytes]
# What a checkpoint may hold beside the model and the accountant, by key.
_OPTIMIZER = "optimizer_state_dict"
_RUN = "private_run_state_dict"


def save(
    path: Destination,
    module: nn.Module,
    accountant: IAccountant,
    optimizer: DPOptimizer | None,
    schedulers: Mapping[str, Any],
    checkpoint_dict: dict[str, Any] | None,
    module_state_dict_kwargs: Mapping[str, Any] | None,
    torch_save_kwargs: Mapping[str, Any] | None,
) -> None:
    """Write all of them; a file is written as a whole or not at all."""
    state = {} if checkpoint_dict is None else dict(checkpoint_dict)
    state["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
    state["privacy_accountant_state_dict"] = accountant.state_dict()
    if optimizer is not None:
        state[_OPTIMIZER] = optimizer.state_dict()
        state[_RUN] = optimizer.run_state_dict()
    for key, scheduler in schedulers.items():
        if scheduler is not None:
            state[key] = scheduler.state_dict()
    if isinstance(path, str | os.PathLike) and not torch_save_kwargs:
        write_atomically(path, state)
    else:
        torch.save(state, path, **(torch_save_kwargs or {}))


def load(
    path: Destination,
    module: nn.Module,
    accountant: IAccountant,
    optimizer: DPOptimizer | None,
    schedulers: Mapping[str, Any],
    module_load_dict_kwargs: Mapping[str, Any] | None,
    torch_load_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Put everything back; return the rest of what ``save`` was given, and the model's state.

    Checkpoints that Opacus wrote are read, too: they have no noise key and no place in the data, so
    the run goes on with the next epoch.
    """
    state: dict[str, Any] = torch.load(path, **{"weights_only": True, **(torch_load_kwargs or {})})
    module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
    optimizer_state, run_state = state.pop(_OPTIMIZER, None), state.pop(_RUN, None)
    if (optimizer is None) is not (optimizer_state is None):
        there, given = ("has no", "is") if optimizer_state is None else ("has an", "is not")
        warnings.warn(
            f"load_checkpoint: the checkpoint {there} optimizer, which {given} passed", stacklevel=3
        )
    elif optimizer is not None and optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
        if run_state is not None:
            optimizer.load_run_state_dict(run_state)
    for key, scheduler in schedulers.items():
        scheduler_state = state.pop(key, None)
        if scheduler is not None and scheduler_state is not None:
            scheduler.load_state_dict(scheduler_state)
    # Last: a run's own accountant is this one, if the optimizer is of this engine.
    accountant.load_state_dict(state["privacy_accountant_state_dict"])
    return state
