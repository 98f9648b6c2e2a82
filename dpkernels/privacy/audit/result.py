"""What every audit finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuditResult:
    """A lower bound on epsilon.

    epsilon_lower: whatever is (epsilon, delta)-private with a smaller epsilon gives such a result
        with probability at most 1 - ``confidence``.
    """

    epsilon_lower: float
    delta: float
    confidence: float

    def contradicts(self, epsilon: float) -> bool:
        """Return whether ``epsilon``, claimed at the same delta, cannot be true."""
        return self.epsilon_lower > epsilon


def check_levels(delta: float, confidence: float) -> None:
    """Raise ValueError for what is no delta or no confidence."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta}")
    if not 0 < confidence < 1:
        raise ValueError(
            f"confidence must be in (0, 1), got {confidence}; 0.95 allows one wrong alarm in 20"
        )
