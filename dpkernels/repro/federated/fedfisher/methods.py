"""Every way of merging client models that the tables compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpkernels.federated.merging import Adam, ConjugateGradients, Method, merge
from dpkernels.federated.merging.dense import DenseSettings, dense
from dpkernels.federated.merging.ot_fusion import ot_fusion
from dpkernels.federated.merging.pfnm import pfnm
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
    scores: Mapping[str, float] = field(default_factory=dict)


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
    scores = {str(step): score for step, score in merged.scores.items()}
    return Found(network, merged.iterations, merged.chosen, scores)


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


def _ot_fusion(uploads: Uploads) -> Found:
    """OTFusion by either cost, the better on the validation records."""

    def made(cost: Literal["weights", "directions"]) -> dict[str, Tensor]:
        return ot_fusion(uploads.model, uploads.states, weights=uploads.sizes, cost=cost)

    states = {"weights": made("weights"), "directions": made("directions")}
    scores = {cost: uploads.score(one) for cost, one in states.items()}
    best = max(states, key=scores.__getitem__)
    return Found(_loaded(uploads.model, states[best]), 0, best, scores)


def _pfnm(uploads: Uploads) -> Found:
    """PFNM at the paper's variances and mass; the network is wider than the clients'."""
    network, _ = pfnm(uploads.model, uploads.states, class_counts=uploads.labels)
    return Found(network)


def _dense(uploads: Uploads, **settings: Any) -> Found:
    """DENSE, the best epoch on the validation records; settings: of ``DenseSettings``."""
    scores: list[float] = []

    def choose(state: State) -> float:
        scores.append(uploads.score(state))
        return scores[-1]

    state = dense(
        [_loaded(uploads.model, state) for state in uploads.states],
        classes=uploads.labels.shape[1],
        shape=uploads.image,
        weights=uploads.sizes,
        pixels=uploads.pixels,
        settings=DenseSettings(**settings),
        choose=choose,
        seed=torch.initial_seed() % 2**31,
    )
    network = _loaded(uploads.model, state)
    told = {str(epoch): score for epoch, score in enumerate(scores)}
    return Found(network, len(scores), scores.index(max(scores)), told)


METHODS: dict[str, Callable[..., Found]] = {
    "fedavg": _fedavg,
    "ot-fusion": _ot_fusion,
    "pfnm": _pfnm,
    "dense": _dense,
    "fisher-merge": _fisher_merge,
    "regmean": _regmean,
    "fedfisher": _fedfisher,
}
# Libraries that a method needs, besides this package's own.
_NEEDS: dict[str, tuple[str, ...]] = {"ot-fusion": ("ot",)}


def missing(merging: Merging) -> str | None:
    """Return why ``merging`` cannot be run here, None if it can."""
    if merging.method not in METHODS:
        return f"{merging.method} is not in this version"
    for name in _NEEDS.get(merging.method, ()):
        try:
            import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error})"
    return None


def merged(uploads: Uploads, merging: Merging) -> Found:
    """Return the model that ``merging`` makes of uploads. Raises NotHere where it cannot be run."""
    reason = missing(merging)
    if reason is not None:
        raise NotHere(reason)
    return METHODS[merging.method](uploads, **dict(merging.settings))
