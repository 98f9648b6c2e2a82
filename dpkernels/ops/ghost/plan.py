"""What the cost model of a layer kind decided, and from which numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """How one layer's norms and clipped sum will be computed.

    formula: ``rank_one``, ``gram``, ``materialised``, or what else a layer kind has.
    flops: of norms and sum together, with that formula.
    bytes: read and written at least, of inputs, factors, what is saved between the two, and sums.
    reason: why that formula, in a sentence.
    alternatives: flops of every formula that applies, the chosen one included.
    """

    formula: str
    flops: int
    bytes: int
    reason: str
    alternatives: dict[str, int] = field(default_factory=dict)
