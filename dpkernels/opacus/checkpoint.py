"""Checkpoints in the form that Opacus' users know, with what a private run needs beside it.

Several processes with copies of one model have the same to write: all may, or one of them. Those
that hold shards of it write a file each, as those of ``dpkernels.run`` do, and all must.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import nn

from dpkernels.engine import Ranks
from dpkernels.engine.sharding import is_sharded, sharding_group
from dpkernels.opacus.accountants import IAccountant
from dpkernels.opacus.optimizers import DPOptimizer
from dpkernels.run.checkpoint import read, read_own_part, write_atomically, write_own_part

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
    """Write all of them; a file is written as a whole or not at all.

    Of a model that is sharded, each process writes ``path`` with its rank, ``.rank0``, at the end.
    """
    state = {} if checkpoint_dict is None else dict(checkpoint_dict)
    state["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
    state["privacy_accountant_state_dict"] = accountant.state_dict()
    if optimizer is not None:
        state[_OPTIMIZER] = optimizer.state_dict()
        state[_RUN] = optimizer.run_state_dict()
    for key, scheduler in schedulers.items():
        if scheduler is not None:
            state[key] = scheduler.state_dict()
    ranks = _holders_of_shards(module, optimizer)
    if not isinstance(path, str | os.PathLike):
        torch.save(state, path, **(torch_save_kwargs or {}))
    elif ranks is None:
        write_atomically(path, state, **(torch_save_kwargs or {}))
    else:
        write_own_part(path, state, _steps(state), ranks, **(torch_save_kwargs or {}))


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

    Noise from the operating system's entropy is new, whatever was drawn after the checkpoint. That
    of a seeded generator goes on where the checkpoint was, so that a run repeats itself bit for
    bit: steps taken after it, and once more from it, have the same noise, which is not private.

    Checkpoints that Opacus wrote are read, too: they have no noise key and no place in the data, so
    the run goes on with the next epoch.
    """
    ranks = _holders_of_shards(module, optimizer)
    options = dict(torch_load_kwargs or {})
    if ranks is None or not isinstance(path, str | os.PathLike):
        state: dict[str, Any] = read(path, **options)
    else:
        state = read_own_part(path, ranks, **options)
    # First: if something else does not fit, epsilon is too large and not too small.
    accountant.load_state_dict(state["privacy_accountant_state_dict"])
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
    module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
    return state


def _holders_of_shards(module: nn.Module, optimizer: DPOptimizer | None) -> Ranks | None:
    """Return the processes that have a shard of the model each; None if this one has all of it."""
    if not any(is_sharded(parameter) for parameter in module.parameters()):
        return None
    ranks = Ranks(sharding_group(module, None)) if optimizer is None else optimizer.training.ranks
    return ranks if ranks.size > 1 else None


def _steps(state: Mapping[str, Any]) -> int:
    return sum(steps for *_, steps in state["privacy_accountant_state_dict"]["history"])
