"""Any PyTorch model over the records of many clients, through the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpkernels.engine.sides import Preconditioner
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.local import (
    EngineSums,
    Grams,
    Plan,
    Way,
    chain_of,
    chained_updates,
    clipped_sums,
    plan_of,
    private_copy,
    stacked_updates,
    vmapped_updates,
)
from dpkernels.federated.local.chance import mask_seed, orders_of
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
    local: the way of local training (``local.plan.Way``); the fastest if None, see ``local_plan``.
    public: inputs ``[M, ...]`` that the server holds and that are declared public, or None.

    Raises what ``make_private`` does, for both units: a layer that keeps statistics of what it saw
    would hand out records without noise. Raises ValueError if two clients share a row.

    Chains of linear layers with the summed cross-entropy are computed for all clients at once
    (``local.stacked``). For other models clipped sums go through the engine client by client: it
    sums over all samples of a pass.
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
        local: Way | None = None,
        public: Tensor | None = None,
    ) -> None:
        self.public = public
        self._preconditioner: Preconditioner | None = None
        self._engine: EngineSums | None = None
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
        self._way, self._grams = local, Grams(x.flatten(1), parts)
        # Refuses models; what their calls show is looked at before the first clipped sum.
        private_copy(model, 1.0)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self._x.shape[1:])

    @property
    def classifies(self) -> bool:
        """Whether the loss is the summed cross-entropy of floating-point records."""
        return self._entropy

    def held(self, cohort: Cohort, row: int) -> tuple[Tensor, Tensor]:
        """Return inputs ``[n, ...]`` of client ``row`` of ``cohort``, and which records they are.

        The latter are rows of the table of all clients: a record keeps its own, whoever else is
        there.
        """
        rows: Tensor = cohort.held[row]
        return self._x[rows], rows

    def model_at(self, theta: Tensor, dtype: torch.dtype | None = None) -> nn.Module:
        """Return a copy of the model with the parameters ``theta``, ``[D]``, in ``dtype``."""
        self.set(theta)
        return copy.deepcopy(self.model).to(dtype or theta.dtype)

    def preconditioned(self, preconditioner: Preconditioner) -> ModelProblem:
        """Return the problem with gradients that are preconditioned, then clipped, then summed.

        preconditioner: as ``make_private`` takes it; made of released parameters and public inputs
            alone. A bound on the sum is the same with it. Clipped sums alone know of it.
        """
        own = copy.copy(self)
        own._preconditioner, own._engine = preconditioner, None
        return own

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

    def clipped_gradient_sums(
        self, cohort: Cohort, theta: Tensor, bound: float, most: float = math.inf
    ) -> Tensor:
        """Return clipped sums, ``[k, D]``, without noise: the caller's matter.

        By ``clipped_sums`` for a chain of linear layers, else by the engine, and projected to
        ``most``. How sums round before that is in ``make_private``'s list: records that conspire
        can move a sum of n float32 gradients by n^2 2^-24 of the bound.
        """
        sums = self._clipped_sums(cohort, theta, bound)
        return clip_rows(sums, most * bound) if math.isfinite(most) else sums

    def _clipped_sums(self, cohort: Cohort, theta: Tensor, bound: float) -> Tensor:
        chain = chain_of(self.model, tuple(self._x.shape[1:]))
        plain = self._preconditioner is None
        if plain and self._entropy and not isinstance(chain, str):
            # As many numbers of the global generator as clients: the same if they come in turn.
            seeds = torch.randint(2**62, (len(cohort),)).tolist()
            return clipped_sums(
                chain,
                self._x.flatten(1),
                self._y,
                cohort.held,
                theta,
                bound,
                at_a_time=self._size,
                seeds=seeds,
            )
        return self._clipped_by_engine(cohort, theta, bound)

    def _clipped_by_engine(self, cohort: Cohort, theta: Tensor, bound: float) -> Tensor:
        if self._engine is None or self._engine.bound != bound:
            self._engine = EngineSums(
                self.model, self._loss, bound, self._preconditioner, self._x, self._y
            )
        sums = [
            self._engine.of(
                theta if theta.dim() == 1 else theta[i], self._x[rows], self._y[rows], self._size
            )
            for i, rows in enumerate(cohort.held)
        ]
        return torch.stack(sums) if sums else theta.new_zeros(0, *self.shape)

    def gradient_sums(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return sums without a clip, ``[k, D]``."""
        sums = []
        for rows in self._at_each(cohort, theta):
            self._backward(rows)
            sums.append(self._gradient())
            self.model.zero_grad()
        return torch.stack(sums) if sums else theta.new_zeros(0, *self.shape)

    @property
    def _entropy(self) -> bool:
        """Whether the loss is one whose residuals are known, and records fit the parameters."""
        same = self._x.dtype == self._start.dtype
        return self._loss is _summed_cross_entropy and self._y.dim() == 1 and same

    def local_plan(self, cohort: Cohort, local: LocalSGD) -> Plan:
        """Return the way in which ``local_updates`` computes these clients, and the reason."""
        return plan_of(
            self.model,
            tuple(self._x.shape[1:]),
            local,
            [len(rows) for rows in cohort.held],
            asked=self._way,
            cross_entropy=self._entropy,
            grams_kept=self._grams.keeps,
        )

    def local_updates(
        self, cohort: Cohort, theta: Tensor, local: LocalSGD, seeds: Tensor
    ) -> Tensor:
        """Return w - theta of each client, ``[k, D]``, in the way of ``local_plan``.

        A client's order of records is the same in every way; its dropout masks are not.
        """
        plan, chosen = self.local_plan(cohort, local), seeds.tolist()
        if plan.way == "looped" or not len(cohort):
            return self._looped(cohort, theta, local, chosen)
        if plan.way == "vmapped":
            return vmapped_updates(
                self.model, self.layers, self._x, self._y, cohort.held, theta, local, chosen
            )
        if plan.way == "chained":
            held = cohort.held
            return chained_updates(plan.network, self._x, self._y, held, theta, local, chosen)
        ids, held = cohort.ids.tolist(), cohort.held
        return stacked_updates(
            plan.chain,
            self._x.flatten(1),
            self._y,
            held,
            theta,
            local,
            chosen,
            (lambda i: self._grams.of(ids[i], held[i])) if plan.spanned else None,
        )

    def _looped(self, cohort: Cohort, theta: Tensor, local: LocalSGD, seeds: list[int]) -> Tensor:
        moved = []
        for seed, rows in zip(seeds, self._at_each(cohort, theta), strict=True):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(mask_seed(seed))
                self._train(rows, local, orders_of(seed))
            moved.append(parameters_to_vector(self._trained).detach())
        return torch.stack(moved) - theta if moved else theta.new_zeros(0, *self.shape)

    def _train(self, rows: Tensor, local: LocalSGD, orders: torch.Generator) -> None:
        """Take ``local``'s steps on the model, from the parameters that it has."""
        velocities = [torch.zeros_like(p) if local.momentum else None for p in self._trained]
        for _ in range(local.epochs):
            order = torch.randperm(len(rows), generator=orders)
            for part in rows[order].split(local.batch_size):
                if len(part):
                    self._loss(self.model(self._x[part]), self._y[part]).backward()
                    with torch.no_grad():
                        for p, v in zip(self._trained, velocities, strict=True):
                            if p.grad is None:
                                continue
                            if v is None:
                                p.sub_(p.grad, alpha=local.lr / len(part))
                            else:
                                v.mul_(local.momentum).add_(p.grad, alpha=1 / len(part))
                                p.sub_(v, alpha=local.lr)
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
        """Put a copy of ``theta``, ``[D]``, into the model.

        ``vector_to_parameters`` makes parameters views of what it gets: local steps would move
        theta itself.
        """
        vector_to_parameters(theta.clone(), self._trained)

    def accuracy(self, theta: Tensor, rows: slice = slice(None)) -> float:
        """Return the share of the test part, or of its ``rows``, whose likeliest class is right."""
        self.set(theta)
        x_test, y_test = self._x_test[rows], self._y_test[rows]
        training, right = self.model.training, 0
        self.model.eval()
        with torch.no_grad():
            for x, y in zip(x_test.split(self._size), y_test.split(self._size), strict=True):
                right += int((self.model(x).argmax(1) == y).sum())
        self.model.train(training)
        return right / len(y_test)


def _layers(model: nn.Module) -> Iterator[Layer]:
    begin = 0
    for name, p in model.named_parameters():
        if p.requires_grad:
            yield Layer(name, begin, tuple(p.shape))
            begin += p.numel()
