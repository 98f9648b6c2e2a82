"""Clipped sums of any model's gradients, by the engine: a copy of the model in private training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from dpkernels.engine import PrivateTraining, make_private
from dpkernels.engine.sides import Preconditioner

# The engine tries a model out for batches of several samples and for those of one.
_TRIED = (3, 1)


class EngineSums:
    """Sums of clipped gradients ``[D]`` without noise, which is the caller's matter.

    model: copied. loss: summed over samples. bound: of the clip. preconditioner: of
    ``make_private``. x, y: records, of which only shape and dtype are looked at here.

    The engine tries a model out at its first call, for seven passes and more, and refuses it by
    what it sees. It gets synthetic inputs for that: no error message depends on a record, and
    records come when the trial is over. Raises what ``make_private`` does.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        bound: float,
        preconditioner: Preconditioner | None,
        x: Tensor,
        y: Tensor,
    ) -> None:
        self.bound, self._loss = bound, loss
        self._model, self._training = private_copy(model, bound, preconditioner)
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for count in _TRIED:
                labels = torch.zeros_like(y[:1]).expand(count, *y.shape[1:])
                self.of(None, self._synthetic(count, x), labels, count)

    def _synthetic(self, count: int, x: Tensor) -> Tensor:
        """Return ``count`` inputs of the shape and dtype of records, from torch's generator."""
        shape = (count, *x.shape[1:])
        if x.is_floating_point():
            return torch.randn(shape, dtype=x.dtype)
        tables = [m.num_embeddings for m in self._model.modules() if isinstance(m, nn.Embedding)]
        return torch.randint(min(tables, default=2), shape, dtype=x.dtype)

    def of(self, theta: Tensor | None, x: Tensor, y: Tensor, at_a_time: int) -> Tensor:
        """Return the sum over records ``x``, ``[n, ...]``, at theta ``[D]``; None: as they are.

        at_a_time: how many records go through the model in one pass.
        """
        if theta is not None:
            vector_to_parameters(theta.clone(), self._trained)
        for inputs, labels in zip(x.split(at_a_time), y.split(at_a_time), strict=True):
            if len(inputs):
                self._loss(self._model(inputs), labels).backward()
        self._training.optimizer.step()
        zeros = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained)
        found = torch.cat([g.detach().flatten() for g in zeros])
        self._training.optimizer.zero_grad()
        return found


def private_copy(
    model: nn.Module, bound: float, preconditioner: Preconditioner | None = None
) -> tuple[nn.Module, PrivateTraining]:
    """Return a copy of the model and its private training, which adds no noise."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*adds no noise", category=UserWarning)
        training = make_private(
            own,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=bound,
            expected_batch_size=1.0,
            loss_reduction="sum",
            preconditioner=preconditioner,
        )
    return own, training
