"""What all accountants share: the history of what was released, and how epsilon is asked for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpkernels.privacy.accountants.exposure import Exposure, History, exposure, unreachable
from dpkernels.privacy.mechanism import NotPrivate, Statement

# Shares of delta that are set aside, the least that is enough, for noise that cannot be drawn. With
# the first epsilon grows by less than 1e-6 of itself, and it is enough for 10^9 elements and 10^5
# steps up to epsilon = 9 at delta = 1e-5. From one to the next epsilon jumps, and a calibration
# ends below it. At epsilon = 50 of one Gaussian release, delta = 1e-5, jumps are 0.006 to 2^-7, 0.1
# to 2^-3 and 0.6 to the last.
_SET_ASIDE = tuple(2.0**-k for k in (20, 10, 8, 7, 6, 5, 4, 3, 2, 1))


def check_delta(delta: float) -> None:
    """Raise ValueError unless ``delta`` is a probability that an accountant can work with."""
    if not 0 < delta < 1:
        raise ValueError(
            f"delta must be in (0, 1), got {delta}; take less than 1 / number of records"
        )


def check_epsilon(epsilon: float, *, zero: bool = False) -> None:
    """Raise ValueError unless ``epsilon`` is finite and positive, or 0 where that is allowed."""
    if not (0 < epsilon < math.inf or (zero and epsilon == 0)):
        wanted = ">= 0" if zero else "> 0"
        raise ValueError(f"epsilon must be finite and {wanted}, got {epsilon}")


def check_steps(steps: int, least: int = 0) -> None:
    """Raise ValueError unless ``steps`` is a whole number, ``least`` or more."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
        raise ValueError(f"steps must be a whole number >= {least}, got {steps!r}")


@dataclass
class _Bracket:
    """Two step counts of a run, and epsilon at both."""

    low: int
    low_epsilon: float
    high: int
    high_epsilon: float

    def stride(self, within: float) -> int:
        """Return how far beyond ``high`` epsilon grows by about ``within``."""
        if self.low_epsilon <= 0 or self.high_epsilon <= self.low_epsilon:
            return max(1, self.high)
        # Locally epsilon grows like steps^power; the tenth spared keeps guesses from failing.
        power = math.log(self.high_epsilon / self.low_epsilon) / math.log(self.high / self.low)
        growth = min(math.log(2), math.log1p(within) / power)
        return max(1, int(0.9 * self.high * math.expm1(growth)))


class Accountant(ABC):
    """Adds up what was released, and says which (epsilon, delta) that amounts to.

    What it says is an upper bound, under the adjacency, for the unit and against the view of the
    statements.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._history: History = []
        self._brackets: dict[tuple[float, float], tuple[int, _Bracket]] = {}

    @property
    def history(self) -> History:
        """Runs of equal steps, oldest first: (statement, steps)."""
        return list(self._history)

    @property
    def steps(self) -> int:
        """How many steps were composed."""
        return sum(steps for _, steps in self._history)

    def compose(self, statement: Statement, steps: int = 1) -> None:
        """Add ``steps`` releases of what ``statement`` says.

        Shuffled steps are taken to go through epochs from end to end. Who leaves an epoch before
        its end and begins another has to compose the rest of it too.

        Raises ValueError where the accountant cannot account ``statement``, or where its adjacency,
        unit or view is not that of the history, because there is no epsilon for two of them.
        """
        check_steps(steps)
        if (reason := self._why_not(statement)) is not None:
            raise ValueError(f"statement: {reason}")
        if self._history:
            first = self._history[0][0]
            for what in ("adjacency", "unit", "view"):
                had, got = getattr(first, what), getattr(statement, what)
                if had != got:
                    raise ValueError(
                        f"statement: {what} must be {had!r}, as in the history, got {got!r}; "
                        "keep an accountant for each, or state both under the same"
                    )
        if steps == 0:
            return
        if self._history and self._history[-1][0] == statement:
            steps += self._history.pop()[1]
        self._history.append((statement, steps))

    def epsilon(self, delta: float, *, within: float = 0.0) -> float:
        """Return epsilon at ``delta`` of all that was composed; inf if a release has no noise.

        within: how much too large the answer may be, relative to the exact one, for calls in every
            step; never too small. Epsilon is then computed at some step counts only, such that it
            grows by at most ``within`` from one to the next, and steps between take the upper one.

        Raises ValueError for arguments out of range, NotPrivate if a statement is void.
        """
        check_delta(delta)
        if not 0 <= within < 1:
            raise ValueError(f"within must be in [0, 1), got {within}; 0.02 allows 2% too much")
        self._check_not_void()
        if within and self._history:
            return self._rough_epsilon(delta, within)
        return self._exact_epsilon(self._history, delta)

    def delta(self, epsilon: float) -> float:
        """Return delta at ``epsilon`` of all that was composed.

        Raises ValueError for an epsilon out of range, NotPrivate if a statement is void.
        """
        check_epsilon(epsilon, zero=True)
        self._check_not_void()
        exposed = exposure(self._history)
        if exposed.is_nothing:
            return 0.0
        if exposed.mu == math.inf:
            return 1.0
        lost = unreachable(self._history)
        added = (1 + math.exp(min(epsilon, 700.0))) * lost if lost else 0.0
        return min(1.0, self._delta_of(exposed, epsilon) + added)

    def state_dict(self) -> dict[str, Any]:
        """Return the history, as JSON has it."""
        runs = [[statement.to_dict(), steps] for statement, steps in self._history]
        return {"accountant": self.name, "history": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the history that ``state_dict`` of any accountant wrote.

        What this one has composed beyond that history stays: it was released, and whoever goes back
        to an earlier model has seen the later ones.
        """
        loaded = [(Statement.from_dict(statement), n) for statement, n in state["history"]]
        self.replace([*loaded, *_beyond(self._history, loaded)])

    def replace(self, history: History) -> None:
        """Forget everything, and compose ``history``."""
        fresh = type(self)()
        for statement, steps in history:
            fresh.compose(statement, steps)
        self._history = fresh._history
        self._brackets.clear()

    def _exact_epsilon(self, history: History, delta: float) -> float:
        exposed = exposure(history)
        if exposed.is_nothing:
            return 0.0
        if exposed.mu == math.inf:
            return math.inf
        lost = unreachable(history)
        if lost == 0:
            return self._epsilon_of(exposed, delta)
        epsilon = 0.0
        for share in _SET_ASIDE:
            # delta(epsilon) + (1 + e^epsilon) lost <= delta, if the second fits into its share.
            largest = share * delta / lost
            # The more is set aside, the larger epsilon is: at least what it was with less.
            if largest <= 2 or epsilon > math.log(largest - 1):
                continue
            epsilon = self._epsilon_of(exposed, (1 - share) * delta)
            if epsilon <= math.log(largest - 1):
                return epsilon
        return math.inf

    def _rough_epsilon(self, delta: float, within: float) -> float:
        *before, (statement, steps) = self._history

        def at(count: int) -> float:
            return self._exact_epsilon([*before, (statement, count)], delta)

        # A history only grows at its end, so its number of runs says which run a bracket is of.
        runs, last = self._brackets.get((delta, within), (0, None))
        if last is None or runs != len(self._history) or not last.low <= steps <= last.high + 1:
            epsilon = at(steps)
            last = _Bracket(steps, epsilon, steps, epsilon)
        elif steps > last.high:
            last = self._next_bracket(last, at, within)
        self._brackets[delta, within] = (len(self._history), last)
        return last.high_epsilon

    @staticmethod
    def _next_bracket(last: _Bracket, at: Any, within: float) -> _Bracket:
        stride = last.stride(within) if last.high > last.low else 1
        while True:
            high = last.high + stride
            epsilon = at(high)
            # Epsilon does not fall with steps: all between are at most ``within`` too large. One
            # step on there is none between.
            if epsilon <= (1 + within) * last.high_epsilon or stride == 1:
                return _Bracket(last.high, last.high_epsilon, high, epsilon)
            stride = max(1, stride // 2)

    def _check_not_void(self) -> None:
        for statement, _ in self._history:
            if statement.void is not None:
                raise NotPrivate(f"there is no epsilon: {statement.void}")

    def _why_not(self, statement: Statement) -> str | None:
        """Return why ``statement`` cannot be accounted, and what to do; None if it can."""
        return None

    @abstractmethod
    def _epsilon_of(self, exposed: Exposure, delta: float) -> float:
        """Return epsilon at ``delta`` where something was released, all of it with noise."""

    @abstractmethod
    def _delta_of(self, exposed: Exposure, epsilon: float) -> float:
        """Return delta at ``epsilon`` where something was released, all of it with noise."""


def _beyond(history: History, earlier: History) -> History:
    """Return what ``history`` has after ``earlier``; all of it, if it does not begin like that."""
    rest = list(history)
    for statement, steps in earlier:
        if not rest or rest[0][0] != statement or rest[0][1] < steps:
            return list(history)
        had = rest.pop(0)[1]
        if had > steps:
            rest.insert(0, (statement, had - steps))
    return rest
