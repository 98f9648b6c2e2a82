"""What the engine does with each layer, why, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpkernels.engine.step import Step


@dataclass(frozen=True)
class LayerReport:
    """One layer: its rule, formula and cost for one microbatch of the shape seen first.

    formula, reason, flops, bytes: None until a backward pass has shown the shapes.
    preconditioner: ``none``, or what its two sides, or its scale, are.
    """

    name: str
    module: str
    rule: str
    parameters: int
    preconditioner: str
    formula: str | None = None
    reason: str | None = None
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """All layers, and the mechanism."""

    layers: tuple[LayerReport, ...]
    noise_multiplier: float
    sensitivity: float
    expected_batch_size: float
    noise: str

    @classmethod
    def of(cls, step: Step) -> Report:
        """Return the report of ``step`` as it stands."""
        layers = []
        for layer in step.layers:
            sides = step.preconditioner.sides(layer.name)
            plan = step.plan_of(layer)
            layers.append(
                LayerReport(
                    layer.name or "(the model itself)",
                    type(layer.module).__name__,
                    layer.rule,
                    sum(p.numel() for p in layer.parameters.values()),
                    sides.describe(),
                    *((plan.formula, plan.reason, plan.flops, plan.bytes) if plan else ()),
                )
            )
        seed = step.key.seed
        return cls(
            tuple(layers),
            step.mechanism.noise_multiplier,
            step.clipping.sensitivity(step.names),
            step.mechanism.expected_batch_size,
            "operating system" if seed is None else f"fixed seed {seed}: not private",
        )

    @property
    def unpreconditioned(self) -> tuple[str, ...]:
        """Names of the layers whose gradients are clipped as they are."""
        return tuple(layer.name for layer in self.layers if layer.preconditioner == "none")

    def __str__(self) -> str:
        head = (
            f"noise multiplier {self.noise_multiplier:g}, sensitivity {self.sensitivity:g}, "
            f"expected batch size {self.expected_batch_size:g}, noise from {self.noise}"
        )
        rows = [("layer", "rule", "formula", "preconditioner", "Mflop", "MB", "why")]
        for x in self.layers:
            flops = "" if x.flops is None else f"{x.flops / 1e6:.1f}"
            size = "" if x.bytes is None else f"{x.bytes / 1e6:.1f}"
            formula, reason = x.formula or "not seen yet", x.reason or ""
            rows.append((x.name, x.rule, formula, x.preconditioner, flops, size, reason))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])
