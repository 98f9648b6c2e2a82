"""How the stages of an algorithm become private: which noise, added by whom, and the statement.

``each_upload``: whoever sees uploads sees all of them, and who sent them. Each upload carries all
the noise it needs: N(0, (m S)^2), with m the noise multiplier and S the upload's own sensitivity.

``aggregate``: only the sum is seen. Each client of a round adds N(0, (m S)^2 / required), where
``required`` clients must answer or nothing is released; more answers mean more noise than needed.
Clients that tell the server their own shares take them out of the sum: count them as dropouts.
The number of clients in a round is fixed and public then. Where each client is drawn by chance
(Poisson), their number is not public, and the noise of the sum must not depend on it: whoever
draws the clients, and is trusted with who they are, adds N(0, (m S)^2) once to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpkernels.federated.contract import Stage, Terms
from dpkernels.ops.noise import UNREACHABLE_MASS
from dpkernels.privacy.accountants import Accountant, make_accountant
from dpkernels.privacy.calibration import calibrate_noise_scale
from dpkernels.privacy.mechanism import GaussianQuery, Poisson, Sampling, Statement


@dataclass(frozen=True)
class Release:
    """Who takes part in a round, what is seen of it, and how much noise that asks for.

    sampling: how the clients of a round are drawn.
    cohort: how many clients a round has, in expectation; what sums are divided by.
    max_dropouts: how many of them may fail under ``aggregate`` while the round is released.
    record_rate: the probability with which a client's record takes part in a round.
    """

    terms: Terms
    sampling: Sampling
    cohort: float
    max_dropouts: int = 0
    record_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_dropouts < max(1, self.cohort):
            raise ValueError(
                f"max_dropouts must be from 0 to less than the {self.cohort:g} clients of a round, "
                f"got {self.max_dropouts}"
            )
        if not 0 < self.record_rate <= 1:
            raise ValueError(f"record_rate must be in (0, 1], got {self.record_rate}")

    @property
    def central(self) -> bool:
        """Whether the noise is added to the sum, once, and not by the clients."""
        return self.terms.view == "aggregate" and isinstance(self.sampling, Poisson)

    @property
    def required(self) -> int:
        """How many clients must answer for a round to be released."""
        if self.terms.view == "each_upload" or self.central:
            return 0
        return math.ceil(self.cohort) - self.max_dropouts

    def sum_std(self, stage: Stage, multiplier: float) -> float:
        """Return the noise that what is seen must have at least."""
        return multiplier * stage.query.moved(self.terms.adjacency)

    def client_std(self, stage: Stage, multiplier: float) -> float:
        """Return the noise that each client adds to every element of its release."""
        if self.central:
            return 0.0
        shares = self.required if self.terms.view == "aggregate" else 1
        return self.sum_std(stage, multiplier) / math.sqrt(shares)

    def mean_std(self, stage: Stage, multiplier: float, arrived: int) -> float | None:
        """Return the noise in every element of the mean of ``arrived`` uploads over ``cohort``.

        None where uploads are made of releases. Where noise is added to the sum it does not depend
        on how many arrived, which is secret there.
        """
        if not stage.uploaded:
            return None
        if self.central:
            return self.sum_std(stage, multiplier) / self.cohort
        return self.client_std(stage, multiplier) * math.sqrt(arrived) / self.cohort

    def redraws(self, stage: Stage) -> bool:
        """Return whether every release of a round draws its records anew."""
        return stage.redrawn and self.terms.unit == "record" and self.record_rate < 1

    def steps(self, stage: Stage) -> int:
        """Return how many steps a round of ``stage`` counts as."""
        return stage.releases if self.redraws(stage) else 1

    def statement(self, stage: Stage, multiplier: float, void: str | None = None) -> Statement:
        """Return what one step of ``stage`` tells whoever sees it; a round has ``steps(stage)``.

        All releases of a round are one step where clients and records are drawn once for all of
        them: ``releases`` steps that each draw anew would be amplified more, and spread over a
        shuffled epoch. Where records are drawn anew for each, each is a step.

        Under ``each_upload`` that is one client's upload: a unit is with one client, and what the
        others upload does not depend on it.
        """
        draws = math.prod(stage.query.shape)
        if self.terms.view == "aggregate" and not self.central:
            draws *= math.ceil(self.cohort)
        query = GaussianQuery(
            stage.query.moved(self.terms.adjacency),
            self.sum_std(stage, multiplier),
            draws * UNREACHABLE_MASS,
        )
        facts: dict[str, Any] = {"sampling": self.sampling, "sampled": "clients"}
        if self.terms.unit == "record" and self.record_rate < 1:
            facts = {"sampling": Poisson(self.record_rate), "sampled": "records"}
        return Statement(
            (query,) * (stage.releases // self.steps(stage)),
            adjacency=self.terms.adjacency,
            unit=self.terms.unit,
            view=self.terms.view,
            void=void,
            **facts,
        )


def check_stages(stages: tuple[Stage, ...]) -> None:
    """Raise ValueError unless there are stages and their shares add up to 1."""
    if not stages or not math.isclose(sum(stage.share for stage in stages), 1, rel_tol=1e-9):
        raise ValueError(f"shares of the stages must add up to 1, got {stages}")
    if len({stage.name for stage in stages}) != len(stages):
        raise ValueError(f"names of the stages must differ, got {stages}")
    if any(stage.rounds < 1 or stage.releases < 1 or stage.share <= 0 for stage in stages):
        raise ValueError(f"rounds, releases and shares of a stage must be > 0, got {stages}")


def calibrate(
    release: Release,
    stages: tuple[Stage, ...],
    epsilon: float | None,
    delta: float,
    accountant: str,
) -> dict[str, float]:
    """Return each stage's noise multiplier, so that all rounds keep to (epsilon, delta).

    epsilon: None for no noise at all.
    """
    if epsilon is None:
        return {stage.name: 0.0 for stage in stages}
    relative = {s.name: math.sqrt(s.rounds * s.releases / s.share) for s in stages}
    planned = [
        (release.statement(s, relative[s.name]), s.rounds * release.steps(s)) for s in stages
    ]
    scale = calibrate_noise_scale(epsilon, delta, planned, accountant=accountant)
    return {name: scale * value for name, value in relative.items()}


def spent_by_all(
    release: Release,
    stages: tuple[Stage, ...],
    multiplier: float,
    delta: float,
    accountant: str,
) -> float:
    """Return the epsilon of all rounds, every release with this noise multiplier.

    Of a statement that is void it is the claim, not what is guaranteed.
    """
    spent = make_accountant(accountant)
    for stage in stages:
        statement = release.statement(stage, multiplier)
        spent.compose(statement, stage.rounds * release.steps(stage))
    return spent.epsilon(delta)


def affordable(
    accountant: Accountant,
    plan: Sequence[tuple[Statement, int]],
    done: int,
    epsilon: float,
    delta: float,
) -> int:
    """Return how many rounds of ``plan`` the budget has room for, the ``done`` first included.

    plan: what each round tells, and as how many steps. All of it fits unless rounds were seen twice
    (``accountant`` has more than the ``done`` rounds): then the last ones are given up.
    """
    rounds = len(plan)
    while rounds > done:
        planned = make_accountant(accountant.name)
        planned.replace(accountant.history)
        for statement, steps in plan[done:rounds]:
            planned.compose(statement, steps)
        # Calibration rounds up; the order of composition moves the last digits.
        if planned.epsilon(delta) <= epsilon * (1 + 1e-9):
            break
        rounds -= 1
    return rounds
