"""The cost model of the linear layer: which formula is the cheapest for a shape.

B samples, T positions, I inputs (one more with a homogeneous coordinate), O outputs; ``t(n)`` is
what the factor of a side costs for a vector: 2 n^2 flops ``Full``, 4 n r ``LowRank``, n
``Diagonal``. Flops of norms and sum:

================  ==========================================================
``rank_one``      T = 1: B (t(I) + t(O) + 2 I + 2 O) + 2 B I O
``gram``          B T (t(I) + t(O)) + B T (T + 1) (I + O) + 2 B T I O
``materialised``  stored: transforms + 2 B T I O + 4 B I O, the transforms of
                  the vectors, B T (t(I) + t(O)), or of the gradients,
                  B (O t(I) + I t(O)); not stored: B T (t(I) + t(O)) + 4 B T I O
================  ==========================================================

Gram matrices are symmetric, so half of each suffices. Gradients are stored between norms and sum
only if they take at most half of what activations and errors take, I O <= T (I + O) / 2: about
where ``materialised`` begins to beat ``gram``, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpkernels.ops.factor import Factor
from dpkernels.ops.ghost.plan import Plan, factor_elements, factor_flops, sum_bytes

FORMULAS = ("rank_one", "gram", "materialised")


@dataclass(frozen=True)
class Sizes:
    """B, T, I and O of a call; I counts the homogeneous coordinate, if there is one."""

    batch: int
    positions: int
    inputs: int
    outputs: int


def stores_gradients(sizes: Sizes) -> bool:
    """Return whether per-sample gradients are small: at most half of activations and errors."""
    positions, inputs, outputs = sizes.positions, sizes.inputs, sizes.outputs
    return 2 * inputs * outputs <= positions * (inputs + outputs)


def transforms_gradients(sizes: Sizes, left: Factor | None, right: Factor | None) -> bool:
    """Return whether factors cost less on stored gradients than on the positions' vectors."""
    a, d = factor_flops(right), factor_flops(left)
    return sizes.outputs * a + sizes.inputs * d < sizes.positions * (a + d)


def formula_flops(sizes: Sizes, left: Factor | None, right: Factor | None) -> dict[str, int]:
    """Return the flops of every formula that applies, as in the table above."""
    batch, positions = sizes.batch, sizes.positions
    inputs, outputs = sizes.inputs, sizes.outputs
    a, d = factor_flops(right), factor_flops(left)
    product = 2 * batch * positions * inputs * outputs
    vectors = batch * positions * (a + d)
    flops = {}
    if positions == 1:
        flops["rank_one"] = vectors + 2 * batch * (inputs + outputs) + product
    flops["gram"] = vectors + batch * positions * (positions + 1) * (inputs + outputs) + product
    if not stores_gradients(sizes):
        flops["materialised"] = vectors + 2 * product
    elif transforms_gradients(sizes, left, right):
        gradients = batch * (outputs * a + inputs * d)
        flops["materialised"] = gradients + product + 4 * batch * inputs * outputs
    else:
        flops["materialised"] = vectors + product + 4 * batch * inputs * outputs
    return flops


def cheapest(sizes: Sizes, left: Factor | None, right: Factor | None) -> str:
    """Return the formula with the fewest flops; rank-one wherever it applies."""
    if sizes.positions == 1:
        return "rank_one"
    flops = formula_flops(sizes, left, right)
    return "gram" if flops["gram"] <= flops["materialised"] else "materialised"


def linear_plan(
    activations: Sequence[int],
    errors: Sequence[int],
    *,
    left: Factor | None = None,
    right: Factor | None = None,
    bias: bool = True,
    element_bytes: int = 4,
) -> Plan:
    """Return what ``linear_norms(..., formula="auto")`` does for such shapes. No tensor is touched.

    activations, errors: the shapes ``[B, *, I]`` and ``[B, *, O]``.
    left, right, bias: as for ``linear_norms``.
    element_bytes: size of an element of activations and errors.
    """
    sizes = sizes_of(activations, errors, right, bias)
    flops = formula_flops(sizes, left, right)
    formula = cheapest(sizes, left, right)
    stored = formula == "materialised" and stores_gradients(sizes)
    apart = bias and sizes.inputs == activations[-1]
    return Plan(
        formula=formula,
        flops=flops[formula],
        bytes=_traffic(sizes, left, right, stored, element_bytes),
        kept_bytes=_kept(sizes, left, right, stored, apart, element_bytes),
        reason=_reason(formula, sizes),
        alternatives=flops,
    )


def sizes_of(
    activations: Sequence[int], errors: Sequence[int], right: Factor | None, bias: bool
) -> Sizes:
    """Return the sizes of a call on such shapes."""
    positions = 1
    for size in activations[1:-1]:
        positions *= size
    homogeneous = bias and right is not None and right.size == activations[-1] + 1
    return Sizes(activations[0], positions, activations[-1] + int(homogeneous), errors[-1])


def _traffic(
    sizes: Sizes, left: Factor | None, right: Factor | None, stored: bool, element_bytes: int
) -> int:
    wide = sum_bytes(element_bytes)
    vectors = sizes.batch * sizes.positions * (sizes.inputs + sizes.outputs)
    gradient = sizes.inputs * sizes.outputs
    factors = left is not None or right is not None
    total = vectors * element_bytes
    total += wide * (factor_elements(left) + factor_elements(right) + gradient)
    if stored:
        # Gradients are written, and read for the norms and for the sum; factors read and write
        # either them or the vectors once more.
        late = transforms_gradients(sizes, left, right)
        transformed = sizes.batch * gradient if late else vectors
        return total + wide * (3 * sizes.batch * gradient + 2 * transformed * factors)
    # Vectors are read for the norms and for the sum, and before that written if transformed.
    return total + (3 * vectors * wide if factors else vectors * element_bytes)


def _kept(
    sizes: Sizes,
    left: Factor | None,
    right: Factor | None,
    stored: bool,
    apart: bool,
    element_bytes: int,
) -> int:
    wide = sum_bytes(element_bytes)
    if stored:
        return wide * sizes.batch * sizes.outputs * (sizes.inputs + int(apart))
    if left is None and right is None:
        return 0
    # Both sides are widened if one is transformed: float32 products want one dtype.
    widened = element_bytes < wide
    kept = sizes.inputs * (widened or right is not None)
    kept += sizes.outputs * (widened or left is not None)
    return wide * sizes.batch * sizes.positions * kept


def _reason(formula: str, sizes: Sizes) -> str:
    if formula == "rank_one":
        return "one position: the gradient is d a^T, and its norm |a| |d|"
    gram = sizes.positions * (sizes.inputs + sizes.outputs)
    direct = 2 * sizes.inputs * sizes.outputs
    if formula == "gram":
        return f"T (I + O) = {gram:,} for Gram products, 2 I O = {direct:,} for gradients"
    return (
        f"2 I O = {direct:,} for gradients, T (I + O) = {gram:,} for Gram products; gradients are "
        f"{'stored' if stores_gradients(sizes) else 'not stored'}"
    )
