"""Convolution: per-sample gradient norms and clipped sums from its input and its output's errors.

For the input x ``[B, C, *spatial]`` and the errors d ``[B, O, *output]`` of Conv1d, Conv2d or
Conv3d, sample b's gradient is, for each group, the product of its errors ``[O/g, L]`` and its
patches ``[L, I]`` with I = C/g * K (L positions, K kernel elements). Three formulas for its norm:

``materialised``  the product itself, 2 L O I flops, in cache; no patch is ever formed. The
                  gradients are kept for the sum where they are no larger than x and d.
``gram``          sum over positions s, t of (patch_s . patch_t)(d_s . d_t). Products of patches are
                  sums of products of pixels, so this costs P^2 C + L^2 (O + K) for P input pixels.
``rank_one``      one position: |patch|^2 |d|^2.

Squared norms are float64 and never under-estimated. Products are float32 for float32 and
half-precision inputs, added up in chains of 32 and then in float64, and a bound of their rounding
error that holds for any data is part of the norm; a sample whose norm that would raise too far is
computed again in float64. So, with L positions::

    norm (1 - 1e-7) <= sqrt(sq_norms) <= norm (1 + max(5e-5, 1e-5 sqrt(L)))

(1e-8 for float64 inputs), but for about 1e-14 of the terms, which is what float64 leaves of
gradients that cancel to nothing. ``rank_one`` and kept gradients under a dense ``right`` are
measured as they are summed. Where gradients are not kept, a bound of what the sum rounds comes on
top, at most 1e-3 of the norm as a rule; beyond, a sample's share of the sum is computed in float64
(``with_rounding`` in ``conv_formulas.py``). A sample with any value that is not finite has a norm
that is not, and contributes exactly zero.

``left`` acts on the output channels, ``right`` on the I elements of a patch (I + 1: the bias is the
weight of a constant 1). They take groups = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkernels.ops.clip import add_weighted_rows, clip_factors, weighted_row_sum
from dpkernels.ops.factor import Factor, Full, LowRank
from dpkernels.ops.full_precision import full_precision
from dpkernels.ops.ghost.conv_formulas import (
    column_scale,
    in_double,
    rank_one,
    transformed,
    with_rounding,
)
from dpkernels.ops.ghost.conv_operator import run_conv_norms
from dpkernels.ops.ghost.conv_shape import (
    FORMULAS,
    ConvShape,
    Size,
    cheapest,
    conv_shape,
    gradients_kept,
    plan_of,
    transforms_gradients,
    why_not,
)
from dpkernels.ops.ghost.layer import (
    LayerSum,
    check_factor,
    check_factor_size,
    check_factors,
    check_pair,
    drop_samples,
    sum_buffers,
    sum_dtype,
    write_sum,
)
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.kron import apply_factor


@dataclass(frozen=True)
class ConvNorms:
    """Norms of a convolution's per-sample gradients, and what the sum reuses.

    sq_norms: float64 ``[B]``, of the preconditioned gradient of weight and, if asked for, bias.
    formula: the one that ran.
    saved: materialised: gradients ``[B, O, I]`` and ``[B, O]``, if kept, under factors, but not
        under a diagonal right one; rank_one: patches ``[B, g, I]`` (or I + 1) and errors
        ``[B, g, O/g]``, both transformed.
    """

    sq_norms: Tensor
    formula: str
    saved: tuple[Tensor, ...] = field(repr=False)
    _shape: ConvShape = field(repr=False)
    _activations: Tensor = field(repr=False)  # empty, like the errors, if gradients are saved
    _errors: Tensor = field(repr=False)  # under the left factor
    _right: Factor | None = field(repr=False)  # None if what is saved is under it
    _bias: bool = field(repr=False)
    _apart: Tensor | None = field(repr=False)  # bool [B]: share computed in float64

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

        2 B O I flops for kept gradients, else 2 B L O I. Raises ValueError for wrong buffers.
        """
        op, shape = "ConvNorms.weighted_sum", self._shape
        check_factors(op, factors, shape.batch, self._activations)
        held = [factors, self._activations, self._errors, *self.saved]
        like = self._activations
        shapes = shape.weight, (shape.out_channels,) if self._bias else None
        weight, bias = sum_buffers(op, (out, bias_out), shapes, like, accumulate, held)
        self.add_to(weight, bias, factors, accumulate)
        return weight, bias

    def add_to(
        self, weight: Tensor, bias: Tensor | None, factors: Tensor, accumulate: bool
    ) -> None:
        """``weighted_sum`` for callers whose buffers are known to fit: nothing is checked."""
        if self._right is None and self.formula == "materialised" and self.saved:
            # Straight into the buffers.
            targets = [weight.view(-1)] if bias is None else [weight.view(-1), bias]
            grads = [g.flatten(1) for g in self.saved[: len(targets)]]
            add_weighted_rows(targets, grads, factors, accumulate)
            return
        if self._apart is None or not bool(self._apart.any()):
            self._write(weight, bias, self._sums(factors), accumulate)
            return
        shared = factors.masked_fill(self._apart, 0.0)
        self._write(weight, bias, self._sums(shared), accumulate)
        for b in (self._apart & (factors != 0)).nonzero().flatten().tolist():
            own = self._sums_of(slice(b, b + 1), factors[b : b + 1].double())
            self._write(weight, bias, own, True)

    @staticmethod
    def _write(
        weight: Tensor, bias: Tensor | None, sums: tuple[Tensor, Tensor], accumulate: bool
    ) -> None:
        write_sum(weight, sums[0], accumulate)
        if bias is not None:
            write_sum(bias, sums[1], accumulate)

    def _sums(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums ``[O, I]`` and ``[O]``, preconditioned."""
        columns = self._shape.columns
        if self.formula == "rank_one":
            patches, errors = drop_samples(factors, *self.saved)
            weighted = errors * factors.view(-1, 1, 1)
            with full_precision(weighted):
                total = (weighted.permute(1, 2, 0) @ patches.transpose(0, 1)).flatten(0, 1)
            if total.shape[1] > columns:
                return total[:, :columns], total[:, columns]
            return total, weighted.sum(0).flatten()
        if not self.saved:
            return self._sums_of(slice(None), factors)
        total, bias = weighted_row_sum([g.flatten(1) for g in self.saved], factors)
        return self._under_right(total.view(-1, columns), bias)

    def _under_right(self, total: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums under the right factor: the same for all samples, so once, on the sum.

        In float64: a factor that all but removes the sum would leave what float32 rounds of it.
        """
        right, columns = in_double(self._right), self._shape.columns
        if right is None:
            return total, bias
        if right.size == columns:
            return apply_factor(total.double(), right), bias
        both = apply_factor(torch.cat([total.double(), bias.double().unsqueeze(1)], 1), right)
        return both[:, :columns], both[:, columns]

    def _sums_of(self, at: slice, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over some samples as the weight gradient of a convolution.

        factors: of those samples, in the dtype to compute in. The bias is a sum of as many errors
        as there are positions, in float64, so that nothing rounds before it cancels.
        """
        shape, dtype = self._shape, factors.dtype
        x, d = drop_samples(factors, self._activations[at], self._errors[at])
        bias = d.new_empty(0)
        if self._bias:
            sums = d.flatten(2).sum(2, dtype=torch.float64)
            bias = (sums * factors.double().unsqueeze(1)).sum(0)
        d = d.to(dtype) * factors.view(-1, *[1] * (d.dim() - 1))
        x = x.to(dtype)
        with full_precision(d):
            _, total, _ = torch.ops.aten.convolution_backward(
                d,
                x,
                x.new_empty(shape.weight),
                [shape.out_channels],
                shape.stride,
                shape.padding,
                shape.dilation,
                False,
                [0] * len(shape.stride),
                shape.groups,
                [False, True, False],
            )
        return self._under_right(total.reshape(shape.out_channels, shape.columns), bias)


def conv_plan(
    activations: tuple[int, ...],
    errors: tuple[int, ...],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    element_bytes: int = 4,
) -> Plan:
    """Return the formula that is the cheapest for these shapes; nothing is computed.

    activations, errors: shapes ``[B, C, *spatial]`` and ``[B, O, *output]``.
    element_bytes: size of an element of activations and errors.
    The rest as for ``conv_norms``. A bias costs nothing worth counting.
    """
    op = "conv_plan"
    shape = conv_shape(op, activations, errors, kernel_size, stride, padding, dilation, groups)
    _check_sides(op, shape, bias, left, right)
    return plan_of(shape, left, right, bias, element_bytes)


def conv_norms(
    activations: Tensor,
    errors: Tensor,
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
) -> ConvNorms:
    """Squared norms of the (preconditioned) per-sample gradients of a convolution.

    activations: its input ``[B, C, *spatial]`` with 1 to 3 spatial axes; float32, bf16, fp16 or
        float64. Padding is zeros.
    errors: gradient of each sample's loss by its output, ``[B, O, *output]``, same dtype.
    kernel_size, stride, padding, dilation: a number or one for each axis; groups: as of the layer.
    bias: whether the layer has one; its gradient is sum_t d_t (under ``left``).
    left: factor of size O; right: of size I = C * K, or I + 1 with the bias as last coordinate;
        float32 (float64 for float64 inputs).
    formula: ``auto`` (what ``conv_plan`` says) or one of ``rank_one``, ``gram``, ``materialised``.

    Raises ValueError for shapes that do not belong together and for a formula that does not apply.
    """
    op = "conv_norms"
    check_pair(op, ("activations", "errors"), activations, errors)
    shape = conv_shape(
        op,
        tuple(activations.shape),
        tuple(errors.shape),
        kernel_size,
        stride,
        padding,
        dilation,
        groups,
    )
    _check_sides(op, shape, bias, left, right)
    check_factor(op, "left", left, [shape.out_channels], errors)
    check_factor(op, "right", right, [shape.columns, shape.columns + 1], activations)
    x, d = activations.detach(), errors.detach()
    if formula == "auto":
        formula = cheapest(shape, left, right)
    elif formula not in FORMULAS:
        raise ValueError(f"{op}: no formula {formula!r}; there are auto, {', '.join(FORMULAS)}")
    elif (reason := why_not(shape, formula, right)) is not None:
        raise ValueError(f"{op}: formula {formula!r} does not apply: {reason}")
    apart = None
    late = formula == "materialised" and transforms_gradients(shape, left)
    if left is not None and not late:
        d = apply_factor(d.transpose(1, -1), left).transpose(1, -1)
        x = x.to(d.dtype)
    if formula == "rank_one":
        sq_norms, saved = rank_one(shape, x, d, bias, right)
    elif late or isinstance(right, Full | LowRank):
        sq_norms, saved = transformed(shape, x, d, bias, left if late else None, right)
        right = None if saved else right
    else:
        scale = column_scale(shape, right)
        keep = formula == "materialised" and gradients_kept(shape)
        sq_norms, *kept = run_conv_norms(shape, x, d, bias, scale, formula, keep)
        saved = tuple(kept) if keep else ()
    if not saved:
        sq_norms, apart = with_rounding(shape, x, d, right, sq_norms)
    if saved and formula == "materialised":
        # The sum is made from them: it need not keep activations and errors alive.
        x, d = x.new_empty(0), d.new_empty(0)
    return ConvNorms(sq_norms, formula, saved, shape, x, d, right, bias, apart)


def conv_clip_and_sum(
    activations: Tensor,
    errors: Tensor,
    max_norm: float,
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
    out: Tensor | None = None,
    bias_out: Tensor | None = None,
    accumulate: bool = False,
) -> LayerSum:
    """Clip every sample's gradient of one layer to ``max_norm`` and add them up.

    Arguments as for ``conv_norms`` and ``ConvNorms.weighted_sum``. L2 sensitivity: ``max_norm``.
    """
    norms = conv_norms(
        activations,
        errors,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        left=left,
        right=right,
        formula=formula,
    )
    factors = clip_factors(norms.sq_norms, max_norm, dtype=sum_dtype(activations.dtype))
    weight, bias_sum = norms.weighted_sum(
        factors, out=out, bias_out=bias_out, accumulate=accumulate
    )
    return LayerSum(weight, bias_sum, norms.sq_norms, factors)


def _check_sides(
    op: str, shape: ConvShape, bias: bool, left: Factor | None, right: Factor | None
) -> None:
    if shape.groups > 1 and (left is not None or right is not None):
        raise ValueError(
            f"{op}: left and right must be None for groups = {shape.groups}: a factor would mix "
            "groups that the layer keeps apart; leave grouped convolutions unpreconditioned"
        )
    check_factor_size(op, "left", left, [shape.out_channels])
    check_factor_size(op, "right", right, [shape.columns, shape.columns + 1])
    if right is not None and right.size > shape.columns and not bias:
        raise ValueError(
            f"{op}: right acts on {right.size} elements, the last of them the bias, but bias=False"
        )
