"""FedFisher: clients train apart, and the server merges their models by Fisher information."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import MOST, gradient_query, summed
from dpkernels.federated.algorithms.local_training import check_steps, private_steps
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Tensors, Terms, Visit
from dpkernels.federated.fisher_vectors import FisherLayout, Kind, packed_fisher, unpacked_fisher
from dpkernels.federated.merging import ConjugateGradients, merge
from dpkernels.federated.model import ModelProblem
from dpkernels.federated.noisy_factors import denoised
from dpkernels.federated.problem import LocalSGD, Problem
from dpkernels.federated.public_probes import kfac_at, probe_inputs, probe_of
from dpkernels.federated.record_factors import (
    at_a_time,
    check_modules,
    factor_sums,
    mean_sizes,
    moved_by_one,
)
from dpkernels.fisher import fisher_information
from dpkernels.ops.checks import check_finite

Training: TypeAlias = Literal["dp-sgd", "dp-kfc", "sgd"]
Factors: TypeAlias = Literal["records", "public", "probes", "none"]
Weights: TypeAlias = Literal["records", "equal"]

_COUNT_WEIGHT = 1.0
_DRAWS = 10
_BATCH = 256


@dataclass(frozen=True)
class FedFisher(Algorithm):
    """Merge clients' models W_i, trained from theta, by their Fisher information F_i at W_i.

    theta <- argmin_W sum_i p_i (W - W_i)^T F_i (W - W_i), from the mean sum_i p_i W_i (``merge``).
    One round is the paper; T rounds (its few-shot form) each start from the merged model.

    training="sgd": ``local_epochs`` of SGD, and F_i over all records. It is not private: A of the
    first layer is the second moment of the inputs. It takes no budget, and reports no epsilon.

    Otherwise: unit record, view each_upload, either adjacency. Two kinds of noisy releases, each
    stated and accounted as a stage of its own:

    models: ``local_steps`` of DP-SGD inside each client, as in ``LocalDPSGD`` (sensitivity: a
        gradient clipped to ``clip``, over |D|). An upload is made of releases. "dp-kfc": gradients
        are preconditioned before the clip, by K-FAC of synthetic probes at theta.
    factors: at W_i *as the server has it*, which it sends back: sums over records of clipped
        factors and of 1 (``record_factors``; sensitivity sqrt(P + 1) / |D| for P parts, and
        rounding: ``summed``), ``factor_steps`` times with records drawn anew, averaged. Clients
        take them at the noisy W_i that the server has: at a model without noise, one record would
        move what all others add. Of crafted records' rounding see ``record_factors``. The noise is
        known, and taken out of eigenvalues (``noisy_factors``).

    Noise: N(0, (m S)^2) in every element of every release, once, from the client's own key.
    Sampling: records by Poisson, anew for each release, if the federation has a ``record_rate``;
    clients are seen, so that drawing them amplifies nothing.

    A record is with one client, so what it costs is what its own client's uploads tell, whichever
    client that is: epsilon is the largest client's, and ``Federation``'s for all.

    local_epochs, local_batch, local_momentum: of "sgd" alone; local_steps, clip: of the others.
    fisher: Kronecker-factored or diagonal. iterations, damping: of the merge.
    factors: what F_i is made of. ``records``: the client's. ``public``: inputs that are declared
        public (``ModelProblem.public``); ``probes``: synthetic ones; both at the released W_i, so
        they cost nothing. ``none``: the mean of W_i, which is FedAvg in one round.
    factor_share: of the budget, for the factors or the count. factor_clip: clips of the parts, in
        multiples of their mean sizes over synthetic probes at W_i.
    factor_steps: releases of the factors in a round. None: one of all records, or 10 where records
        are drawn by chance: drawn anew for each, more of them are amplified more.
    weights: p_i by the number of records, the noisy one where there is a budget, or equal. With
        factors that are not from records, the count alone is the second stage.

    ``aggregate`` is refused: with Kronecker factors the server needs every W_i beside its F_i; of
    diagonals and models three sums would do (``merging.secure_sums``), but W_i of several private
    steps carries only its client's share of the noise.
    """

    name: ClassVar[str] = "fedfisher"
    fisher: Kind = "kronecker"
    training: Training = "dp-sgd"
    factors: Factors = "records"
    weights: Weights = "records"
    iterations: int = 50
    damping: float = 0.0
    local_lr: float = 0.01
    local_epochs: int = 30
    local_batch: int = 64
    local_momentum: float = 0.9
    local_steps: int = 100
    clip: float = 1.0
    factor_steps: int | None = None
    factor_share: float = 0.2
    factor_clip: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in (
            ("fisher", Kind),
            ("training", Training),
            ("factors", Factors),
            ("weights", Weights),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"FedFisher: {name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}"
                )
        for name in ("clip", "factor_clip"):
            check_finite("FedFisher", name, getattr(self, name), above=0.0)
        check_finite("FedFisher", "damping", self.damping, at_least=0.0)
        if not 0 < self.factor_share < 1:
            raise ValueError(f"FedFisher: factor_share must be in (0, 1), got {self.factor_share}")
        for name in ("iterations", "factor_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"FedFisher: {name} must be >= 1, got {value}")
        check_steps("FedFisher", self.local_steps)
        _ = self.local

    @property
    def local(self) -> LocalSGD:
        """What a client does by itself, without privacy."""
        return LocalSGD(self.local_epochs, self.local_batch, self.local_lr, self.local_momentum)

    @property
    def private(self) -> bool:
        """Whether clients train by noisy steps."""
        return self.training != "sgd"

    @property
    def _asks_twice(self) -> bool:
        """Whether something of the records is released besides the models."""
        return self.private and (self.factors == "records" or self.weights == "records")

    def layout(self, terms: Terms) -> FisherLayout:
        """Return what F_i is as a vector; empty where there is none."""
        return FisherLayout(self.fisher, terms.layers if self.factors != "none" else ())

    def _asked(self, terms: Terms) -> FisherLayout:
        """Return what of it the second stage releases."""
        return FisherLayout(self.fisher, terms.layers if self.factors == "records" else ())

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return rounds of models, or of models and factors in turn."""
        if terms.view != "each_upload":
            raise ValueError(
                "FedFisher: its server takes each W_i with its F_i, got view 'aggregate'; take "
                "view 'each_upload'"
            )
        if not self.private:
            elements = math.prod(terms.shape) + self.layout(terms).size + 1
            # No sensitivity is meant: ``private`` is False, so that no noise is ever made for it.
            return (Stage("models", Query((elements,), 1.0), terms.rounds),)
        if terms.unit != "record":
            raise ValueError(
                f"FedFisher: training={self.training!r} protects records, got unit {terms.unit!r}; "
                "take unit 'record'"
            )
        steps = Stage(
            "models",
            gradient_query(terms, self.clip),
            terms.rounds,
            releases=self.local_steps,
            uploaded=False,
            redrawn=True,
        )
        if not self._asks_twice:
            return (steps,)
        if terms.sampled:
            raise ValueError(
                "FedFisher: factors are asked of the clients that have just trained, but clients "
                "are drawn for every stage; let all take part, or take factors 'public', 'probes' "
                "or 'none' with weights 'equal'"
            )
        asked = self._asked(terms)
        factors = Stage(
            "factors",
            Query((asked.size + 1,), summed(moved_by_one(asked, _COUNT_WEIGHT), terms)),
            terms.rounds,
            releases=self.factor_steps or (_DRAWS if terms.records_sampled else 1),
            uploaded=False,
            redrawn=True,
        )
        shares = ((steps, 1 - self.factor_share), (factors, self.factor_share))
        return tuple(
            replace(
                stage,
                name=stage.name if terms.rounds == 1 else f"{stage.name} {t}",
                rounds=1,
                share=share / terms.rounds,
            )
            for t in range(1, terms.rounds + 1)
            for stage, share in shares
        )

    def void(self, terms: Terms) -> str | None:
        """Return why plain training has no guarantee."""
        if self.private:
            return None
        return (
            "training='sgd' uploads models and Fisher information of records as they are: the "
            "paper's algorithm is not private"
        )

    def reads_uploads(self) -> bool:
        """Return True: every W_i goes with its own F_i."""
        return True

    def check(self, problem: Problem) -> None:
        """Raise ValueError unless F_i can be computed of the problem's model, by a trial."""
        if not isinstance(problem, ModelProblem) or not problem.classifies:
            raise ValueError(
                "FedFisher: it merges networks that classify by the summed cross-entropy, from "
                "records in the dtype of the parameters; take ModelProblem with its own loss"
            )
        if self.factors == "public" and problem.public is None:
            raise ValueError(
                "FedFisher: factors='public' need inputs that are declared public, got none; pass "
                "ModelProblem(public=...)"
            )
        if self.training == "dp-kfc":
            probe_of(problem)
        layout = FisherLayout(self.fisher, problem.layers)
        if self.factors == "records" and self.private:
            model = problem.model_at(problem.initial(), torch.float64)
            check_modules(model, layout)
            at_a_time(model, probe_inputs(problem, 1), layout)
        elif self.factors != "none":
            x = torch.zeros(2, *problem.record_shape)
            packed_fisher(layout, fisher_information(problem.model, [x], kind=self.fisher))

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, and room for what uploads of a first stage wait in for the second."""
        if not self._asks_twice:
            return {"theta": theta}
        size = theta.numel() + self._early(terms).size
        return {
            "theta": theta,
            "waiting": theta.new_zeros(terms.clients, size),
            "arrived": torch.zeros(terms.clients, dtype=torch.bool),
        }

    def _early(self, terms: Terms) -> FisherLayout:
        """Return what of F_i comes with the models."""
        late = self.private and self.factors == "records"
        return FisherLayout(self.fisher, ()) if late else self.layout(terms)

    def sent_to(self, stage: Stage, server: Tensors, ids: Tensor) -> Tensors:
        """Send back each client's own released W_i for its factors, ``[k, D]``."""
        if not stage.name.startswith("factors"):
            return {}
        theta = server["theta"]
        return {"theta": theta + server["waiting"][ids, : theta.numel()]}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return models, or factors and counts."""
        if visit.stage.name.startswith("factors"):
            return self._released_factors(visit), {}
        return self._trained(visit), {}

    def _trained(self, visit: Visit) -> Tensor:
        """Return [W_i - theta, F_i unless it comes later, n_i without privacy], ``[k, *]``."""
        theta, cohort, problem = visit.sent["theta"], visit.cohort, _networks(visit)
        if not self.private:
            moved = problem.local_updates(cohort, theta, self.local, visit.seeds())
            fishers = self._fishers(visit, theta + moved)
            counts = [len(problem.held(cohort, row)[0]) for row in range(len(cohort))]
            return visit.noisy(torch.cat([moved, fishers, moved.new_tensor(counts)[:, None]], 1))
        if self.training == "dp-kfc":
            visit = replace(visit, problem=problem.preconditioned(kfac_at(problem, theta)))
        moved = private_steps(visit, self.clip, self.local_steps, self.local_lr)
        if self._early(visit.terms).size == 0:
            return moved
        return torch.cat([moved, self._fishers(visit, theta + moved)], 1)

    def _fishers(self, visit: Visit, models: Tensor) -> Tensor:
        """Return F_i at each of ``models``, ``[k, D]``, as vectors; 0 where there is no record."""
        problem, layout = _networks(visit), self.layout(visit.terms)
        found = models.new_zeros(len(models), layout.size)
        if layout.size == 0:
            return found
        for row, (theta, seed) in enumerate(zip(models, visit.seeds().tolist(), strict=True)):
            if self.factors == "public":
                assert problem.public is not None
                x = problem.public
            elif self.factors == "probes":
                x = probe_inputs(problem)
            else:
                x, _ = problem.held(visit.cohort, row)
            if len(x) and bool(theta.isfinite().all()):
                fisher = fisher_information(
                    problem.model_at(theta),
                    x.split(_BATCH),
                    kind=self.fisher,
                    generator=torch.Generator().manual_seed(seed),
                )
                found[row] = packed_fisher(layout, fisher)
        return found

    def _released_factors(self, visit: Visit) -> Tensor:
        """Return [F_i, n_i] made of noisy sums over records, ``[k, asked + 1]``."""
        layout, models, terms = self._asked(visit.terms), visit.sent["theta"], visit.terms
        problem, seeds = _networks(visit), visit.seeds().tolist()
        networks = [problem.model_at(theta, torch.float64) for theta in models]
        clips: list[list[float]] = [[] for _ in networks]
        most = 1
        if layout.parts and networks:
            probes = probe_inputs(problem)
            most = at_a_time(networks[0], probes, layout)
            clips = [
                [self.factor_clip * size for size in mean_sizes(network, probes, layout, most)]
                for network in networks
            ]
        bound = MOST * moved_by_one(layout, _COUNT_WEIGHT)
        total = torch.zeros(len(models), layout.size + 1, dtype=torch.float64)
        cohort = visit.cohort
        for step in range(visit.stage.releases):
            cohort = visit.draw() if step else cohort
            sums = torch.zeros_like(total)
            for row, network in enumerate(networks):
                sums[row] = factor_sums(
                    network,
                    *problem.held(cohort, row),
                    layout,
                    clips[row],
                    count_weight=_COUNT_WEIGHT,
                    seed=seeds[row] + step,
                    most=most,
                )
            total += visit.noisy(clip_rows(sums.div_(terms.records), bound).to(models.dtype))
        seen = total / visit.stage.releases
        std = visit.std / math.sqrt(visit.stage.releases)
        counts = (seen[:, -1] / _COUNT_WEIGHT).clamp(min=0.0)
        fishers = [
            # A share of less than one record is noise, and the client has no weight to speak of.
            denoised(layout, one[:-1], own, std, max(float(count), 1 / terms.records))
            for one, own, count in zip(seen, clips, counts, strict=True)
        ]
        found = torch.stack(fishers) if fishers else total[:, :-1]
        return torch.cat([found, counts[:, None] * terms.records], 1).to(models.dtype)

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Merge, or wait for the factors."""
        if seen.clients is None or seen.uploads is None:
            raise RuntimeError("FedFisher: it needs single uploads, got their sum")
        theta, uploads = server["theta"], seen.uploads
        if not self._asks_twice:
            counts = torch.ones(len(uploads)) if self.private else uploads[:, -1]
            own = uploads if self.private else uploads[:, :-1]
            return {"theta": self._merged(terms, theta, own, counts)}
        waiting, arrived = server["waiting"], server["arrived"]
        if not stage.name.startswith("factors"):
            waiting, arrived = torch.zeros_like(waiting), torch.zeros_like(arrived)
            waiting[seen.clients], arrived[seen.clients] = uploads, True
            return {"theta": theta, "waiting": waiting, "arrived": arrived}
        both = arrived[seen.clients]
        own = torch.cat([waiting[seen.clients], uploads[:, :-1]], 1)[both]
        merged = self._merged(terms, theta, own, uploads[both, -1])
        return {"theta": merged, "waiting": waiting, "arrived": torch.zeros_like(arrived)}

    def _merged(self, terms: Terms, theta: Tensor, uploads: Tensor, counts: Tensor) -> Tensor:
        """Return the merged model of uploads [W_i - theta, F_i]; theta if nobody counts."""
        layout = self.layout(terms)
        counts = counts.double() if self.weights == "records" else (counts > 0).double()
        kept = uploads.isfinite().all(1) & (counts > 0) & counts.isfinite()
        if not kept.any():
            return theta
        moved, fishers = uploads[kept].split([theta.numel(), layout.size], 1)
        states = [_state(terms, theta + one) for one in moved]
        merged = merge(
            states,
            [unpacked_fisher(layout, one) for one in fishers] if layout.size else None,
            weights=counts[kept].tolist(),
            method="fedfisher" if layout.size else "fedavg",
            solver=ConjugateGradients(iterations=self.iterations),
            damping=self.damping,
        )
        return torch.cat([merged.state[layer.name].flatten() for layer in terms.layers])


def _networks(visit: Visit) -> ModelProblem:
    assert isinstance(visit.problem, ModelProblem)  # by ``check``
    return visit.problem


def _state(terms: Terms, theta: Tensor) -> Tensors:
    """Return the parameters by name."""
    sizes = [math.prod(layer.shape) for layer in terms.layers]
    pieces = zip(terms.layers, theta.split(sizes), strict=True)
    return {layer.name: piece.view(layer.shape) for layer, piece in pieces}
