"""The federated loop: draw clients, client step, noise, sum, server step, account. It stands once.

One round, in this order:

    clients are drawn -> broadcast -> client step (clip, noise) -> what arrives is checked
    -> the round is accounted -> the sum is opened -> server step -> state is kept
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkernels.federated import resuming
from dpkernels.federated.checks import (
    check_budget,
    check_central,
    check_fits,
    check_last_cohort,
    check_state,
)
from dpkernels.federated.client_noise import ClientNoise
from dpkernels.federated.contract import Algorithm, Seen, Stage, Tensors, Terms, Visit
from dpkernels.federated.journal import Journal
from dpkernels.federated.problem import Problem
from dpkernels.federated.received import Message, Received, collect, collect_rows
from dpkernels.federated.record_draws import RecordDraws
from dpkernels.federated.release import Release, calibrate, check_stages, spent_by_all
from dpkernels.ops.checks import check_finite
from dpkernels.ops.noise import NoiseKey, RowKeys, add_gaussian_noise_
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.draws import Bits
from dpkernels.privacy.mechanism import EveryRecord, NotPrivate, Statement
from dpkernels.privacy.private_sampler import PrivateSampler

# What happens to uploads between clients and server, for simulations of faults: given the round,
# the clients and their uploads, returns what reaches the server.
Transport = Callable[[int, Tensor, Tensor], Iterable[Message]]


@dataclass(frozen=True)
class Round:
    """What one round was. None of it depends on records but through the model.

    Under Poisson sampling of users, though, how many took part is secret: keep ``clients``,
    ``arrived`` and the bytes from whoever sees the model.

    index: from 1. stage: its name. clients: that took part. arrived: whose uploads count.
    released: False where too few answered: then nothing was opened, and nothing was spent.
    bytes_up: of the uploads that arrived. bytes_down: to all clients of the round.
    """

    index: int
    stage: str
    clients: int
    arrived: int
    released: bool
    bytes_up: int
    bytes_down: int


class Federation:
    """An algorithm on a problem, with noise for a budget, round by round.

    Unit, adjacency, view: those of ``terms``. Sensitivity: the algorithm's. Noise: ``release``'s,
    once for every release of a client, from the client's own key. Sampling: ``sampler``'s clients,
    and records inside a client with ``record_rate``. Epsilon comes from the statements alone.

    epsilon, delta: the budget of all rounds together; epsilon None adds no noise.
    noise_multiplier: instead of epsilon, the noise that is seen over how far a unit moves it, in
        every release; the budget is what all rounds come to then.
    sampler: draws the clients of a round; all take part if None.
    record_rate: each record takes part in a round with this probability.
    max_dropouts: how many clients of a round may fail under ``aggregate``.
    batched: compute all clients of a round in one call, or one after the other: the same numbers.
    transport: for simulations of faults.
    seed: for tests: fixes noise and draws, and protects nobody. A sampler has a seed of its own.
    journal: a file that every round is noted in before it is seen. With it, a server that was
        killed counts the rounds after its last checkpoint, and has that many fewer left.

    Raises ValueError for what does not go together, before anything is released.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        terms: Terms,
        *,
        epsilon: float | None,
        delta: float,
        noise_multiplier: float | None = None,
        accountant: str = "pld",
        sampler: PrivateSampler | None = None,
        record_rate: float = 1.0,
        max_dropouts: int = 0,
        batched: bool = True,
        transport: Transport | None = None,
        seed: int | None = None,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        check_fits(problem, terms, sampler)
        check_budget(algorithm, epsilon, noise_multiplier)
        sampling = EveryRecord() if sampler is None else sampler.sampling
        cohort = terms.clients if sampler is None else sampler.expected_batch_size
        # Sums over records that take part by chance are divided by how many do on average.
        terms = replace(
            terms,
            records=terms.records * record_rate,
            sampled=sampler is not None,
            records_sampled=record_rate < 1,
            cohort=float(cohort),
            layers=problem.layers,
        )
        self.algorithm, self.problem, self.terms = algorithm, problem, terms
        self.release = Release(terms, sampling, cohort, max_dropouts, record_rate)
        check_last_cohort(sampler, self.release.required)
        self.stages = algorithm.stages(terms)
        check_stages(self.stages)
        algorithm.check(problem)
        check_central(algorithm, self.stages, self.release)
        theta = problem.initial()
        kept = algorithm.client_start(terms, theta)
        check_state(algorithm.name, kept, self.release)
        self.void = algorithm.void(terms)
        self.delta = delta
        self.multipliers, self.epsilon_target = self._noise(epsilon, noise_multiplier, accountant)
        for stage in self.stages:
            self.statement(stage)  # what cannot be stated is refused now
        self.accountant = make_accountant(accountant)
        self.batched, self._transport, self._seed = batched, transport, seed
        self._keys = (
            RowKeys(terms.clients) if seed is None else RowKeys.from_seed(seed, terms.clients)
        )
        self._central_key = NoiseKey() if seed is None else NoiseKey.from_seed(seed)
        self._sampler = sampler
        self._cohorts = resuming.endless(sampler) if sampler is not None else None
        self._again: list[int] | None = None  # a cohort of a shuffled epoch that was not released
        self.server: Tensors = algorithm.server_start(terms, theta)
        self._clients: Tensors = {
            name: value.expand(terms.clients, *value.shape).clone() for name, value in kept.items()
        }
        self._prepared = problem
        self._schedule = [stage for stage in self.stages for _ in range(stage.rounds)]
        self._position = 0  # rounds that were released
        self._journal = None if journal is None else Journal(journal)
        self.rounds_begun = 0
        self.faults: Counter[str] = Counter()
        self.bytes_up = self.bytes_down = 0
        self.seconds = 0.0

    def _noise(
        self, epsilon: float | None, multiplier: float | None, accountant: str
    ) -> tuple[dict[str, float], float | None]:
        """Return each stage's noise multiplier and the budget of all rounds, None without one."""
        if multiplier is None:
            found = calibrate(self.release, self.stages, epsilon, self.delta, accountant)
            return found, epsilon
        if epsilon is not None:
            raise ValueError(
                f"Federation: epsilon and noise_multiplier exclude each other, got {epsilon} and "
                f"{multiplier}; pass epsilon=None with a multiplier"
            )
        check_finite("Federation", "noise_multiplier", multiplier, above=0.0)
        return {stage.name: multiplier for stage in self.stages}, spent_by_all(
            self.release, self.stages, multiplier, self.delta, accountant
        )

    @property
    def finished(self) -> bool:
        """Whether every round that was planned has been released."""
        return self._position == len(self._schedule)

    @property
    def rounds_released(self) -> int:
        """How many rounds the server has learnt from, those before training included."""
        return self._position

    @property
    def rounds_planned(self) -> int:
        """How many rounds there are in all."""
        return len(self._schedule)

    def epsilon(self, *, within: float = 0.0) -> float | None:
        """Return what was spent so far; None where there is no guarantee."""
        try:
            spent = self.accountant.epsilon(self.delta, within=within)
        except NotPrivate:
            return None
        return None if spent == math.inf else spent

    def claimed_epsilon(self) -> float | None:
        """Return the epsilon that the paper would claim for a statement that is void."""
        claimed = make_accountant(self.accountant.name)
        claimed.replace([(replace(s, void=None), n) for s, n in self.accountant.history])
        spent = claimed.epsilon(self.delta)
        return None if spent == math.inf else spent

    def model(self) -> Tensor:
        """Return the parameters that are handed out."""
        return self.algorithm.model(self.server)

    def accuracy(self, personal_parts: int = 1) -> float:
        """Return accuracy of the model on the public test part.

        Where models are personal it is the mean over all clients of their own models' accuracy. It
        is of private models then: epsilon does not cover it.

        personal_parts: cut the test part into so many and measure personal models on one each, in
            turn: an estimate of the same mean for a fraction of its time.
        """
        problem = self._prepared
        if self._position < self.stages[0].rounds:
            # The server's state stands for the problem after the first stage from the beginning.
            problem = self.algorithm.prepared(self.problem, self.server)
        if not self.algorithm.personal:
            return problem.accuracy(self.model())
        total = 0.0
        for client in range(self.terms.clients):
            state = {name: value[client : client + 1] for name, value in self._clients.items()}
            own = self.algorithm.personal_models(self.server, state)[0]
            total += problem.accuracy(own, slice(client % personal_parts, None, personal_parts))
        return total / self.terms.clients

    def statement(self, stage: Stage) -> Statement:
        """Return what one round of ``stage`` tells, all its releases together."""
        return self.release.statement(stage, self.multipliers[stage.name], self.void)

    def round(self) -> Round:
        """Run the next round.

        Raises RuntimeError after the last one: the budget is for the rounds that were planned.
        """
        if self.finished:
            raise RuntimeError(
                f"Federation.round: all {len(self._schedule)} rounds were released; the budget is "
                "for these"
            )
        begun = time.perf_counter()
        stage = self._schedule[self._position]
        self.rounds_begun += 1
        ids = self._drawn()
        sent = self.algorithm.broadcast(stage, self.server)
        own = self.algorithm.sent_to(stage, self.server, ids)
        if self.terms.view == "each_upload":
            # Uploads are seen one by one as they come, whatever becomes of the round.
            self._account(stage)
        uploads, state = self._clients_step(stage, ids, sent, own)
        received = self._received(ids, uploads)
        released = len(received.clients) >= self.release.required
        if released:
            self._open(stage, ids, received, state, own)
        up = _bytes(received.uploads)
        common = [value for name, value in sent.items() if name not in own]
        down = len(ids) * sum(map(_bytes, common)) + sum(map(_bytes, own.values()))
        self.bytes_up, self.bytes_down = self.bytes_up + up, self.bytes_down + down
        self.faults += received.faults
        self.seconds += time.perf_counter() - begun
        return Round(
            self.rounds_begun, stage.name, len(ids), len(received.clients), released, up, down
        )

    def _drawn(self) -> Tensor:
        """Return the clients of the next round, ascending.

        A shuffled epoch is accounted as one exposure of every client, so its cohorts must keep to
        the epochs that the accountant counts: one that was not released is asked again.
        """
        if self._cohorts is None or self._sampler is None:
            return torch.arange(self.terms.clients)
        cohort = self._again if self._again is not None else sorted(next(self._cohorts))
        self._again = cohort if self._sampler.finishes_epochs else None
        return torch.tensor(cohort, dtype=torch.int64)

    def _account(self, stage: Stage) -> None:
        self._again = None
        if self._journal is not None:
            self._journal.note(self.rounds_begun, stage.name)
        self.accountant.compose(self.statement(stage), self.release.steps(stage))

    def _clients_step(
        self, stage: Stage, ids: Tensor, sent: Tensors, own: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Return what the clients ``ids`` upload and their new state, all at once or in turn."""
        keys, counters = self._keys.reserve(ids, stage.releases)
        draws = RecordDraws(
            self._prepared,
            ids,
            self.release.record_rate,
            self._bits("records"),
            redrawn=self.release.redraws(stage),
        )
        std = self.release.client_std(stage, self.multipliers[stage.name])
        state = {name: value[ids] for name, value in self._clients.items()}
        chance = self._bits("chance")
        seeds = functools.cache(lambda: chance.take(self.terms.clients, torch.int64)[ids])

        def step(row: int | None) -> tuple[Tensor, Tensors]:
            rows = slice(None) if row is None else slice(row, row + 1)
            noise = ClientNoise(stage, std, keys[rows], counters[rows])
            draw = draws.of(row)
            visit = Visit(
                stage,
                self.terms,
                self._prepared,
                draw(),
                {name: value[rows] for name, value in state.items()},
                sent | {name: value[rows] for name, value in own.items()},
                noise,
                draw,
                lambda: seeds()[rows],
                std,
            )
            found = self.algorithm.client(visit)
            noise.check_used(self.algorithm.name, found[0])
            return found

        if self.batched or len(ids) == 0:
            return step(None)
        parts = [step(row) for row in range(len(ids))]
        states = {name: torch.cat([part[1][name] for part in parts]) for name in state}
        return torch.cat([part[0] for part in parts]), states

    def _received(self, ids: Tensor, uploads: Tensor) -> Received:
        if self._transport is None:
            return collect_rows(ids, uploads)
        messages = self._transport(self.rounds_begun, ids, uploads)
        shape = tuple(uploads.shape[1:])
        return collect(messages, ids, self.rounds_begun, shape, uploads.dtype)

    def _open(
        self, stage: Stage, ids: Tensor, received: Received, state: Tensors, own: Tensors
    ) -> None:
        """Account for the sum, open it, and let the server and the clients go on from it."""
        if self.terms.view == "aggregate":
            self._account(stage)
        total, multiplier = received.total(), self.multipliers[stage.name]
        if self.release.central:
            std = self.release.sum_std(stage, multiplier)
            add_gaussian_noise_(total, std, self._central_key)
        clients = received.clients
        std_of_mean = self.release.mean_std(stage, multiplier, len(clients))
        seen = Seen(total / self.release.cohort, std_of_mean)
        void = self.void is not None and not self.release.central
        if self.terms.view == "each_upload" or void:
            rows = torch.searchsorted(ids, clients)
            sent = {name: value[rows] for name, value in own.items()}
            seen = replace(seen, clients=clients, uploads=received.uploads, own=sent)
        self.server = self.algorithm.server(stage, self.terms, self.server, seen)
        for name, value in state.items():
            self._clients[name][ids] = value
        self._position += 1
        if self._position < len(self._schedule) and stage is not self._schedule[self._position]:
            self._prepared = self.algorithm.prepared(self.problem, self.server)

    def _bits(self, what: str) -> Bits:
        if self._seed is None:
            return Bits()
        return Bits(f"{self._seed}/{what}/{self.rounds_begun}")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that goes on: see ``resuming.state_of``."""
        return resuming.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint: same epsilon, never the same noise (but from a fixed seed).

        Rounds after the checkpoint that the journal has are counted, and as many of those that are
        left are given up, so that the budget holds. Without a journal they are repeated and counted
        once, which is right only where nobody saw them, as in a simulation.

        Raises ValueError for the state of another algorithm, other terms or another budget.
        """
        resuming.restore(self, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict`` to ``path``, as a whole or not at all."""
        from dpkernels.run.checkpoint import write_atomically

        write_atomically(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what ``save`` wrote."""
        from dpkernels.run.checkpoint import read

        self.load_state_dict(read(path))


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()
