"""A private training and what it has cost so far: engine, loader and accountant in one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpkernels.privacy.accountants import Accountant, make_accountant
from dpkernels.privacy.mechanism import GaussianQuery, Shuffled, Statement, adjacency_of
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
    uncounted. Raises RuntimeError in ``optimizer.step()``, before anything is released, for a
    second step on one batch and for a step on a part of one or on samples of several: none of them
    is the mechanism that the accountant knows.
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
        self._unit = unit
        self._void = void or training.void
        self._stepped_on = loader.batches_handed_out  # the batch that the last step was about
        self._seconds = 0.0
        self._started = time.monotonic()
        self._stop = training.before_release(self._account)

    def statement(self) -> Statement:
        """Return what the next step releases, in units of the bound that samples are clipped to."""
        sampling = self.loader.sampling
        adjacency = adjacency_of(sampling)
        moved = 2.0 if adjacency == "replace-one" else 1.0
        queries = [GaussianQuery(moved, self.training.noise_multiplier)]
        if (count := self.training.extra_query) is not None:
            queries.append(GaussianQuery(moved * count.sensitivity, count.std))
        return Statement(tuple(queries), sampling, adjacency, unit=self._unit, void=self._void)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that has been spent, at ``delta``."""
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

    def _account(self) -> None:
        """Enter the step that is about to be released."""
        samples, batch = self.training.samples, self.loader.batches_handed_out
        if samples > 0 and batch == self._stepped_on:
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
        if 0 < samples < records:
            raise RuntimeError(
                f"optimizer.step(): it has {samples} samples of a batch of {records} records; who "
                "is left out would depend on who else was drawn: send the whole batch through the "
                "model, all of it in one call or each microbatch of the loader in its own"
            )
        statement, steps = self.statement(), 1
        if isinstance(statement.sampling, Shuffled):
            # Epochs are counted by steps, so that a batch which was left out has to count, too.
            steps = max(1, batch - self._stepped_on)
        self._stepped_on = batch
        self.accountant.compose(statement, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside model, optimizer and scheduler."""
        return {
            "training": self.training.state_dict(),
            "accountant": self.accountant.state_dict(),
            "loader": self.loader.state_dict(),
            "stepped_on": self._stepped_on,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint: same epsilon, next batch, noise that was never used."""
        self.training.load_state_dict(state["training"])
        self.accountant.load_state_dict(state["accountant"])
        self.loader.load_state_dict(state["loader"])
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
