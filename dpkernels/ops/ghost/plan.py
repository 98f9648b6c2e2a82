"""What the cost model of a layer kind decided, and from which numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dpkernels.ops.factor import Diagonal, Factor, Full


@dataclass(frozen=True)
class Plan:
    """How one layer's norms and clipped sum will be computed.

    formula: ``rank_one``, ``gram``, ``materialised``, or what else a layer kind has.
    flops: of norms and sum together, with that formula.
    bytes: traffic, what norms and sum read and write at least: inputs, factors, what is kept
        between the two, and the sums. What stays in a cache by design is not counted.
    kept_bytes: memory held between norms and sum, beyond activations and errors.
    reason: why that formula, in a sentence.
    alternatives: flops of every formula that applies, the chosen one included.
    """

    formula: str
    flops: int
    bytes: int
    kept_bytes: int
    reason: str
    alternatives: dict[str, int] = field(default_factory=dict)


def sum_bytes(element_bytes: int) -> int:
    """Return the size of an element of transforms and sums: float32 or wider."""
    return max(element_bytes, 4)


def factor_flops(factor: Factor | None) -> int:
    """Return what ``factor`` costs for one vector."""
    if factor is None:
        return 0
    if isinstance(factor, Full):
        return 2 * factor.size**2
    if isinstance(factor, Diagonal):
        return factor.size
    return 4 * factor.size * factor.values.shape[0]


def factor_elements(factor: Factor | None) -> int:
    """Return how many numbers ``factor`` consists of."""
    if factor is None:
        return 0
    if isinstance(factor, Full):
        return factor.size**2
    if isinstance(factor, Diagonal):
        return factor.size
    return (factor.size + 1) * factor.values.shape[0]
