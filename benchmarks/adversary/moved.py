"""How far one record moves the released sum.

The model and the other records stay the same; the noise is zero; the result is read as float64 from
``grad`` times the expected batch size. Sums are float32, so that the other records' sum must be
small, a few C, or representable: then what is left of their rounding is below 1e-6 C.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dpkernels
from dpkernels import PrivateTraining
from dpkernels.engine.clipping import Flat

# Private training without noise, and its optimizer.
Trained = tuple[PrivateTraining, torch.optim.Optimizer]
Adjacency = Literal["removed", "silenced"]


@dataclass(frozen=True)
class Records:
    """A batch: inputs of the model with records first, and a weight for each record's loss."""

    inputs: tuple[Tensor, ...]
    weights: Tensor

    @classmethod
    def of(cls, *inputs: Tensor) -> Records:
        """Return records whose losses all count once."""
        return cls(inputs, torch.ones(len(inputs[0])))

    def __len__(self) -> int:
        return len(self.weights)

    def without(self, record: int, adjacency: Adjacency) -> Records:
        """Return the batch without a record: taken out, or with a loss that counts zero times.

        The second leaves the batch as long as it was: a record's own part is zero all the same.
        """
        if adjacency == "silenced":
            weights = self.weights.clone()
            weights[record] = 0
            return Records(self.inputs, weights)
        kept = [i for i in range(len(self)) if i != record]
        return Records(tuple(x[kept] for x in self.inputs), self.weights[kept])


Train = Callable[[nn.Module, torch.optim.Optimizer, Records], None]


def losses(output: Tensor) -> Tensor:
    """Return one loss for each record: the sum of its outputs."""
    return output.flatten(1).sum(1)


def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer, records: Records) -> None:
    """Run the ordinary training step's forward and backward pass."""
    (losses(model(*records.inputs)) * records.weights).sum().backward()


def private(model: nn.Module, max_norm: Any = 1.0, **options: Any) -> Trained:
    """Return private training of ``model`` without noise."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    arguments: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "expected_batch_size": 1.0,
        "loss_reduction": "sum",
        "max_grad_norm": max_norm,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = dpkernels.make_private(model, optimizer, **arguments | options)
    return training, optimizer


def gradient(model: nn.Module) -> Tensor:
    """Return ``grad`` of all trained parameters in one float64 vector."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([g.double().flatten() for g in found])


def released(
    model: nn.Module, records: Records, train: Train = one_pass, max_norm: Any = 1.0, **options: Any
) -> Tensor:
    """Return what one step on a copy of the model releases, without noise."""
    own = copy.deepcopy(model)
    training, optimizer = private(own, max_norm, **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(own, optimizer, records)
        optimizer.step()
        return gradient(own) * training.expected_batch_size
    finally:
        training.detach()


def moved(
    model: nn.Module,
    records: Records,
    train: Train = one_pass,
    *,
    adjacency: Adjacency = "removed",
    only: Sequence[int] | None = None,
    max_norm: Any = None,
    **options: Any,
) -> float:
    """Return how far one record moves the sum, in units of its bound: the largest over records.

    only: the records to take away; None: each in turn.
    max_norm: C, or a way to clip; 1 if None.

    Raises what the engine raises, for the whole batch or for its neighbour.
    """
    clipping = Flat(1.0) if max_norm is None else max_norm
    bound = clipping if isinstance(clipping, float) else clipping.sensitivity(())
    whole = released(model, records, train, copy.copy(clipping), **options)
    return max(
        float((whole - part).norm()) / bound
        for part in _neighbours(model, records, train, adjacency, only, clipping, options)
    )


def _neighbours(
    model: nn.Module,
    records: Records,
    train: Train,
    adjacency: Adjacency,
    only: Sequence[int] | None,
    clipping: Any,
    options: dict[str, Any],
) -> Iterator[Tensor]:
    for record in range(len(records)) if only is None else only:
        rest = records.without(record, adjacency)
        yield released(model, rest, train, copy.copy(clipping), **options)
