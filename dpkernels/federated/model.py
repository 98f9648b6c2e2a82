"""Any PyTorch model over the records of many clients, through the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpkernels.engine import PrivateTraining, make_private
from dpkernels.federated.problem import Cohort, Layer, LocalSGD, Problem
from dpkernels.privacy.draws import Bits, each_with_probability

Loss = Callable[[Tensor, Tensor], Tensor]


def _summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="sum")


class ModelProblem(Problem):
    """Parameters are the model's trained ones, as one vector ``[D]``.

    model: float32 or float64; its state is the start. It must be one that ``make_private`` takes.
    x: ``[N, ...]``. y: ``[N]``. parts: the rows of every client, int64 each.
    x_test, y_test: a test part that is public.
    loss: of a batch, summed over its samples.
    physical_batch_size: how many records go through the model at a time.

    Raises what ``make_private`` does, for both units: a layer that keeps statistics of what it saw
    would hand out records without noise. Raises ValueError if two clients share a row.

    Clients are gone through one after the other: the engine sums over all samples of a pass.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        parts: list[Tensor],
        x_test: Tensor,
        y_test: Tensor,
        *,
        loss: Loss = _summed_cross_entropy,
        physical_batch_size: int = 512,
    ) -> None:
        self.model, self._x, self._y, self._parts = model, x, y, parts
        self._x_test, self._y_test = x_test, y_test
        self._loss, self._size = loss, physical_batch_size
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._start = parameters_to_vector(self._trained).detach().clone()
        self.shape = tuple(self._start.shape)
        self.clients = len(parts)
        self.layers = tuple(_layers(model))
        rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        if len(rows.unique()) != len(rows):
            raise ValueError(
                "ModelProblem: parts must be disjoint: a record that two clients have, or that one "
                "has twice, moves what is released by more than one record may"
            )
        self._private(1.0).detach()

    def initial(self) -> Tensor:
        """Return the model's parameters as they were given."""
        return self._start.clone()

    def cohort(self, ids: Tensor, rate: float = 1.0, bits: Bits | None = None) -> Cohort:
        """Return the clients ``ids`` with the rows of each."""
        rows = [self._parts[client] for client in ids.tolist()]
        if rate < 1.0:
            bits = bits or Bits()
            rows = [part[each_with_probability(rate, len(part), bits)] for part in rows]
        return Cohort(ids, rows)

    def only(self, cohort: Cohort, row: int) -> Cohort:
        """Return client ``row`` of ``cohort`` alone."""
        return Cohort(cohort.ids[row : row + 1], cohort.held[row : row + 1])

    def clipped_gradient_sums(self, cohort: Cohort, theta: Tensor, bound: float) -> Tensor:
        """Return clipped sums, ``[k, D]``, by the engine, without noise: the caller's matter."""
        training = self._private(bound)
        try:
            sums = [self._clipped(training, rows) for rows in self._at_each(cohort, theta)]
        finally:
            training.detach()
        return torch.stack(sums) if sums else theta.new_zeros(0, *self.shape)

    def _private(self, bound: float) -> PrivateTraining:
        optimizer = torch.optim.SGD(self._trained, lr=0.0)
        with warnings.catch_warnings():
            # Federation adds the noise, to each client's upload.
            warnings.filterwarnings("ignore", message=".*adds no noise", category=UserWarning)
            return make_private(
                self.model,
                optimizer,
                noise_multiplier=0.0,
                max_grad_norm=bound,
                expected_batch_size=1.0,
                loss_reduction="sum",
            )

    def _clipped(self, training: PrivateTraining, rows: Tensor) -> Tensor:
        self._backward(rows)
        training.optimizer.step()
        found = self._gradient()
        training.optimizer.zero_grad()
        return found

    def gradient_sums(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return sums without a clip, ``[k, D]``."""
        sums = []
        for rows in self._at_each(cohort, theta):
            self._backward(rows)
            sums.append(self._gradient())
            self.model.zero_grad()
        return torch.stack(sums) if sums else theta.new_zeros(0, *self.shape)

    def local_updates(
        self, cohort: Cohort, theta: Tensor, local: LocalSGD, seeds: Tensor
    ) -> Tensor:
        """Return w - theta of each client, ``[k, D]``, one client after the other."""
        moved = []
        for seed, rows in zip(seeds.tolist(), self._at_each(cohort, theta), strict=True):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self._train(rows, local)
            moved.append(parameters_to_vector(self._trained).detach())
        return torch.stack(moved) - theta if moved else theta.new_zeros(0, *self.shape)

    def _train(self, rows: Tensor, local: LocalSGD) -> None:
        """Take ``local``'s steps on the model, from the parameters that it has."""
        for _ in range(local.epochs):
            for part in rows[torch.randperm(len(rows))].split(local.batch_size):
                if len(part):
                    self._loss(self.model(self._x[part]), self._y[part]).backward()
                    with torch.no_grad():
                        for p in self._trained:
                            if p.grad is not None:
                                p.sub_(p.grad, alpha=local.lr / len(part))
                    self.model.zero_grad()

    def _at_each(self, cohort: Cohort, theta: Tensor) -> Iterator[Tensor]:
        """Yield the rows of one client after the other, with its parameters in the model."""
        for index, rows in enumerate(cohort.held):
            self.set(theta if theta.dim() == 1 else theta[index])
            yield rows

    def _backward(self, rows: Tensor) -> None:
        for part in rows.split(self._size):
            if len(part):
                self._loss(self.model(self._x[part]), self._y[part]).backward()

    def _gradient(self) -> Tensor:
        zeros = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained)
        return torch.cat([g.detach().flatten() for g in zeros])

    def set(self, theta: Tensor) -> None:
        """Put ``theta``, ``[D]``, into the model."""
        # Parameters become views of what they are given, and local steps change them in place.
        vector_to_parameters(theta.clone(), self._trained)

    def accuracy(self, theta: Tensor) -> float:
        """Return the share of the test part whose likeliest class is right."""
        self.set(theta)
        training, right = self.model.training, 0
        self.model.eval()
        with torch.no_grad():
            for x, y in zip(
                self._x_test.split(self._size), self._y_test.split(self._size), strict=True
            ):
                right += int((self.model(x).argmax(1) == y).sum())
        self.model.train(training)
        return right / len(self._y_test)


def _layers(model: nn.Module) -> Iterator[Layer]:
    begin = 0
    for name, p in model.named_parameters():
        if p.requires_grad:
            yield Layer(name, begin, tuple(p.shape))
            begin += p.numel()
