"""What a run released and what that costs, as JSON and as text."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpkernels.engine.report import Report
from dpkernels.privacy.cross_check import dp_accounting_epsilon
from dpkernels.privacy.mechanism import NotPrivate, Statement

if TYPE_CHECKING:
    from dpkernels.run.private_run import PrivateRun


@dataclass(frozen=True)
class RunReport:
    """The guarantee of a run and how it came about.

    epsilon: None if there is none to be had; ``not_private`` says why.
    epsilon_by_dp_accounting: the same by other people's code; None if it was not asked for.
    releases: what was released and how often, in the order of the run; of a shuffled epoch, batches
        that were handed out before the run count as released.
    clipping: how samples were bounded, and ``max_grad_norm``, as of the last step.
    noise, samples: where noise and batches come from.
    nonfinite_samples: how many were dropped. It depends on the data, and epsilon does not cover it.
    """

    epsilon: float | None
    epsilon_by_dp_accounting: float | None
    delta: float
    not_private: str | None
    accountant: str
    releases: tuple[tuple[Statement, int], ...]
    steps: int
    noise_multiplier: float
    clipping: str
    max_grad_norm: float
    expected_batch_size: float
    sampler: str
    noise: str
    samples: str
    training: Report
    nonfinite_samples: int
    versions: dict[str, str | None]
    seconds: float

    @classmethod
    def of(cls, run: PrivateRun, delta: float, cross_check: bool = False) -> RunReport:
        """Return the report of ``run`` as it stands."""
        from dpkernels import info  # of the command line: importing the package does not need it

        epsilon, checked, reason = None, None, None
        try:
            epsilon = run.epsilon(delta)
            if cross_check:
                checked = dp_accounting_epsilon(run.accountant.history, delta)
        except NotPrivate as error:
            reason = str(error)
        training, sampler = run.training, run.loader.private_sampler
        inner = training.report()
        return cls(
            epsilon,
            checked,
            delta,
            reason,
            run.accountant.name,
            tuple(run.accountant.history),
            training.steps,
            training.noise_multiplier,
            repr(training.clipping),
            training.sensitivity,
            training.expected_batch_size,
            repr(sampler),
            inner.noise,
            "operating system" if sampler.seed is None else f"fixed seed {sampler.seed}",
            inner,
            training.nonfinite_samples,
            info.versions(),
            run.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it in types that JSON knows; what epsilon does not cover stands apart."""
        state = dataclasses.asdict(self)
        for name in ("epsilon", "epsilon_by_dp_accounting"):
            if state[name] == math.inf:
                state[name] = "infinity"  # JSON has no number for it
        state["releases"] = [
            {"statement": statement.to_dict(), "steps": steps} for statement, steps in self.releases
        ]
        state["layers"] = state.pop("training")["layers"]
        state["depends_on_the_data"] = {"nonfinite_samples": state.pop("nonfinite_samples")}
        return state

    def to_json(self) -> str:
        """Return ``to_dict`` as a string."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        checked = self.epsilon_by_dp_accounting
        spent = "none" if self.epsilon is None else f"{self.epsilon:.4g}"
        lines = [
            f"epsilon {spent} at delta {self.delta:g}, by the {self.accountant} accountant"
            + (f" ({self.not_private})" if self.not_private else "")
            + (f"; {checked:.4g} by dp-accounting" if checked is not None else ""),
            f"{self.steps} steps in {self.seconds:.1f} s, noise multiplier "
            f"{self.noise_multiplier:g}, {self.clipping}",
        ]
        for statement, steps in self.releases:
            lines.append(f"  {steps} x {in_words(statement)}")
        lines += [
            f"sampler {self.sampler}, expected batch size {self.expected_batch_size:g}",
            f"noise from {self.noise}; samples drawn with {self.samples}",
            f"{self.nonfinite_samples} samples were not finite and dropped (depends on the data: "
            "not covered by epsilon)",
            ", ".join(f"{name} {version}" for name, version in self.versions.items() if version),
            str(self.training),
        ]
        return "\n".join(lines)


def in_words(statement: Statement) -> str:
    """Return what one step of ``statement`` releases, for people."""
    return (
        f"{statement.unit}, {statement.adjacency}; seen: {statement.view}; noise / sensitivity "
        f"{statement.noise_multiplier:.4g}; {statement.sampling}"
    )
