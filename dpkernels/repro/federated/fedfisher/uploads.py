"""What clients of a scene send to the server: models, Fisher information, compressed or not."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpkernels.fisher import Fisher, fisher_information
from dpkernels.repro.federated.fedfisher import training
from dpkernels.repro.federated.fedfisher.forms import sent
from dpkernels.repro.federated.fedfisher.scene import (
    Merging,
    Parted,
    Pixels,
    Scene,
    digest_of,
    parted,
    pixels_of,
)
from dpkernels.repro.federated.fedfisher.training import State, Trained

BATCH = 500


@dataclass(frozen=True)
class Uploads:
    """What a server has to merge.

    model: the network; whatever parameters it has. start: the state that clients started from.
    states, fishers, sizes: of the clients that have records; fishers is empty where none are sent.
    labels: ``[clients, classes]`` int64, how many records of a class each has; PFNM asks for them.
    bytes: of the largest upload. fedavg_bytes: of a model in float32.
    validation: ``[V, ...]`` and ``[V]``, declared public.
    pixels: mean and standard deviation, by channel, that images were scaled by.
    """

    model: nn.Module
    start: State
    states: list[dict[str, Tensor]]
    fishers: list[Fisher]
    sizes: list[int]
    labels: Tensor
    bytes: int
    fedavg_bytes: int
    validation: tuple[Tensor, Tensor]
    pixels: Pixels

    @property
    def image(self) -> tuple[int, int, int]:
        """The shape of an image: channels, height, width."""
        channels, height, width = self.validation[0].shape[1:]
        return channels, height, width

    def score(self, state: State) -> float:
        """Return the share of the validation records that a state gets right."""
        return accuracy(self.model, *self.validation, state)


@dataclass
class Clients:
    """The trained clients of a scene, and the Fisher information that was asked of them so far."""

    trained: Trained
    records: Parted
    model: nn.Module
    states: list[dict[str, Tensor]]
    start: dict[str, Tensor]
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    _fishers: dict[tuple[str, str], list[Fisher]] = field(default_factory=dict)

    @classmethod
    def of(cls, trained: Trained) -> Clients:
        """Return the clients that have records."""
        records = parted(trained.scene)
        problem = training.problem_of(trained.scene, records)
        state = partial(training.state_of, problem.layers)
        states = [state(trained.models[client]) for client in trained.present]
        return cls(trained, records, problem.model, states, state(trained.start))

    def uploads(self, merging: Merging) -> Uploads:
        """Return what ``merging`` is given; computes Fisher information that is not there yet."""
        sizes = [self.trained.sizes[client] for client in self.trained.present]
        plain = sum(4 * tensor.numel() for tensor in self.start.values())
        states, fishers, largest = self.states, self.fishers(merging), plain
        if fishers:
            told = [sent(*pair, merging.form) for pair in zip(states, fishers, strict=True)]
            states = [state for (state, _), _ in told]
            fishers = [fisher for (_, fisher), _ in told]
            largest = max(size for _, size in told)
        return Uploads(
            self.model,
            self.start,
            states,
            fishers,
            sizes,
            self._labels(),
            largest,
            plain,
            self._images(self.records.x_validation, self.records.y_validation),
            pixels_of(self.trained.scene.dataset),
        )

    def fishers(self, merging: Merging) -> list[Fisher]:
        """Return each client's Fisher information at its own model; none where none is sent."""
        if merging.fisher is None:
            return []
        asked = merging.fisher, merging.expectation
        if asked not in self._fishers:
            began = time.perf_counter()
            self._fishers[asked] = [
                self._fisher(client, state, merging)
                for client, state in zip(self.trained.present, self.states, strict=True)
            ]
            self.seconds[asked] = time.perf_counter() - began
        return self._fishers[asked]

    def _fisher(self, client: int, state: State, merging: Merging) -> Fisher:
        assert merging.fisher is not None
        self.model.load_state_dict(state)
        rows = self.records.parts.indices(client)
        return fisher_information(
            self.model,
            self.records.images(self.records.data.x[rows]).split(BATCH),
            kind=merging.fisher,
            expectation=merging.expectation,
            generator=_generator(self.trained.scene, client),
        )

    def test_accuracy(self, model: nn.Module) -> float:
        """Return the share of the test part that ``model`` gets right."""
        data = self.records.data
        return accuracy(model, *self._images(data.x_test, data.y_test))

    def _images(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.records.images(x), y

    def _labels(self) -> Tensor:
        data, parts = self.records.data, self.records.parts
        found = [data.y[parts.indices(client)] for client in self.trained.present]
        return torch.stack([labels.bincount(minlength=data.classes) for labels in found])


def clients_of(scene: Scene, start: State | None, folder: Path) -> Clients:
    """Return the clients from ``folder``, or train them and keep them there."""
    kept = training.read(scene, folder)
    if kept is None:
        layers = training.problem_of(scene).layers
        theta = None if start is None else training.vector_of(layers, start)
        kept = training.keep(training.train(scene, theta), folder)
    return Clients.of(kept)


def accuracy(model: nn.Module, x: Tensor, y: Tensor, state: State | None = None) -> float:
    """Return the share of records whose likeliest class is right; state: in place of the model's.

    x: ``[N, ...]``. y: ``[N]``.
    """
    kept: dict[str, Tensor] = dict(model.named_parameters() if state is None else state)
    right = 0
    with torch.no_grad():
        for inputs, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            logits = functional_call(model, kept, (inputs,))
            right += int((logits.argmax(1) == labels).sum())
    return right / len(y)


def _generator(scene: Scene, client: int) -> torch.Generator:
    name = f"{digest_of(scene)} {client}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return torch.Generator().manual_seed(seed)
