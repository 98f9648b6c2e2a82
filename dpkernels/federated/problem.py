"""What the clients hold and what is trained: gradients of many clients at once, and accuracy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpkernels.ops.checks import check_finite
from dpkernels.privacy.draws import Bits

# Clients with at most so many float32 records add up in float32, larger ones in float64. More would
# cost noise, fewer time: 128 cost 0.2% of noise (``algorithms.gradients.summed``).
FLOAT32_RECORDS = 128


@dataclass(frozen=True)
class Cohort:
    """The clients of one round.

    ids: int64 ``[k]``. held: what the problem needs to know of their records; the problem's own.
    """

    ids: Tensor
    held: Any

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class LocalSGD:
    """What a client does by itself: ``epochs`` passes over its records by SGD, from theta.

    Each epoch goes through the records in an order of its own, ``batch_size`` at a time, the last
    batch being what is left: v <- momentum v + (mean gradient of the batch), w <- w - lr v. v is 0
    at the start and lives as long as the epochs do (``torch.optim.SGD`` with momentum in [0, 1),
    without dampening).
    """

    epochs: int = 1
    batch_size: int = 64
    lr: float = 0.1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(
                f"LocalSGD: epochs and batch_size must be >= 1, got {self.epochs} and "
                f"{self.batch_size}"
            )
        check_finite("LocalSGD", "lr", self.lr, above=0.0)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"LocalSGD: momentum must be in [0, 1), got {self.momentum}")


@dataclass(frozen=True)
class Layer:
    """Where a parameter of the model is in the vector of all, and its shape."""

    name: str
    begin: int
    shape: tuple[int, ...]


class Problem(ABC):
    """Records of all clients, and a model with parameters ``[*shape]``.

    shape: of the parameters. clients: how many there are.
    layers: the parameters that make up ``shape``, in order.
    """

    shape: tuple[int, ...]
    clients: int
    layers: tuple[Layer, ...]

    @abstractmethod
    def initial(self) -> Tensor:
        """Return parameters before training, ``[*shape]``."""

    @abstractmethod
    def cohort(self, ids: Tensor, rate: float = 1.0, bits: Bits | None = None) -> Cohort:
        """Return the clients ``ids``; with ``rate`` < 1, each record is in it by chance, by itself.

        bits: where the chance comes from.
        """

    @abstractmethod
    def only(self, cohort: Cohort, row: int) -> Cohort:
        """Return client ``row`` of ``cohort`` alone, with the same records of its own."""

    @abstractmethod
    def clipped_gradient_sums(
        self, cohort: Cohort, theta: Tensor, bound: float, most: float = math.inf
    ) -> Tensor:
        """Return each client's sum of records' gradients clipped to ``bound``, ``[k, *shape]``.

        theta: ``[*shape]``, or ``[k, *shape]`` with a model for each client. A record with a
        gradient that is not finite adds exactly zero.
        most: the norm that a sum is projected to before it is rounded, in multiples of ``bound``.

        A client's own number of records decides how its sum is rounded: ``FLOAT32_RECORDS``.
        """

    @abstractmethod
    def gradient_sums(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return each client's sum of records' gradients as they are, ``[k, *shape]``."""

    def local_updates(
        self, cohort: Cohort, theta: Tensor, local: LocalSGD, seeds: Tensor
    ) -> Tensor:
        """Return w - theta of each client after ``local``, ``[k, *shape]``; 0 without records.

        theta: ``[*shape]``, or ``[k, *shape]`` with a start for each client.
        seeds: int64 ``[k]``, of each client's order of records and dropout.
        """
        raise TypeError(
            f"local_updates: {type(self).__name__} has gradients only; take ModelProblem"
        )

    @abstractmethod
    def accuracy(self, theta: Tensor, rows: slice = slice(None)) -> float:
        """Return the share of the public test part, or of ``rows`` of it, that theta gets right."""
