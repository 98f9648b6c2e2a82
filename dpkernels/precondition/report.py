"""Which layers are preconditioned, by what, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFactors:
    """One layer.

    sides: what its two factors are; ``none`` if it has none.
    mean_a, mean_g: mean eigenvalues of A and G, to be compared with the damping: where one is far
        below it, its factor is close to a multiple of the identity. None where there is none.
    why: what is not as was asked for, and the reason; empty if all is.
    """

    name: str
    module: str
    sides: str
    mean_a: float | None
    mean_g: float | None
    why: str


@dataclass(frozen=True)
class KfacReport:
    """All layers, and what their factors were estimated from.

    milliseconds: of the last refresh; roots: the part of it that the inverse roots took.
    """

    layers: tuple[LayerFactors, ...]
    probes: str
    damping: float
    refreshes: int
    milliseconds: float
    roots_milliseconds: float
    not_private: str | None = None

    @property
    def unpreconditioned(self) -> tuple[str, ...]:
        """Names of the layers whose gradients are clipped as they are."""
        return tuple(layer.name for layer in self.layers if layer.sides == "none")

    def __str__(self) -> str:
        head = (
            f"K-FAC from {self.probes}, damping {self.damping:g}, refreshed {self.refreshes} times,"
            f" the last in {self.milliseconds:.0f} ms (roots {self.roots_milliseconds:.0f} ms)"
        )
        if self.not_private is not None:
            head += f"; not private: {self.not_private}"
        rows = [("layer", "module", "preconditioner", "mean A", "mean G", "why")]
        for x in self.layers:
            a, g = ("" if mean is None else f"{mean:.2e}" for mean in (x.mean_a, x.mean_g))
            rows.append((x.name or "(the model itself)", x.module, x.sides, a, g, x.why))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])
