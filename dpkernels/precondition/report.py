"""Which layers are preconditioned, by what, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.engine.sides import Sides
from dpkernels.ops.factor import Diagonal, Factor, Full
from dpkernels.precondition.moments import LayerMoments

# A factor that stretches no direction by more than this, beside any other, leaves directions as
# they are, to 1%: all that it does to the layer is a scale.
_FLAT = 1.01


@dataclass(frozen=True)
class LayerFactors:
    """One layer.

    sides: what its two factors are; ``none`` if it has none.
    mean_a, mean_g: mean eigenvalues of A and G, which the damping is measured by, or, if nothing is
        normalised, to be compared with. None where there is none.
    stretch_a, stretch_g: largest eigenvalue of the factor, divided by its smallest; 1 is a multiple
        of the identity, which is what damping makes of a side that is far below it.
    why: what is not as was asked for, and the reason; empty if all is.
    """

    name: str
    module: str
    sides: str
    mean_a: float | None
    mean_g: float | None
    stretch_a: float | None
    stretch_g: float | None
    why: str

    @classmethod
    def of(cls, moments: LayerMoments, sides: Sides) -> LayerFactors:
        """Return what the factors of a layer are. Cost: the eigenvalues of both, 4/3 n^3 flops."""
        layer, a, g = moments.layer, moments.activations, moments.errors
        stretches = {
            side: None if factor is None else stretch(factor)
            for side, factor in (("A", sides.right), ("G", sides.left))
        }
        flat = [side for side, ratio in stretches.items() if ratio is not None and ratio < _FLAT]
        reasons = [moments.why()] if moments.why() else []
        if flat:
            reasons.append(f"{' and '.join(flat)}: a multiple of the identity")
        return cls(
            layer.name,
            type(layer.module).__name__,
            sides.describe(),
            None if a is None else mean_eigenvalue(a),
            None if g is None else mean_eigenvalue(g),
            stretches["A"],
            stretches["G"],
            "; ".join(reasons),
        )


def mean_eigenvalue(moment: Tensor) -> float:
    """Return the mean of the eigenvalues of a matrix, or of the elements of a diagonal."""
    return float((moment if moment.dim() == 1 else moment.diagonal()).mean())


def stretch(factor: Factor) -> float:
    """Return the largest eigenvalue of a factor, divided by its smallest."""
    if isinstance(factor, Full):
        values = torch.linalg.eigvalsh(factor.matrix)
    elif isinstance(factor, Diagonal):
        values = factor.values
    else:
        rest = [factor.tail] if factor.values.shape[0] < factor.size else []
        values = torch.cat([factor.values, factor.values.new_tensor(rest)])
    return float(values.max() / values.min())


@dataclass(frozen=True)
class KfacReport:
    """All layers, and what their factors were estimated from.

    milliseconds: of the last refresh; roots: the part of it that the inverse roots took.
    """

    layers: tuple[LayerFactors, ...]
    probes: str
    damping: float
    normalise: str
    refreshes: int
    milliseconds: float
    roots_milliseconds: float
    not_private: str | None = None

    @property
    def unpreconditioned(self) -> tuple[str, ...]:
        """Names of the layers whose gradients are clipped as they are."""
        return tuple(layer.name for layer in self.layers if layer.sides == "none")

    def __str__(self) -> str:
        measured = "" if self.normalise == "none" else " of the mean eigenvalue"
        head = (
            f"K-FAC from {self.probes}, damping {self.damping:g}{measured}, refreshed "
            f"{self.refreshes} times"
        )
        if self.milliseconds:  # not since a checkpoint
            head += f", the last in {self.milliseconds:.0f} ms (roots "
            head += f"{self.roots_milliseconds:.0f} ms)"
        if self.not_private is not None:
            head += f"; not private: {self.not_private}"
        numbers = ("mean A", "mean G", "stretch A", "stretch G")
        rows = [["layer", "module", "preconditioner", *numbers, "why"]]
        for x in self.layers:
            means = ("" if mean is None else f"{mean:.2e}" for mean in (x.mean_a, x.mean_g))
            ratios = ("" if y is None else f"{y:.4g}" for y in (x.stretch_a, x.stretch_g))
            name = x.name or "(the model itself)"
            rows.append([name, x.module, x.sides, *means, *ratios, x.why])
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])
