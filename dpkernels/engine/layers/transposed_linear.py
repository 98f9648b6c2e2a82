"""Linear layers that keep their weight as ``[inputs, outputs]``: ``Conv1D`` of transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpkernels.engine.capture import Captured
from dpkernels.engine.layers.layer import Norms, Parts, Rows, WeightAndBias
from dpkernels.engine.layers.linear import AffineLayer, as_positions, wide_positions
from dpkernels.engine.sides import Sides
from dpkernels.ops import ghost
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.kron import apply_factor


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is the ``x W + b`` that GPT-2 of transformers is made of."""
    kind = type(module)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (
        kind.__name__ == "Conv1D"
        and kind.__module__.split(".")[0] == "transformers"
        and isinstance(weight, Tensor)
        and isinstance(bias, Tensor)
        and weight.dim() == 2
        and bias.shape == weight.shape[1:]
    )


class TransposedLinearLayer(AffineLayer):
    """``x W + b``: a linear layer with activations and errors swapped; the bias has its own part.

    Factors are those of the linear layer: ``left`` for the outputs, ``right`` for the inputs.
    """

    rule = "transposed linear"

    @property
    def weight(self) -> Tensor:
        """The module's own, transposed."""
        weight: Tensor = self.module.weight
        return weight.t()

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms from activations ``[B, *, I]`` and errors ``[B, *, O]``."""
        parts = tuple(self._part(attribute, captured, sides) for attribute in self.parameters)
        return Parts(parts, (1,) * len(parts))

    @staticmethod
    def _part(attribute: str, captured: Captured, sides: Sides) -> Norms:
        activations, errors = captured
        if attribute == "bias":
            shifts = as_positions([errors]).sum(1, dtype=sum_dtype(errors.dtype))
            return Rows.of([apply_factor(shifts, sides.left)])
        norms = ghost.linear_norms(
            errors, activations, bias=False, left=sides.right, right=sides.left
        )
        return WeightAndBias(norms)

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return ``[B, I, O]`` of the weight and ``[B, O]`` of the bias."""
        a, d = wide_positions(self, captured)
        weights = (torch.bmm(a.mT, d),) if self.trains("weight") else ()
        return (*weights, d.sum(1)) if self.trains("bias") else weights

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost`` for the weight."""
        activations, errors = captured
        return ghost.linear_plan(
            tuple(errors.shape),
            tuple(activations.shape),
            bias=False,
            left=sides.right,
            right=sides.left,
            element_bytes=errors.element_size(),
        )

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError for factors of the wrong size; the bias is not a column here."""
        outputs, inputs = self.weight.shape
        for name, factor, size in (("left", sides.left, outputs), ("right", sides.right, inputs)):
            if factor is not None and factor.size != size:
                raise ValueError(
                    f"{self.describe()}: {name} must be of size {size}, got {factor.size}"
                )
