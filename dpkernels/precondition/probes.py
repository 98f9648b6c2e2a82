"""Probes: batches that stand in for the data where curvature is estimated.

All that a probe draws, it draws from the generator that it is given: the same generator, the same
batch. Synthetic and public probes cost no privacy; ``PrivateData`` has none to give.
"""

from __future__ import annotations

from typing import Protocol

from torch import Generator, Tensor

from dpkernels.precondition.probes_data import PrivateData, PublicData
from dpkernels.precondition.probes_features import Features
from dpkernels.precondition.probes_images import ColouredNoise
from dpkernels.precondition.probes_synthetic import Labels
from dpkernels.precondition.probes_tokens import Tokens

__all__ = ["ColouredNoise", "Features", "Labels", "PrivateData", "Probe", "PublicData", "Tokens"]


class Probe(Protocol):
    """A source of batches."""

    @property
    def not_private(self) -> str | None:
        """Why there is no guarantee, if the batches come from private data; None otherwise."""
        ...

    def describe(self) -> str:
        """Return what it draws, for a report."""
        ...

    def batch(self, size: int, generator: Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the inputs of ``model(*inputs)`` and targets, on the generator's device.

        Data that is given stays where it is.
        """
        ...
