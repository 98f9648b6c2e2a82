"""Argument checks of the linear layer's functions."""

from __future__ import annotations

from torch import Tensor

from dpkernels.ops.factor import Factor
from dpkernels.ops.ghost.layer import DTYPES, check_factor, describe
from dpkernels.ops.ghost.linear_plan import FORMULAS, Sizes


def check_inputs(op: str, activations: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as ``[B, T, width]``, detached; raise ValueError if they do not fit."""
    a, d = activations.detach(), errors.detach()
    if a.dim() < 2 or a.dtype not in DTYPES:
        raise ValueError(
            f"{op}: activations must be [B, *, I] float32/bf16/fp16/float64, got {describe(a)}"
        )
    if a.shape[:-1] != d.shape[:-1] or a.dtype != d.dtype or a.device != d.device:
        raise ValueError(
            f"{op}: errors must be {[*a.shape[:-1], 'O']} {a.dtype} on {a.device}, like "
            f"activations {describe(a)}, got {describe(d)}"
        )
    if a.dim() == 2:
        return a.unsqueeze(1), d.unsqueeze(1)
    return a.flatten(1, -2), d.flatten(1, -2)


def check_sides(
    op: str, a: Tensor, d: Tensor, left: Factor | None, right: Factor | None, bias: bool
) -> None:
    """Raise ValueError unless both factors fit the sides that they act on."""
    check_factor(op, "left", left, [d.shape[-1]], d)
    sizes = (a.shape[-1], a.shape[-1] + 1)
    check_factor(op, "right", right, sizes, a)
    if right is not None and right.size == sizes[1] and not bias:
        raise ValueError(
            f"{op}: right has size {right.size} = I + 1, which includes the bias, but bias is "
            f"False; pass bias=True or a factor of size {sizes[0]}"
        )


def check_formula(op: str, formula: str, sizes: Sizes) -> None:
    """Raise ValueError for an unknown formula, or one that does not apply."""
    if formula not in ("auto", *FORMULAS):
        raise ValueError(f"{op}: no formula {formula!r}; there are auto, {', '.join(FORMULAS)}")
    if formula == "rank_one" and sizes.positions != 1:
        raise ValueError(
            f"{op}: formula 'rank_one' needs one position for each sample, got {sizes.positions}: "
            "the gradient is a sum of so many outer products; use 'gram', 'materialised' or 'auto'"
        )
