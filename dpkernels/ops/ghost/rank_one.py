"""Linear layers with one position for each sample: both sides transformed and measured at once.

The gradient of a sample is ``d a^T``, preconditioned ``(U_G d)(U_A a)^T``, and its norm is the
product of two vectors' norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.factor import Diagonal, Factor, parts_of
from dpkernels.ops.ghost import reference_linear as reference
from dpkernels.ops.ghost.layer import DTYPES, LayerSum
from dpkernels.ops.kron import apply_factor

_IN_ONE_CALL = frozenset({torch.float32, torch.float64})


def rank_one_norms(
    a: Tensor, d: Tensor, left: Factor | None, right: Factor | None, augment: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``U_A a``, ``U_G d`` and the squared norms of their outer products, float64 ``[B]``.

    a, d: ``[B, 1, I]`` and ``[B, 1, O]`` of one dtype, in that of sums if there is a factor.
    left, right: on the outputs' and the inputs' side.
    augment: right has the size I + 1 and acts on ``[a, 1]``; the last of ``U_A a`` is the bias.
    bias: the bias's gradient d counts too, ``|d|^2 (|a|^2 + 1)``.

    2 B (I^2 + O^2) flops with full factors, 4 B r (I + O) with rank r, and 2 B (I + O) for the
    norms. What a diagonal makes of the vectors comes from ``apply_factor``.
    """
    if isinstance(right, Diagonal):
        a, right, augment = apply_factor(a, right, bias=augment), None, False
    if isinstance(left, Diagonal):
        d, left = apply_factor(d, left), None
    run = backend.select(_rank_one, a.device, a.dtype)
    new_a, new_d, sq_norms = run(a, d, *parts_of(right), *parts_of(left), augment, bias)
    return a if right is None else new_a, d if left is None else new_d, sq_norms


def rank_one_clip_and_sum(
    activations: Tensor,
    errors: Tensor,
    max_norm: float,
    bias: bool,
    sides: tuple[Factor | None, Factor | None],
    buffers: tuple[Tensor | None, Tensor | None],
    accumulate: bool,
) -> LayerSum | None:
    """Return the clipped sum from one call of the compiled operator; None where that is not to be.

    Arguments as for ``linear_clip_and_sum``, not checked: the operator refuses what does not fit
    before it writes, and its caller, which gets None, then finds the words. What Python does around
    three operators takes 0.2 ms with cold caches, beside 4.4 ms for 256 x 784 -> 512; on a GPU it
    is hidden behind the kernels, so the three serve there.
    """
    left, right = sides
    if activations.dim() != 2 or errors.dim() != 2 or activations.dtype not in _IN_ONE_CALL:
        return None
    if any(isinstance(side, Diagonal) for side in sides):
        return None
    run = backend.select(_rank_one_clip, activations.device, activations.dtype)
    if run is not _rank_one_clip.overload or torch.compiler.is_compiling():
        return None
    out, bias_out = buffers
    if accumulate and (out is None or (bias and bias_out is None)):
        return None
    inputs, outputs = activations.shape[1], errors.shape[1]
    weight = activations.new_empty(outputs, inputs) if out is None else out
    if bias and bias_out is None:
        bias_out = activations.new_empty(outputs)
    augment = bias and right is not None and right.size == inputs + 1
    vectors = activations.detach().unsqueeze(1), errors.detach().unsqueeze(1)
    factors = *parts_of(right), *parts_of(left)
    if not all(x.is_cpu for x in (*vectors, weight)) or (bias_out is not None) != bias:
        return None
    try:
        norms = run(weight, bias_out, *vectors, *factors, augment, max_norm, accumulate)
    except (RuntimeError, ValueError, TypeError):
        return None
    return LayerSum(weight, bias_out, *norms)


def _fake_rank_one(
    activations: Tensor,
    errors: Tensor,
    right: list[Tensor],
    right_tail: float,
    left: list[Tensor],
    left_tail: float,
    augment: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    def side(x: Tensor, factor: list[Tensor]) -> Tensor:
        return x.new_empty(x.shape[0], 1, factor[0].shape[0]) if factor else x.new_empty(0)

    sq_norms = activations.new_empty(activations.shape[0], dtype=torch.float64)
    return side(activations, right), side(errors, left), sq_norms


def _fake_rank_one_clip(
    out: Tensor,
    bias_out: Tensor | None,
    activations: Tensor,
    errors: Tensor,
    right: list[Tensor],
    right_tail: float,
    left: list[Tensor],
    left_tail: float,
    augment: bool,
    max_norm: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    batch = activations.shape[0]
    return activations.new_empty(batch, dtype=torch.float64), out.new_empty(batch)


# A factor is [], [matrix] or [vectors, values]. An operator must not return what it was given:
# without a factor its result is an empty tensor.
_rank_one = backend.register(
    "ghost_linear_rank_one(Tensor activations, Tensor errors, Tensor[] right, float right_tail, "
    "Tensor[] left, float left_tail, bool augment, bool bias) "
    "-> (Tensor activations, Tensor errors, Tensor sq_norms)",
    reference=reference.rank_one,
    fake=_fake_rank_one,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_rank_one:rank_one",
)
_rank_one_clip = backend.register(
    "ghost_linear_rank_one_clip_(Tensor(a!) out, Tensor(b!)? bias_out, Tensor activations, "
    "Tensor errors, Tensor[] right, float right_tail, Tensor[] left, float left_tail, "
    "bool augment, float max_norm, bool accumulate) -> (Tensor sq_norms, Tensor factors)",
    reference=reference.rank_one_clip_,
    fake=_fake_rank_one_clip,
    dtypes=_IN_ONE_CALL,
    triton="dpkernels.ops.ghost.triton_rank_one:rank_one_clip_",
)
