"""A private training and what it has cost so far: engine, loader and accountant in one."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpkernels.privacy.accountants import Accountant, make_accountant
from dpkernels.privacy.mechanism import (
    GaussianQuery,
    NotPrivate,
    Shuffled,
    Statement,
    adjacency_of,
)
from dpkernels.run import checkpoint
from dpkernels.run.report import RunReport

if TYPE_CHECKING:
    from dpkernels.engine import PrivateTraining
    from dpkernels.run.loader import PrivateLoader

_SKIPPED = (
    "a batch has no step: the loader was asked for another before. Whether there is a step must "
    "not depend on the batch: call step() on each before the next is taken, on empty ones too, "
    "which makes a step of noise. Do not skip batches, fetch ahead of the step (num_workers does "
    "that soundly), or add samples of several up: set the loader's batch size and "
    "max_physical_batch_size instead of adding batches up. Iterate again: the loader begins with "
    "that batch"
)
_FROM_ELSEWHERE = (
    "the samples come from another loader than the run's: draw every batch from the PrivateLoader "
    "of this run (of dpkernels.opacus, the loader that make_private returned)"
)


class PrivateRun:
    """Private training whose every step is accounted for.

    Unit: one record (``unit``), under the adjacency of the sampler (add/remove for Poisson, replace
    one for batches of fixed size). Seen: every step's noisy gradient, so every model. Sensitivity:
    the engine's bound C, 2 C for replace-one. Noise: N(0, (sigma C)^2) once a step. Sampling: the
    loader's own sampler, which is the one that the accountant is told of.

    training: what ``make_private`` returned.
    loader: where all of its samples come from, each batch for one step.
    accountant: ``pld``, ``rdp`` or ``gaussian``, or an accountant that has counted before.
    unit: what one record stands for.
    void: why there is no guarantee, if there is none; no epsilon is given then.

    A step is entered into the accountant before its noise is drawn, so that nothing is released
    uncounted. The accountant knows one mechanism: every batch that is drawn makes one step, whole.
    So RuntimeError is raised, in ``optimizer.step()`` before anything is released or when the next
    batch is asked for, for

    - a second step on one batch, and samples when no batch was handed out;
    - a step on a part of a batch, on none of it (``zero_grad()`` before ``step()``), or on several;
    - a batch that was handed out and left without a step, once there is a step on a later one.

    A loop may be left at any time, by ``break``, an exception or Ctrl-C. The batch that has no step
    is kept, with the same records, and the next iteration begins with it: to choose batches by what
    is in them would be another mechanism. A pass over the loader without any step is not training
    and costs nothing; the same batch waits afterwards.

    What cannot be seen: samples are told apart by their number, so they are taken to be the
    loader's own; and a process that is killed and resumed from a checkpoint draws afresh. Do not
    let either depend on the records. Messages do not say how many records a batch has.

    Raises ValueError for a training that has taken steps, a loader that another run has, and a
    sampling that the accountant does not know.
    """

    def __init__(
        self,
        training: PrivateTraining,
        loader: PrivateLoader,
        *,
        accountant: str | Accountant = "pld",
        unit: str = "record",
        void: str | None = None,
    ) -> None:
        self.training = training
        self.loader = loader
        self.accountant = make_accountant(accountant) if isinstance(accountant, str) else accountant
        sampler = loader.private_sampler
        if (sampler.rank, sampler.world_size) != (training.rank, training.world_size):
            raise ValueError(
                f"PrivateRun: loader's sampler draws for rank {sampler.rank} of "
                f"{sampler.world_size}, but this process trains as rank {training.rank} of "
                f"{training.world_size}; pass rank= and world_size= to the sampler, so that every "
                "record belongs to one process"
            )
        if loader.max_physical_batch_size and training.world_size > 1 and training.is_sharded:
            raise ValueError(
                "PrivateRun: loader's max_physical_batch_size must be None for a model that is "
                "sharded (fully_shard): ranks would have different numbers of microbatches, and "
                "wait for each other"
            )
        if training.steps:
            raise ValueError(
                f"PrivateRun: training has taken {training.steps} steps that nobody has counted; "
                "make the run after make_private, before the first step"
            )
        if loader.watcher is not None:
            raise ValueError("PrivateRun: loader belongs to another run; call close() on that")
        self._unit = unit
        self._void = void
        self._name = secrets.token_hex(8)
        self._counted = 0  # steps, as the training counts them
        self._stepped_on = loader.batches_handed_out  # the batch that the last step was about
        self._handed_out_before = self._stepped_on  # by the loader, before this run
        self._claimed = False  # whether the step that was counted last is about the waiting batch
        self._stepped = False  # whether there was a step in this iteration
        self._left_out = False  # whether nothing was made of an earlier microbatch of the batch
        self._seconds = 0.0
        self._started = time.monotonic()
        self.accountant.compose(self.statement(), 0)
        self._count_epoch_so_far()
        loader.watcher = self
        self._stop = training.before_release(self._account)

    def statement(self) -> Statement:
        """Return what the next step releases, in units of the bound that samples are clipped to."""
        sampling = self.loader.sampling
        if isinstance(sampling, Shuffled):
            sampling = dataclasses.replace(sampling, run=self._name)
        adjacency = adjacency_of(sampling)
        moved = 2.0 if adjacency == "replace-one" else 1.0
        noise, unreachable = self.training.noise_multiplier, self.training.unreachable_mass
        queries = [GaussianQuery(moved, noise, unreachable)]
        if (count := self.training.extra_query) is not None:
            queries.append(GaussianQuery(moved * count.sensitivity, count.std))
        void = self._void or self.training.void
        return Statement(tuple(queries), sampling, adjacency, unit=self._unit, void=void)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that has been spent, at ``delta``.

        Raises NotPrivate if steps were taken after ``close()``, or there is no guarantee at all.
        """
        if self.training.steps > self._counted:
            raise NotPrivate(
                f"{self.training.steps - self._counted} steps were taken that this run has not "
                "counted, after close()"
            )
        return self.accountant.epsilon(delta)

    def report(self, delta: float, *, cross_check: bool = False) -> RunReport:
        """Return the mechanism, its cost at ``delta``, and how it was run.

        cross_check: ask dp-accounting, too, which takes seconds.
        """
        return RunReport.of(self, delta, cross_check)

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, over all restarts."""
        return self._seconds + time.monotonic() - self._started

    def close(self) -> None:
        """Stop accounting: of what is released afterwards nobody knows the cost.

        A batch that has no step yet goes on waiting in the loader, for the next run.
        """
        self.settle()
        self._stop()
        if self.loader.watcher is self:
            self.loader.watcher = None

    @property
    def waits(self) -> bool:
        """Whether a batch was handed out that has no step yet."""
        self.settle()
        return self.loader.waiting is not None

    def begins(self) -> None:
        """Note that the loader begins an iteration; what was left of the last is forgotten."""
        self._stepped = self._left_out = False
        self.training.discard()

    def settle(self) -> None:
        """Let the loader go on from the batch that waits, if its step was released."""
        # A step that was counted and then failed has released nothing: its batch still waits.
        if self._claimed and self.training.steps == self._counted:
            self.loader.waiting = None
            self._claimed = False

    def hands_out(self, records: int) -> None:
        """Check, before another microbatch is handed out, what became of those before.

        records: of its batch, so far.
        """
        self.training.end_calls()
        if records == 0 or self.training.samples == 0:
            self._left_out = records > 0
        elif self.training.samples != records:
            raise RuntimeError(
                "the microbatches of the batch that were handed out do not have as many records as "
                "samples went through the model and back; call backward() once for each microbatch"
            )

    def ends(self) -> None:
        """Check, after an epoch, that its last batch had a step, if it had steps at all."""
        if self._stepped and self.loader.waiting is not None:
            raise RuntimeError(f"the epoch ended, and {_SKIPPED}")

    def _count_epoch_so_far(self) -> None:
        """Enter batches of a shuffled epoch that were handed out before this run, as if used."""
        place = self.loader.private_sampler.position
        if 0 < place < len(self.loader) and isinstance(self.loader.sampling, Shuffled):
            self.accountant.compose(self.statement(), place)

    def _account(self) -> None:
        """Enter the step that is about to be released."""
        self.settle()
        about_batch = self._is_about_a_batch()
        batch = self.loader.batches_handed_out
        statement, steps = self.statement(), 1
        if isinstance(statement.sampling, Shuffled):
            # Epochs are counted by batches: those handed out before this run count, too, and a step
            # of noise alone, which is about no batch, does not.
            steps = batch - self._stepped_on
        self.accountant.compose(statement, steps)
        self._stepped_on = batch
        self._stepped |= about_batch
        self._claimed = about_batch
        self._counted = self.training.steps + 1

    def _is_about_a_batch(self) -> bool:
        """Return whether the step is about the waiting batch, whole, or noise between two batches.

        Raises RuntimeError if it is neither. Messages have no number of records.
        """
        loader, samples = self.loader, self.training.samples
        if loader.waiting is None:
            if samples == 0:
                return False
            if loader.batches_handed_out == self._handed_out_before or (
                samples != loader.batch_size_now
            ):
                raise RuntimeError(f"optimizer.step(): {_FROM_ELSEWHERE}")
            raise RuntimeError(
                "optimizer.step(): a second step on the samples of one batch, or samples from "
                "another loader; every step is accounted for as if its batch were drawn anew: take "
                "the next batch from the loader, or call step() after the last microbatch only "
                "(loader.is_last_microbatch)"
            )
        if not loader.is_at_waiting:
            raise RuntimeError(f"optimizer.step(): {_SKIPPED}")
        if samples > loader.batch_size_now:
            raise RuntimeError(
                "optimizer.step(): it has more samples than the batch that the loader handed out "
                f"last. Either {_FROM_ELSEWHERE}; or one batch went through the model twice: one "
                "record would count twice"
            )
        if samples < loader.batch_size_now or self._left_out:
            raise RuntimeError(
                "optimizer.step(): it does not have all samples of the batch that the loader "
                "handed out last; who is left out would depend on who else was drawn: send the "
                "whole batch through the model and back, in one call or each microbatch of the "
                "loader in its own, and do not call zero_grad() before step(). Samples that are "
                "not finite need no check: they count as zero"
            )
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside model, optimizer and scheduler."""
        return {
            "name": self._name,
            "training": self.training.state_dict(),
            "accountant": self.accountant.state_dict(),
            "loader": self.loader.state_dict(),
            "stepped_on": self._stepped_on,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint: same epsilon, next batch, noise that was never used.

        Steps that this run has taken beyond the checkpoint stay counted. The accountant comes
        first: if something else does not fit, epsilon is too large, not too small.
        """
        self.settle()
        self.accountant.load_state_dict(state["accountant"])
        self.loader.load_state_dict(state["loader"])
        self.training.load_state_dict(state["training"])
        if self._counted:
            # Its epochs are others than those of the run that was saved.
            self._name = secrets.token_hex(8)
            self._count_epoch_so_far()
        else:
            self._name = state["name"]
        self._counted, self._claimed = self.training.steps, False
        self._stepped_on = self._handed_out_before = state["stepped_on"]
        self._seconds, self._started = state["seconds"], time.monotonic()

    def save(
        self, path: str | os.PathLike[str], *, scheduler: Any = None, extra: Any = None
    ) -> None:
        """Write everything that ``load`` needs, as a whole or not at all; see ``checkpoint``."""
        checkpoint.save(path, self, scheduler=scheduler, extra=extra)

    def load(self, path: str | os.PathLike[str], *, scheduler: Any = None) -> Any:
        """Go on where ``save`` was called; return its ``extra``."""
        return checkpoint.load(path, self, scheduler=scheduler)
