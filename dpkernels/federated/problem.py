"""What the clients hold and what is trained: gradients of many clients at once, and accuracy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpkernels.privacy.draws import Bits


@dataclass(frozen=True)
class Cohort:
    """The clients of one round.

    ids: int64 ``[k]``. held: what the problem needs to know of their records; the problem's own.
    """

    ids: Tensor
    held: Any

    def __len__(self) -> int:
        return len(self.ids)


class Problem(ABC):
    """Records of all clients, and a model with parameters ``[*shape]``.

    shape: of the parameters. clients: how many there are.
    """

    shape: tuple[int, ...]
    clients: int

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
    def clipped_gradient_sums(self, cohort: Cohort, theta: Tensor, bound: float) -> Tensor:
        """Return each client's sum of records' gradients clipped to ``bound``, ``[k, *shape]``.

        theta: ``[*shape]``, or ``[k, *shape]`` with a model for each client. A record with a
        gradient that is not finite adds exactly zero.
        """

    @abstractmethod
    def gradient_sums(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return each client's sum of records' gradients as they are, ``[k, *shape]``."""

    @abstractmethod
    def accuracy(self, theta: Tensor) -> float:
        """Return the share of the public test part that ``theta`` gets right."""
