"""Per-sample gradient norms and clipped gradient sums of linear layers, without the gradients.

A linear layer y = W x + b has, for sample b, the gradient ``g_b = sum_t d_bt a_bt^T`` from its
inputs (activations a) and the gradients of its outputs (errors d). Preconditioned by K-FAC it is
``U_G g_b U_A = sum_t (U_G d_bt)(U_A a_bt)^T``: factors go onto the vectors.

Squared norms are float64 and never under-estimated. Those of ``rank_one`` and of stored gradients
are taken from the very numbers that are summed. ``gram`` and ``materialised`` without storing add
float32 products up in chains of 32, and those in float64, and return what they find plus a bound of
its rounding error that holds for any data; a sample whose norm that would raise too far is done
again in float64. A bound of what the float32 sum rounds is added, too: 3e-5 of the norm for 64
uncorrelated positions, 1e-4 for 512 (``sum_error`` in ``rounding.py``). A sample for which that
bound exceeds ``sum_limit``, 1e-3 as a rule, has terms that cancel. It is not raised; its share of
the sum is computed in float64 instead and rounded once. So, with T positions::

    norm (1 - 1e-7) <= sqrt(sq_norms) <= norm (1 + max(5e-5, 1e-5 sqrt(T)) + sum_limit)

(1e-8 for float64 inputs), but for 1e-14 of the terms, which is what float64 leaves of gradients
that cancel to nothing. A sample with a NaN or an infinity has a norm that is not finite, and with
the factor 0 contributes exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops import clip
from dpkernels.ops.factor import Factor, Full
from dpkernels.ops.ghost import linear_checks as checks
from dpkernels.ops.ghost import reference_linear as reference
from dpkernels.ops.ghost.layer import (
    DTYPES,
    LayerSum,
    check_factors,
    sum_buffers,
    sum_dtype,
)
from dpkernels.ops.ghost.linear_plan import (
    Sizes,
    cheapest,
    sizes_of,
    stores_gradients,
    transforms_gradients,
)
from dpkernels.ops.ghost.rank_one import rank_one_clip_and_sum, rank_one_norms
from dpkernels.ops.kron import apply_factor


@dataclass(frozen=True)
class LinearNorms:
    """Squared norms of a linear layer's per-sample gradients, and what their sum is made from.

    sq_norms: float64 ``[B]``, of the preconditioned weight gradient, and bias gradient if asked
        for. Private: depends on each sample.
    formula: the one that ran: ``rank_one``, ``gram`` or ``materialised``.
    inputs, outputs: I and O of the layer.
    bias: whether the bias is part of it.
    saved: activations ``[B, T, I]`` and errors ``[B, T, O]``, transformed if there are factors; or
        gradients ``[B, O, I]`` and, if the bias is not their last column, its ``[B, O]``.
    stored: whether ``saved`` are gradients.
    apart: bool ``[B]``, samples whose share of the sum is computed in float64, or None: no sample.
    """

    sq_norms: Tensor
    formula: str
    inputs: int
    outputs: int
    bias: bool
    saved: tuple[Tensor, ...]
    stored: bool = False
    apart: Tensor | None = None

    def weighted_sum(
        self,
        factors: Tensor,
        *,
        out: Tensor | None = None,
        bias_out: Tensor | None = None,
        accumulate: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``sum_b factors[b] * g_b`` of weight ``[O, I]`` and bias ``[O]`` (None without).

        factors: float32 (float64 for float64 inputs) ``[B]``. A factor of 0 leaves its sample out
            whatever it holds, NaN included.
        out, bias_out: buffers to write, contiguous, of the factors' dtype. Allocated if None.
        accumulate: add to the buffers instead of overwriting them.

        2 B T I O flops as one product, or 2 B I O where gradients are stored. Raises ValueError for
        bad input before anything is written.
        """
        op, like = "LinearNorms.weighted_sum", self.saved[0]
        check_factors(op, factors, self.sq_norms.shape[0], like)
        shape = (self.outputs, self.inputs)
        shapes = shape, shape[:1] if self.bias else None
        held = [*self.saved, factors]
        weight, bias = sum_buffers(op, (out, bias_out), shapes, like, accumulate, held)
        self.add_to(weight, bias, factors, accumulate)
        return weight, bias

    def add_to(
        self, weight: Tensor, bias: Tensor | None, factors: Tensor, accumulate: bool
    ) -> None:
        """``weighted_sum`` for callers whose buffers are known to fit: nothing is checked."""
        if self.stored:
            totals = [weight.view(-1)] if bias is None else [weight.view(-1), bias]
            rows = _gradient_rows(self.saved, self.inputs, self.bias)
            clip.add_weighted_rows(totals, rows, factors, accumulate)
        else:
            like = self.saved[0]
            run = backend.select(_weighted_sum, like.device, like.dtype)
            run(weight, bias, *self.saved, factors, self.apart, accumulate)


def linear_norms(
    activations: Tensor,
    errors: Tensor,
    *,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
) -> LinearNorms:
    """Squared norms of the per-sample gradients of a linear layer, from activations and errors.

    activations: ``[B, *, I]`` float32, bfloat16, float16 or float64: the layer's inputs. All axes
        between the first and the last are positions, T in all.
    errors: ``[B, *, O]``, same dtype: gradients of each sample's own loss by the layer's outputs.
    bias: include the bias gradient ``sum_t U_G d_t``.
    left: factor on the outputs' side, of size O. right: on the inputs' side, of size I, or of size
        I + 1, which appends a constant 1 to the activations: the last column of the gradient is
        then the bias gradient. Both float32 (float64 for float64 inputs).
    formula: ``rank_one`` (T = 1), ``gram``, ``materialised``, or ``auto``: what ``linear_plan``
        finds cheapest.

    The flops of each are in ``linear_plan``. Raises ValueError for bad input and for a formula that
    does not apply.
    """
    op = "linear_norms"
    a, d = checks.check_inputs(op, activations, errors)
    checks.check_sides(op, a, d, left, right, bias)
    sizes = sizes_of(a.shape, d.shape, right, bias)
    checks.check_formula(op, formula, sizes)
    return norms_unchecked(a, d, sizes, bias, left, right, formula)


def norms_unchecked(
    a: Tensor,
    d: Tensor,
    sizes: Sizes,
    bias: bool,
    left: Factor | None,
    right: Factor | None,
    formula: str = "auto",
) -> LinearNorms:
    """``linear_norms`` of ``[B, T, I]`` and ``[B, T, O]`` that are known to fit."""
    chosen = cheapest(sizes, left, right) if formula == "auto" else formula
    inputs, outputs = a.shape[2], d.shape[2]
    augment = sizes.inputs > inputs
    own_bias = bias and not augment
    if chosen == "materialised" and stores_gradients(sizes):
        late = transforms_gradients(sizes, left, right)
        saved = _stored_gradients(a, d, left, right, own_bias, augment, late)
        sq_norms = clip.row_sq_norms(_gradient_rows(saved, inputs, bias))
        return LinearNorms(sq_norms, chosen, inputs, outputs, bias, saved, stored=True)
    if left is not None or right is not None:
        a, d = a.to(sum_dtype(a.dtype)), d.to(sum_dtype(d.dtype))
    apart = None
    if chosen == "rank_one":
        a, d, sq_norms = rank_one_norms(a, d, left, right, augment, own_bias)
    else:
        a, d = _transform(a, right, augment), _transform(d, left, False)
        run = backend.select(_sq_norms, a.device, a.dtype)
        sq_norms, apart = run(a, d, own_bias, chosen == "gram")
    return LinearNorms(sq_norms, chosen, inputs, outputs, bias, (a, d), apart=apart)


def linear_clip_and_sum(
    activations: Tensor,
    errors: Tensor,
    max_norm: float,
    *,
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
    out: Tensor | None = None,
    bias_out: Tensor | None = None,
    accumulate: bool = False,
) -> LayerSum:
    """Clip one linear layer's per-sample gradients to ``max_norm`` and add them up.

    ``linear_norms``, ``clip_factors`` and ``weighted_sum`` in one call, for a model of one layer
    or for clipping layer by layer; arguments as theirs. The L2 sensitivity of the sum when one
    sample is added or removed is ``max_norm``.
    """
    if formula in ("auto", "rank_one"):
        sides, buffers = (left, right), (out, bias_out)
        found = rank_one_clip_and_sum(
            activations, errors, max_norm, bias, sides, buffers, accumulate
        )
        if found is not None:
            return found
    norms = linear_norms(activations, errors, bias=bias, left=left, right=right, formula=formula)
    dtype = sum_dtype(activations.dtype)
    factors = clip.clip_factors(norms.sq_norms, max_norm, dtype=dtype)
    weight, total = norms.weighted_sum(factors, out=out, bias_out=bias_out, accumulate=accumulate)
    return LayerSum(weight, total, norms.sq_norms, factors)


def _transform(x: Tensor, factor: Factor | None, augment: bool) -> Tensor:
    """Return ``U x`` along the last axis of ``[B, T, n]``; of ``[x, 1]`` if ``augment``."""
    if factor is None:
        return x
    if augment and isinstance(factor, Full) and x.is_cpu and not torch.compiler.is_compiling():
        return _augmented_product(x, factor.matrix.detach())
    return apply_factor(x, factor, bias=augment)


def _augmented_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return ``[x, 1] U`` in rows that begin with a cache line each.

    n + 1 is hardly ever a whole number of them. Measured for 1,024 vectors of 1,024: 15.8 ms, and
    18.9 in rows without gaps.
    """
    n, line = x.shape[-1], 64 // x.element_size()
    rows = x.new_empty(*x.shape[:-1], -(-(n + 1) // line) * line)[..., : n + 1]
    torch.addmm(matrix[n], x.flatten(0, 1), matrix[:n], out=rows.flatten(0, 1))
    return rows


def _stored_gradients(
    a: Tensor,
    d: Tensor,
    left: Factor | None,
    right: Factor | None,
    apart: bool,
    augment: bool,
    late: bool,
) -> tuple[Tensor, ...]:
    """Return gradients ``[B, O, I]`` (I + 1 if ``augment``) and, if ``apart``, of the bias.

    late: apply factors to the gradients, not to activations and errors.
    """
    dtype = sum_dtype(a.dtype)
    a, d = a.to(dtype), d.to(dtype)
    if not late:
        a, d = _transform(a, right, augment), _transform(d, left, False)
        gradients = torch.bmm(d.mT, a)
        return (gradients, d.sum(1)) if apart else (gradients,)
    if augment:
        a = torch.nn.functional.pad(a, (0, 1), value=1.0)
    gradients = _transform(torch.bmm(d.mT, a), right, False)
    gradients = _transform(gradients.mT, left, False).mT
    if not apart:
        return (gradients,)
    return gradients, _transform(d.sum(1, keepdim=True), left, False).squeeze(1)


def _gradient_rows(saved: tuple[Tensor, ...], inputs: int, bias: bool) -> list[Tensor]:
    """Return stored gradients as rows of samples: of the weight and, with bias, of the bias."""
    rows = [saved[0][:, :, :inputs].flatten(1)]
    if bias:
        rows.append(saved[1] if len(saved) > 1 else saved[0][:, :, -1])
    return rows


def _fake_sq_norms(
    activations: Tensor, errors: Tensor, bias: bool, gram: bool
) -> tuple[Tensor, Tensor]:
    batch = activations.shape[0]
    return (
        activations.new_empty(batch, dtype=torch.float64),
        activations.new_empty(batch, dtype=torch.bool),
    )


def _fake_weighted_sum(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    factors: Tensor,
    apart: Tensor | None,
    accumulate: bool,
) -> None:
    return None


_sq_norms = backend.register(
    "ghost_linear_sq_norms(Tensor activations, Tensor errors, bool bias, bool gram) "
    "-> (Tensor sq_norms, Tensor apart)",
    reference=reference.sq_norms,
    fake=_fake_sq_norms,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_linear:sq_norms",
)
_weighted_sum = backend.register(
    "ghost_linear_weighted_sum_(Tensor(a!) out, Tensor(b!)? bias_out, Tensor activations, "
    "Tensor errors, Tensor factors, Tensor? apart, bool accumulate) -> ()",
    reference=reference.weighted_sum_,
    fake=_fake_weighted_sum,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_linear:weighted_sum_",
)
