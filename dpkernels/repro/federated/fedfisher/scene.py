"""Whose records are parted how, and how their clients train: all that decides client models."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from dpkernels.federated.data import FederatedData, holdout, load
from dpkernels.federated.partitions import Partition, dirichlet
from dpkernels.repro.federated.fedfisher.forms import Form
from dpkernels.repro.federated.runs import Settings
from dpkernels.train.data import PIXELS

# The authors' code parts the records once, with NumPy's seed 3, for all seeds of training.
PAPERS_PARTITION = 3
VALIDATION = 500
Pixels = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Merging:
    """How client models become one.

    method: as ``methods.METHODS`` names it. settings: its own, by ``runs.settings``.
    fisher, expectation: which Fisher information clients send, if any; see ``dpkernels.fisher``.
    form: how uploads are compressed to the bytes of FedAvg's; ``none``: they are not.
    """

    method: str
    settings: Settings = ()
    fisher: Literal["kronecker", "diagonal"] | None = None
    expectation: Literal["exact", "rademacher"] = "rademacher"
    form: Form = "none"


@dataclass(frozen=True)
class Scene:
    """Clients of one partition that trained from one start.

    dataset, model: as ``federated.data`` and ``federated.networks`` name them.
    alpha: of the Dirichlet shares. partition_seed: NumPy's.
    seed: of the first parameters and of the clients' orders of records.
    validation: how many training records the server has, declared public; no client has them.
    round: from 1. by: how earlier rounds were merged; None in the first, which has none.
    """

    dataset: str
    model: str
    alpha: float
    clients: int = 5
    partition_seed: int = PAPERS_PARTITION
    seed: int = 0
    local_epochs: int = 30
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    validation: int = VALIDATION
    round: int = 1
    by: Merging | None = None

    def __post_init__(self) -> None:
        if self.round < 1 or (self.by is None) != (self.round == 1):
            raise ValueError(
                f"Scene: round must be 1 without `by`, or later with it, got {self.round} and "
                f"{self.by}"
            )

    @property
    def digest(self) -> str:
        """What its file is called."""
        return digest_of(self)

    def before(self) -> Scene:
        """Return the round before, whose merged model this one starts from."""
        return replace(self, round=self.round - 1, by=self.by if self.round > 2 else None)

    def after(self, merging: Merging) -> Scene:
        """Return the next round, when this one is merged by ``merging``."""
        return replace(self, round=self.round + 1, by=merging)


def digest_of(*parts: Any) -> str:
    """Return a name for dataclasses that no others have."""
    text = json.dumps([dataclasses.asdict(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, eq=False)
class Parted:
    """The records of a scene.

    data: training records without those of validation, ``parts`` of it, and the test part.
    x_validation, y_validation: ``[V, d]`` and ``[V]``, the server's.
    """

    data: FederatedData
    parts: Partition
    x_validation: Tensor
    y_validation: Tensor

    def images(self, x: Tensor) -> Tensor:
        """Return flat records in the shape that networks take."""
        images: Tensor = x.unflatten(1, self.data.shape)
        return images


def parted(scene: Scene) -> Parted:
    """Return the records of ``scene``, parted.

    All training records are parted, as in the paper, so that its seed gives its partition; then
    the server's are taken out of the clients' (the paper leaves them in both).
    """
    at = scene.dataset, scene.alpha, scene.clients, scene.partition_seed, scene.validation
    return _parted(*at)


@lru_cache(maxsize=2)
def _parted(
    dataset: str, alpha: float, clients: int, partition_seed: int, validation: int
) -> Parted:
    data = _data(dataset)
    whole = replace(data, natural=dirichlet(data.y, clients, alpha, partition_seed))
    held = holdout(whole, validation)
    assert held.natural is not None
    left = replace(held, x_test=data.x_test, y_test=data.y_test, note=data.note, natural=None)
    return Parted(left, held.natural, held.x_test, held.y_test)


@lru_cache(maxsize=1)
def _data(dataset: str) -> FederatedData:
    data = load(dataset)
    return _as_mnist(data) if dataset == "fashion" else data


def pixels_of(dataset: str) -> Pixels:
    """Return mean and standard deviation, by channel, that pixels in [0, 1] are scaled by."""
    mean, std = PIXELS["mnist" if dataset == "fashion" else dataset]
    return mean, std


def _as_mnist(data: FederatedData) -> FederatedData:
    """Return FashionMNIST scaled by MNIST's constants, as the authors' code does.

    It matters: networks without biases have no other way to see a constant.
    """
    (mean, std), (own_mean, own_std) = (
        (m[0], s[0]) for m, s in (PIXELS["mnist"], PIXELS["fashion"])
    )
    x, x_test = ((part * own_std + own_mean - mean) / std for part in (data.x, data.x_test))
    note = f"{data.note}, then rescaled by MNIST's, as in FedFisher's code"
    return replace(data, x=x, x_test=x_test, note=note)
