"""Our accountants, which are told statements, and Opacus' interface, which knows rates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from dpkernels.opacus.accountants.accountant import IAccountant, Step
from dpkernels.privacy.accountants import Accountant, make_accountant
from dpkernels.privacy.calibration import UNREACHABLE
from dpkernels.privacy.mechanism import (
    Poisson,
    Shuffled,
    Statement,
    WithoutReplacement,
    gaussian_step,
)


class StatementAccountant(IAccountant):
    """An accountant of ours behind Opacus' interface.

    accountant: it; ``PrivateRun`` tells it of every step before noise is drawn.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.accountant: Accountant = make_accountant(self.name)

    @property
    def history(self) -> list[Step]:
        """(noise multiplier, sample rate, steps), to be read, or set for Poisson sampling.

        Of other samplings the rate is the part of the records that a step sees, which does not say
        how they were drawn: ``accountant.history`` does.
        """
        return [
            (statement.noise_multiplier, _rate(statement), steps)
            for statement, steps in self.accountant.history
        ]

    @history.setter
    def history(self, history: Sequence[Step]) -> None:
        # Into the same object: a run that is under way tells this one.
        self.accountant.replace(_statements(history))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Add one step whose samples were drawn by Poisson sampling.

        The noise is taken as that of a model of up to 2^30 elements.
        """
        self.accountant.compose(_step(noise_multiplier, sample_rate))

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Optimizer], None]:
        """Return a hook for ``DPOptimizer.attach_step_hook`` that adds each step at this rate.

        ``make_private`` accounts for its steps itself: attached there, it counts them twice.
        """

        def hook(optimizer: Optimizer) -> None:
            own: Any = optimizer
            mass = own.training.unreachable_mass
            self.accountant.compose(_step(own.noise_multiplier, sample_rate, mass))

        return hook

    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Return an upper bound of the epsilon spent so far, at ``delta``.

        Opacus' other arguments (orders, errors of a discretisation) are taken and not needed.
        """
        return self.accountant.epsilon(delta)

    def __len__(self) -> int:
        return len(self.accountant.history)

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what Opacus' has, and the statements, which it has no words for."""
        destination = super().state_dict(destination)
        destination["statements"] = self.accountant.state_dict()
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with ``state_dict``: ours, or Opacus', whose steps are taken as Poisson-sampled.

        Opacus writes the same for ``poisson_sampling=False``, of which that is not true: a warning.
        """
        self.check_state(state_dict)
        if "statements" in state_dict:
            self.accountant.load_state_dict(state_dict["statements"])
            return
        theirs = make_accountant(self.name)
        theirs.replace(_statements(state_dict["history"]))
        self.accountant.load_state_dict(theirs.state_dict())
        if theirs.steps:
            warnings.warn(
                "load_state_dict: a history that Opacus wrote does not say how records were "
                "sampled, and is taken as Poisson sampling; if it was poisson_sampling=False, "
                "epsilon is larger than what is reported",
                stacklevel=2,
            )


class RateAccountant:
    """An accountant of the caller's, which knows rates, where a run wants one of ours.

    It is told nothing of the noise that no generator draws: its epsilon is that of exact noise. The
    guarantee holds with delta larger by (1 + e^epsilon) times ``training.unreachable_mass`` of all
    steps.
    """

    def __init__(self, accountant: IAccountant) -> None:
        self._accountant = accountant
        self.name = accountant.mechanism()

    def compose(self, statement: Statement, steps: int = 1) -> None:
        """Add steps; raise ValueError for a sampling that a rate does not describe."""
        if not isinstance(statement.sampling, Poisson):
            raise ValueError(
                f"accountant: {self.name!r} knows Poisson sampling only, got {statement.sampling}; "
                "pass poisson_sampling=True, or accountant='prv' or 'rdp'"
            )
        for _ in range(steps):
            self._accountant.step(
                noise_multiplier=statement.noise_multiplier, sample_rate=statement.sampling.rate
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the caller's."""
        return self._accountant.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the caller's."""
        self._accountant.load_state_dict(state)


def for_run(accountant: IAccountant) -> Any:
    """Return what ``PrivateRun`` tells of every step."""
    if isinstance(accountant, StatementAccountant):
        return accountant.accountant
    return RateAccountant(accountant)


def _statements(history: Sequence[Step]) -> list[tuple[Statement, int]]:
    """Return Opacus' (noise multiplier, sample rate, steps) as statements."""
    return [(_step(sigma, rate), steps) for sigma, rate, steps in history]


def _step(sigma: float, rate: float, unreachable: float = UNREACHABLE) -> Statement:
    return gaussian_step(sigma, Poisson(rate), unreachable=unreachable)


def _rate(statement: Statement) -> float:
    sampling = statement.sampling
    if isinstance(sampling, Poisson):
        return sampling.rate
    if isinstance(sampling, Shuffled):
        return 1 / sampling.batches
    if isinstance(sampling, WithoutReplacement):
        return sampling.batch / sampling.population
    return 1.0
