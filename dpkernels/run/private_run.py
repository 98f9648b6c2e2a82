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
    uncounted. Raises RuntimeError, in ``optimizer.step()`` before anything is released or when the
    next batch is asked for, for a second step on one batch, for a step on a part of one or on
    samples of several, and, of sampled batches, for one without a step: none of them is the
    mechanism that the accountant knows. All of that is seen from numbers of samples: that they are
    the loader's own, nobody can tell.

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
        self._begun_at = self._stepped_on  # batches handed out before this iteration
        self._stepped = 0  # steps in it
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
        """Stop accounting: of what is released afterwards nobody knows the cost."""
        self._stop()
        if self.loader.watcher is self:
            self.loader.watcher = None

    def begins(self) -> None:
        """Note that the loader begins an iteration; what was left of the last is nobody's."""
        self._begun_at, self._stepped = self.loader.batches_handed_out, 0
        self.training.discard()

    def hands_out(self, records: int) -> None:
        """Check, before another microbatch is handed out, what became of those before.

        records: of its batch, so far.
        """
        self.training.end_calls()
        if records == 0 or self.training.samples == 0:
            self._left_out = records > 0
        elif self.training.samples != records:
            raise RuntimeError(
                f"{records} records of the batch were handed out, but {self.training.samples} "
                "samples went through the model and back; call backward() once for each microbatch"
            )

    def ends(self) -> None:
        """Check, after an epoch, that its last batch had a step, if it had steps at all."""
        if self._stepped:
            self._check_all_stepped_on(self._stepped)

    def _check_all_stepped_on(self, steps: int) -> None:
        """Raise RuntimeError if more batches were handed out in this iteration."""
        handed_out = self.loader.batches_handed_out - self._begun_at
        if handed_out > steps and not isinstance(self.loader.sampling, Shuffled):
            raise RuntimeError(
                f"{handed_out} batches were handed out, but there are {steps} steps: whether there "
                "is a step must not depend on the batch; call step() on empty batches, too, which "
                "makes a step of noise"
            )

    def _count_epoch_so_far(self) -> None:
        """Enter batches of a shuffled epoch that were handed out before this run, as if used."""
        place = self.loader.private_sampler.position
        if 0 < place < len(self.loader) and isinstance(self.loader.sampling, Shuffled):
            self.accountant.compose(self.statement(), place)

    def _account(self) -> None:
        """Enter the step that is about to be released."""
        samples, batch = self.training.samples, self.loader.batches_handed_out
        is_new = batch != self._stepped_on
        if samples > 0 and not is_new:
            raise RuntimeError(
                "optimizer.step(): a second step on the samples of one batch; every step is "
                "accounted for as if its batch were drawn anew: take the next batch from the "
                "loader, or call step() after the last microbatch only (loader.is_last_microbatch)"
            )
        records = self.loader.batch_size_now
        if samples > records:
            raise RuntimeError(
                f"optimizer.step(): it has {samples} samples, but the batch that the loader handed "
                f"out last has {records}; one record in two batches of a step would count twice: "
                "call step() after each batch of the loader, and set its batch size and "
                "max_physical_batch_size instead of adding batches up"
            )
        if 0 < samples < records or (samples and self._left_out):
            raise RuntimeError(
                f"optimizer.step(): it has {samples} samples of a batch of {records} records; who "
                "is left out would depend on who else was drawn: send the whole batch through the "
                "model, all of it in one call or each microbatch of the loader in its own"
            )
        self._check_all_stepped_on(self._stepped + is_new)
        statement, steps = self.statement(), 1
        if isinstance(statement.sampling, Shuffled):
            # Epochs are counted by batches: those that were left out count, too, and a step of
            # noise alone, which is about no batch, does not.
            steps = batch - self._stepped_on
        self._stepped_on = batch
        self._stepped += is_new
        self.accountant.compose(statement, steps)
        self._counted = self.training.steps + 1

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
        self.accountant.load_state_dict(state["accountant"])
        self.loader.load_state_dict(state["loader"])
        self.training.load_state_dict(state["training"])
        if self._counted:
            # Its epochs are others than those of the run that was saved.
            self._name = secrets.token_hex(8)
            self._count_epoch_so_far()
        else:
            self._name = state["name"]
        self._counted = self.training.steps
        self._stepped_on = state["stepped_on"]
        self._seconds, self._started = state["seconds"], time.monotonic()

    def save(
        self, path: str | os.PathLike[str], *, scheduler: Any = None, extra: Any = None
    ) -> None:
        """Write everything that ``load`` needs, as a whole or not at all; see ``checkpoint``."""
        checkpoint.save(path, self, scheduler=scheduler, extra=extra)

    def load(self, path: str | os.PathLike[str], *, scheduler: Any = None) -> Any:
        """Go on where ``save`` was called; return its ``extra``."""
        return checkpoint.load(path, self, scheduler=scheduler)
