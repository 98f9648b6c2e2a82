"""One merging of one scene: performed once, and kept with who performed it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkernels.repro.federated.fedfisher import training
from dpkernels.repro.federated.fedfisher.methods import Found, merged
from dpkernels.repro.federated.fedfisher.scene import Merging, Scene, digest_of
from dpkernels.repro.federated.fedfisher.uploads import Clients, clients_of
from dpkernels.whole_file import whole_file, write_text


@dataclass(frozen=True)
class Outcome:
    """What came of merging.

    accuracy: on the test part, in percent. clients_alone: the mean of the clients' own models'.
    bytes_up: of the largest upload; fedavg_bytes: of a model in float32.
    iterations, chosen, scores: of ``methods.Found``.
    fisher_seconds: of all clients, one after the other; server_seconds: of merging.
    origin: commit and processor.
    """

    accuracy: float
    clients_alone: float
    bytes_up: int
    fedavg_bytes: int
    iterations: int
    chosen: int | str
    scores: Mapping[str, float]
    fisher_seconds: float
    server_seconds: float
    origin: Mapping[str, Any] = field(default_factory=dict)


def name_of(scene: Scene, merging: Merging) -> str:
    """Return what the outcome's file is called."""
    return digest_of(scene, merging)


def read(scene: Scene, merging: Merging, folder: Path) -> Outcome | None:
    """Return what ``folder`` has of it, if it does."""
    try:
        kept = json.loads((folder / f"{name_of(scene, merging)}.json").read_text())["outcome"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None
    return Outcome(**kept)


def perform(
    scene: Scene,
    mergings: Sequence[Merging],
    folder: Path,
    kept: Collection[Merging] = (),
) -> None:
    """Merge the clients of ``scene`` in every way that ``folder`` has not got yet.

    Trains clients that are not kept, and merges earlier rounds that they start from.
    kept: whose merged model is kept, too, because a next round starts from it.
    """
    wanted = [merging for merging in mergings if read(scene, merging, folder) is None]
    if not wanted:
        return
    training.origin_of_run()  # before anything that takes long
    clients = _clients(scene, folder)
    alone = _alone(clients)
    for merging in wanted:
        outcome, found = _merge(clients, merging, alone)
        if merging in kept:
            _keep_state(found, scene, merging, folder)
        content = {
            "scene": dataclasses.asdict(scene),
            "merging": dataclasses.asdict(merging),
            "outcome": dataclasses.asdict(outcome),
        }
        path = folder / f"{name_of(scene, merging)}.json"
        write_text(path, json.dumps(content) + "\n")


def _clients(scene: Scene, folder: Path) -> Clients:
    kept = training.read(scene, folder)
    if kept is not None or scene.by is None:
        return clients_of(scene, None, folder)
    return clients_of(scene, _merged_state(scene.before(), scene.by, folder), folder)


def _merged_state(scene: Scene, merging: Merging, folder: Path) -> dict[str, Tensor]:
    """Return the merged model of a round, which the next one starts from; keeps it."""
    path = _state_file(scene, merging, folder)
    if path.exists():
        kept: dict[str, Tensor] = torch.load(path, weights_only=True)
        return kept
    _, found = _merge(_clients(scene, folder), merging, 0.0)
    return _keep_state(found, scene, merging, folder)


def _keep_state(found: Found, scene: Scene, merging: Merging, folder: Path) -> dict[str, Tensor]:
    state = {name: p.detach().clone() for name, p in found.network.named_parameters()}
    with whole_file(_state_file(scene, merging, folder)) as partial:
        torch.save(state, partial)
    return state


def _state_file(scene: Scene, merging: Merging, folder: Path) -> Path:
    return folder / f"{name_of(scene, merging)}.pt"


def _alone(clients: Clients) -> float:
    accuracies = []
    for state in clients.states:
        clients.model.load_state_dict(state)
        accuracies.append(100 * clients.test_accuracy(clients.model))
    return sum(accuracies) / len(accuracies)


def _merge(clients: Clients, merging: Merging, alone: float) -> tuple[Outcome, Found]:
    """Merge; what is random depends on the scene and on ``merging`` alone."""
    uploads = clients.uploads(merging)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(name_of(clients.trained.scene, merging)[:12], 16))
        began = time.perf_counter()
        found = merged(uploads, merging)
        seconds = time.perf_counter() - began
    outcome = Outcome(
        100 * clients.test_accuracy(found.network),
        alone,
        uploads.bytes,
        uploads.fedavg_bytes,
        found.iterations,
        found.chosen,
        found.scores,
        clients.seconds.get((merging.fisher or "", merging.expectation), 0.0),
        seconds,
        training.origin_of_run(),
    )
    return outcome, found
