"""Which records of a round's clients take part: drawn once for the round, or for every release."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpkernels.federated.problem import Cohort, Problem
from dpkernels.privacy.draws import Bits


class RecordDraws:
    """Cohorts of the clients ``ids``, in which each record is with probability ``rate``.

    redrawn: whether every call of ``next`` draws anew; else all calls return the first draw.
    """

    def __init__(
        self, problem: Problem, ids: Tensor, rate: float, bits: Bits, *, redrawn: bool
    ) -> None:
        self._problem, self._ids, self._rate, self._bits = problem, ids, rate, bits
        self._redrawn = redrawn
        self._drawn: list[Cohort] = []

    def at(self, index: int) -> Cohort:
        """Return draw ``index``: the same one however often it is asked for."""
        index = index if self._redrawn else 0
        while len(self._drawn) <= index:
            bits = self._bits if self._rate < 1 else None
            self._drawn.append(self._problem.cohort(self._ids, self._rate, bits))
        return self._drawn[index]

    def of(self, row: int | None) -> Callable[[], Cohort]:
        """Return what gives one draw after the other: of all clients, or of client ``row``."""
        count = iter(range(1 << 62))

        def following() -> Cohort:
            cohort = self.at(next(count))
            return cohort if row is None else self._problem.only(cohort, row)

        return following
