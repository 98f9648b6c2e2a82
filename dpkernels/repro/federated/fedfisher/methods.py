"""Every way of merging client models that the tables compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

from dpkernels.federated.merging import Adam, ConjugateGradients, Method, merge
from dpkernels.repro.federated.fedfisher.scene import Merging
from dpkernels.repro.federated.fedfisher.training import State
from dpkernels.repro.federated.fedfisher.uploads import Uploads


@dataclass(frozen=True)
class Found:
    """The merged model.

    network: with its parameters; PFNM's is wider than the clients'.
    iterations: that the server made. chosen: which iterate or candidate it took.
    scores: on the validation records, by iterate or candidate; empty if nothing was chosen.
    """

    network: nn.Module
    iterations: int = 0
    chosen: int | str = 0
    scores: Mapping[int | str, float] = field(default_factory=dict)


class NotHere(Exception):
    """A method that cannot be run, and why."""


def _loaded(model: nn.Module, state: State) -> nn.Module:
    found = copy.deepcopy(model)
    found.load_state_dict(dict(state))
    return found


def _merge(uploads: Uploads, method: Method, choose: bool, **settings: Any) -> Found:
    merged = merge(
        uploads.states,
        uploads.fishers or None,
        weights=uploads.sizes,
        method=method,
        choose=uploads.score if choose else None,
        **settings,
    )
    network = _loaded(uploads.model, merged.state)
    return Found(network, merged.iterations, merged.chosen, dict(merged.scores))


def _fedavg(uploads: Uploads) -> Found:
    return _merge(uploads, "fedavg", choose=False)


def _fisher_merge(uploads: Uploads) -> Found:
    return _merge(uploads, "fisher-merge", choose=False)


def _regmean(uploads: Uploads) -> Found:
    return _merge(uploads, "regmean", choose=True)


def _fedfisher(
    uploads: Uploads,
    server: str = "ours",
    steps: int | None = None,
    damping: float = 0.0,
    choose: bool = True,
) -> Found:
    """FedFisher. server: ``paper``, its Adam, best of every 100 steps; ``ours``, CG, of all."""
    if server == "paper":
        solver: Adam | ConjugateGradients = Adam(steps or 2000, form="published")
    else:
        solver = ConjugateGradients(steps or ConjugateGradients().iterations)
    return _merge(uploads, "fedfisher", choose, solver=solver, damping=damping)


METHODS: dict[str, Callable[..., Found]] = {
    "fedavg": _fedavg,
    "fisher-merge": _fisher_merge,
    "regmean": _regmean,
    "fedfisher": _fedfisher,
}
# What has to be there for a method, besides this package's core.
_NEEDS: dict[str, tuple[str, ...]] = {}
_COMPRESSION = "dpkernels.federated.merging.compress"


def missing(merging: Merging) -> str | None:
    """Return why ``merging`` cannot be run here, None if it can."""
    if merging.method not in METHODS:
        return f"{merging.method} is not in this version"
    needed = _NEEDS.get(merging.method, ())
    if merging.form != "none":
        needed = (*needed, _COMPRESSION)
    for name in needed:
        try:
            import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
    return None


def merged(uploads: Uploads, merging: Merging) -> Found:
    """Return the model that ``merging`` makes of uploads. Raises NotHere where it cannot be run."""
    reason = missing(merging)
    if reason is not None:
        raise NotHere(reason)
    return METHODS[merging.method](uploads, **dict(merging.settings))
