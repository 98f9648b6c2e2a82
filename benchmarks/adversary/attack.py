"""What an attack is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Rounding that the contract allows on top of the bound (PRIVACY.md, rule 3).
ROUNDING = 1e-6


@dataclass(frozen=True)
class Claim:
    """What must hold of a figure: ``least <= figure <= most``, in ``unit``."""

    unit: str
    most: float = float("inf")
    least: float = float("-inf")

    def holds(self, figure: float) -> bool:
        """Return whether a figure is within; a NaN is not."""
        return self.least <= figure <= self.most


MOVES = Claim("C", most=1 + ROUNDING)
NOTHING = Claim("private values let out", most=0)


@dataclass(frozen=True)
class Attack:
    """One way to break the guarantee.

    item: of the list of holes, by number. name: what the attack does.
    run: returns the figure. A ValueError or RuntimeError that the library raises is its refusal,
        unless ``refusable`` is False: where a refusal would be no answer.
    """

    item: int
    name: str
    claim: Claim
    run: Callable[[], float]
    refusable: bool = True

    def launch(self) -> Outcome:
        """Run the attack."""
        try:
            figure = float(self.run())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            return Outcome(self.item, self.name, self.claim.unit, None, first_line, self.refusable)
        return Outcome(
            self.item, self.name, self.claim.unit, figure, None, self.claim.holds(figure)
        )


@dataclass(frozen=True)
class Outcome:
    """What an attack found: a figure, or the reason of a refusal; whether the claim held."""

    item: int
    name: str
    unit: str
    figure: float | None
    refused: str | None
    held: bool

    def __str__(self) -> str:
        if self.figure is None:
            return f"refused: {self.refused}"
        return f"{self.figure:.3g} {self.unit}"


def attack(
    item: int, name: str, claim: Claim = MOVES, *, refusable: bool = True
) -> Callable[[Callable[[], float]], Attack]:
    """Make a function that returns a figure an attack."""
    return lambda run: Attack(item, name, claim, run, refusable)
