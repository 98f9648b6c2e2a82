"""Scale and shift: LayerNorm, RMSNorm, GroupNorm, InstanceNorm end in ``weight * xhat + bias``.

Sample b's gradients are the vectors sum_t xhat_t * d_t and sum_t d_t over its positions, ``[B, N]``
in all: small beside the inputs, so they are formed in one pass over xhat and d (in float64, then
float32), kept, and norms and sum are taken from them. What is clipped is what is summed, to the
bit.

Factors are diagonal: ``left`` acts on the errors (weight and bias), ``right`` on xhat (weight).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from dpkernels import backend
from dpkernels.ops.clip import add_weighted_rows, clip_factors, row_sq_norms
from dpkernels.ops.factor import Diagonal, Factor
from dpkernels.ops.ghost import reference_scale_shift
from dpkernels.ops.ghost.layer import (
    DTYPES,
    LayerSum,
    check_factor,
    check_factor_size,
    check_factors,
    check_pair,
    sum_buffers,
    sum_dtype,
)
from dpkernels.ops.ghost.plan import Plan, factor_elements, sum_bytes

FORMULAS = ("materialised",)


@dataclass(frozen=True)
class ScaleShiftNorms:
    """Norms of the per-sample gradients of a scale and shift, and those gradients.

    sq_norms: float64 ``[B]``, of the preconditioned gradient of weight and, if asked for, bias.
    formula: ``materialised``, the only one.
    saved: the gradients, preconditioned: ``[B, N]`` of the weight and, if asked for, of the bias.
    """

    sq_norms: Tensor
    formula: str
    saved: tuple[Tensor, ...] = field(repr=False)
    _shape: tuple[int, ...] = field(repr=False)

    def weighted_sum(
        self,
        factors: Tensor,
        *,
        out: Tensor | None = None,
        bias_out: Tensor | None = None,
        accumulate: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``sum_b factors[b] * gradient_b`` of weight and bias (None without one).

        factors: ``[B]`` float32 (float64 for float64 inputs). 0 leaves a sample out, NaN and all.
        out, bias_out: contiguous buffers like weight and bias, of the factors' dtype.
        accumulate: add to the buffers instead of overwriting them.

        4 B N flops. Raises ValueError for wrong buffers.
        """
        op, like = "ScaleShiftNorms.weighted_sum", self.saved[0]
        check_factors(op, factors, like.shape[0], like)
        held = [factors, *self.saved]
        shapes = self._shape, self._shape if len(self.saved) == 2 else None
        weight, bias = sum_buffers(op, (out, bias_out), shapes, like, accumulate, held)
        self.add_to(weight, bias, factors, accumulate)
        return weight, bias

    def add_to(
        self, weight: Tensor, bias: Tensor | None, factors: Tensor, accumulate: bool
    ) -> None:
        """``weighted_sum`` for callers whose buffers are known to fit: nothing is checked."""
        buffers = [weight.view(-1)] if bias is None else [weight.view(-1), bias.view(-1)]
        add_weighted_rows(buffers, list(self.saved), factors, accumulate)


def scale_shift_plan(
    normalised: tuple[int, ...],
    *,
    channel_axis: int = -1,
    normalised_dims: int = 1,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    element_bytes: int = 4,
) -> Plan:
    """Return what norms and sum cost for xhat of this shape; arguments as ``scale_shift_norms``.

    element_bytes: size of an element of xhat and errors.
    """
    op = "scale_shift_plan"
    shape = _weight_shape(op, normalised, channel_axis, normalised_dims)
    _check_sides(op, math.prod(shape), left, right)
    sums = (2 if bias else 1) * math.prod(shape)
    wide = sum_bytes(element_bytes)
    kept = normalised[0] * sums * wide
    flops = 3 * math.prod(normalised) + 4 * normalised[0] * sums
    # Gradients are written, and read for the norms and for the sum.
    traffic = 2 * math.prod(normalised) * element_bytes + 3 * kept
    traffic += wide * (sums + factor_elements(left) + factor_elements(right))
    return Plan(
        formula="materialised",
        flops=flops,
        bytes=traffic,
        kept_bytes=kept,
        reason="per-sample gradients are vectors: forming them is one pass over the inputs",
        alternatives={"materialised": flops},
    )


def scale_shift_norms(
    normalised: Tensor,
    errors: Tensor,
    *,
    channel_axis: int = -1,
    normalised_dims: int = 1,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
) -> ScaleShiftNorms:
    """Squared norms of the (preconditioned) per-sample gradients of a scale and shift.

    normalised: xhat, what weight multiplies: ``[B, ..., N]``, or ``[B, N, ...]`` with
        ``channel_axis=1`` (GroupNorm, InstanceNorm); float32, bf16, fp16 or float64.
    errors: gradient of each sample's loss by the layer's output, of the same shape and dtype.
    channel_axis: -1 or 1. The axes that are neither batch nor channel are positions.
    normalised_dims: how many of the last axes the weight has (LayerNorm over several axes); 1 for
        ``channel_axis=1``.
    bias: whether the layer has one.
    left, right: ``Diagonal`` of the weight's size, float32 (float64 for float64), or None.
    formula: ``auto`` or ``materialised``, which is the only one.

    3 flops for each element of xhat, xhat and errors read once.
    """
    op = "scale_shift_norms"
    check_pair(op, ("normalised", "errors"), normalised, errors)
    if normalised.shape != errors.shape:
        raise ValueError(
            f"{op}: normalised and errors must have one shape, got {list(normalised.shape)} and "
            f"{list(errors.shape)}"
        )
    if formula not in ("auto", *FORMULAS):
        raise ValueError(f"{op}: no formula {formula!r}; there are auto, {', '.join(FORMULAS)}")
    shape = _weight_shape(op, tuple(normalised.shape), channel_axis, normalised_dims)
    width = math.prod(shape)
    _check_sides(op, width, left, right)
    check_factor(op, "left", left, [width], errors)
    check_factor(op, "right", right, [width], normalised)
    return norms_unchecked(
        normalised.detach(), errors.detach(), shape, channel_axis, bias, left, right
    )


def norms_unchecked(
    normalised: Tensor,
    errors: Tensor,
    shape: tuple[int, ...],
    channel_axis: int,
    bias: bool,
    left: Factor | None,
    right: Factor | None,
) -> ScaleShiftNorms:
    """``scale_shift_norms`` of tensors that are known to fit a weight of ``shape``."""
    batch, width = normalised.shape[0], math.prod(shape)
    positions = math.prod(normalised.shape[1:]) // max(width, 1)
    view = (batch, width, positions) if channel_axis == 1 else (batch, positions, width)
    x, d = normalised.reshape(view), errors.reshape(view)
    scales = (None, None) if left is None and right is None else _scales(left, right)
    run = backend.select(_grads, x.device, x.dtype)
    weight_grads, bias_grads = run(x, d, channel_axis == 1, bias, *scales)
    saved = (weight_grads, bias_grads) if bias else (weight_grads,)
    return ScaleShiftNorms(row_sq_norms(list(saved)), "materialised", saved, shape)


def scale_shift_clip_and_sum(
    normalised: Tensor,
    errors: Tensor,
    max_norm: float,
    *,
    channel_axis: int = -1,
    normalised_dims: int = 1,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
    out: Tensor | None = None,
    bias_out: Tensor | None = None,
    accumulate: bool = False,
) -> LayerSum:
    """Clip every sample's gradient of one layer to ``max_norm`` and add them up.

    Arguments as for ``scale_shift_norms`` and ``ScaleShiftNorms.weighted_sum``. L2 sensitivity:
    ``max_norm``.
    """
    norms = scale_shift_norms(
        normalised,
        errors,
        channel_axis=channel_axis,
        normalised_dims=normalised_dims,
        bias=bias,
        left=left,
        right=right,
        formula=formula,
    )
    factors = clip_factors(norms.sq_norms, max_norm, dtype=sum_dtype(errors.dtype))
    weight, bias_sum = norms.weighted_sum(
        factors, out=out, bias_out=bias_out, accumulate=accumulate
    )
    return LayerSum(weight, bias_sum, norms.sq_norms, factors)


def _weight_shape(
    op: str, shape: tuple[int, ...], channel_axis: int, normalised_dims: int
) -> tuple[int, ...]:
    if channel_axis not in (-1, 1):
        raise ValueError(f"{op}: channel_axis must be -1 or 1, got {channel_axis}")
    if channel_axis == 1 and normalised_dims != 1:
        raise ValueError(
            f"{op}: normalised_dims must be 1 for channel_axis=1, got {normalised_dims}"
        )
    if not 1 <= normalised_dims < len(shape):
        raise ValueError(
            f"{op}: normalised must have a batch axis and {normalised_dims} >= 1 axes of the "
            f"weight, got {list(shape)}"
        )
    return shape[1:2] if channel_axis == 1 else shape[-normalised_dims:]


def _check_sides(op: str, width: int, left: Factor | None, right: Factor | None) -> None:
    for name, factor in (("left", left), ("right", right)):
        if factor is not None and not isinstance(factor, Diagonal):
            raise ValueError(
                f"{op}: {name} must be a Diagonal or None, got {type(factor).__name__}: the "
                "gradient is a vector, elementwise in its channels"
            )
        check_factor_size(op, name, factor, [width])


def _scales(left: Factor | None, right: Factor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return what multiplies the gradients of weight and of bias, float64."""

    def values(factor: Factor | None) -> Tensor | None:
        if factor is None:
            return None
        assert isinstance(factor, Diagonal)
        return factor.values.detach().double()

    on_errors, on_inputs = values(left), values(right)
    if on_errors is None or on_inputs is None:
        return on_inputs if on_errors is None else on_errors, on_errors
    return on_errors * on_inputs, on_errors


def _fake_grads(
    normalised: Tensor,
    errors: Tensor,
    channels_first: bool,
    bias: bool,
    weight_scale: Tensor | None,
    bias_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, width = normalised.shape[0], normalised.shape[1 if channels_first else 2]
    dtype = sum_dtype(normalised.dtype)
    return (
        normalised.new_empty((batch, width), dtype=dtype),
        normalised.new_empty((batch, width if bias else 0), dtype=dtype),
    )


_grads = backend.register(
    "ghost_scale_shift_grads(Tensor normalised, Tensor errors, bool channels_first, bool bias, "
    "Tensor? weight_scale, Tensor? bias_scale) -> (Tensor weight_grads, Tensor bias_grads)",
    reference=reference_scale_shift.scale_shift_grads,
    fake=_fake_grads,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_scale_shift:scale_shift_grads",
)
