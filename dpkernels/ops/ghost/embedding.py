"""Embedding: per-sample gradient norms and clipped sums from tokens and errors.

A sample's gradient has one row for each distinct token v: the sum of the errors at the positions
that hold v. Its squared norm, sum_v |sum_{t: token_t = v} d_t|^2, is not the sum of the |d_t|^2: a
token that comes twice counts with its cross terms. Tokens are sorted within a sample, so that
nothing of the size of the vocabulary is formed for a sample; errors of one token are added up in
float64, and where they cancel so far that even this may be low by more than 5e-8, the bound of its
rounding error is added. The weighted sum is deterministic.

``left`` acts on the D elements of a row, ``right`` is a ``Diagonal`` over the vocabulary.

An ``EmbeddingBag`` over ``[B, T]`` is the same with its errors ``[B, D]`` at every position:
``errors.unsqueeze(1).expand(-1, T, -1)``, divided by T for ``mean``. Nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.clip import clip_factors
from dpkernels.ops.factor import Diagonal, Factor
from dpkernels.ops.ghost import reference_embedding
from dpkernels.ops.ghost.layer import (
    DTYPES,
    LayerSum,
    check_factor,
    check_factor_size,
    check_factors,
    describe,
    sum_buffer,
    sum_dtype,
)
from dpkernels.ops.ghost.plan import Plan, factor_elements, factor_flops, sum_bytes
from dpkernels.ops.kron import apply_factor

FORMULAS = ("segments",)


@dataclass(frozen=True)
class EmbeddingNorms:
    """Norms of an embedding's per-sample gradients, and what the sum reuses.

    sq_norms: float64 ``[B]``, of the preconditioned gradient.
    formula: ``segments``, the only one.
    saved: the errors ``[B, T, D]`` under the left factor.
    """

    sq_norms: Tensor
    formula: str
    saved: tuple[Tensor, ...] = field(repr=False)
    _indices: Tensor = field(repr=False)
    _scale: Tensor | None = field(repr=False)
    _vocabulary: int = field(repr=False)
    _padding_index: int = field(repr=False)

    def weighted_sum(
        self,
        factors: Tensor,
        *,
        out: Tensor | None = None,
        bias_out: None = None,
        accumulate: bool = False,
    ) -> tuple[Tensor, None]:
        """``sum_b factors[b] * gradient_b``, ``[V, D]``; an embedding has no bias.

        factors: ``[B]`` float32 (float64 for float64 errors). 0 leaves a sample out, NaN and all.
        out: contiguous buffer ``[V, D]`` of the factors' dtype.
        accumulate: add to ``out`` instead of overwriting it.

        2 B T D flops; B T D elements read, as many rows of the table read and written. The same
        bits for any number of threads. Raises ValueError for wrong buffers.
        """
        op = "EmbeddingNorms.weighted_sum"
        if bias_out is not None:
            raise ValueError(f"{op}: bias_out was passed, but an embedding has no bias")
        (errors,) = self.saved
        check_factors(op, factors, errors.shape[0], errors)
        held = [factors, self._indices, errors]
        if self._scale is not None:
            held.append(self._scale)
        shape = (self._vocabulary, errors.shape[2])
        table = sum_buffer(op, "out", out, shape, errors, accumulate, held)
        self.add_to(table, None, factors, accumulate)
        return table, None

    def add_to(
        self, weight: Tensor, bias: Tensor | None, factors: Tensor, accumulate: bool
    ) -> None:
        """``weighted_sum`` for callers whose buffer is known to fit: nothing is checked."""
        (errors,) = self.saved
        run = backend.select(_weighted_sum, errors.device, errors.dtype)
        run(weight, self._indices, errors, factors, self._scale, self._padding_index, accumulate)


def embedding_plan(
    indices: tuple[int, ...],
    errors: tuple[int, ...],
    *,
    num_embeddings: int,
    left: Factor | None = None,
    right: Factor | None = None,
    element_bytes: int = 4,
) -> Plan:
    """Return what norms and sum cost for these shapes, ``[B, ...]`` and ``[B, ..., D]``.

    element_bytes: size of an element of the errors. The rest as for ``embedding_norms``.
    """
    op = "embedding_plan"
    _check_shapes(op, indices, errors)
    _check_sides(op, errors[-1], num_embeddings, left, right)
    elements, wide = math.prod(errors), sum_bytes(element_bytes)
    flops = 5 * elements + math.prod(indices) * factor_flops(left)
    table = num_embeddings * errors[-1]
    # Tokens and errors are read twice, rows of the table read and written, after it was zeroed.
    traffic = 16 * math.prod(indices) + wide * (2 * elements + table + factor_elements(left))
    if left is None:
        traffic += 2 * elements * element_bytes
    else:
        traffic += elements * (element_bytes + 3 * wide)
    scale = 8 * factor_elements(right)  # float64
    return Plan(
        formula="segments",
        flops=flops,
        bytes=traffic + 2 * scale,
        kept_bytes=scale + (0 if left is None else elements * wide),
        reason="errors of one token are added up within a sample: reading them is all it costs",
        alternatives={"segments": flops},
    )


def embedding_norms(
    indices: Tensor,
    errors: Tensor,
    *,
    num_embeddings: int,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
) -> EmbeddingNorms:
    """Squared norms of the (preconditioned) per-sample gradients of an embedding table.

    indices: int64 or int32 ``[B, ...]``, each in ``[0, num_embeddings)``. On a GPU that is not
        checked here: the forward pass has looked them up already.
    errors: gradient of each sample's loss by its embedded tokens, ``[B, ..., D]``; float32, bf16,
        fp16 or float64.
    num_embeddings: V, rows of the table.
    padding_idx: a token that gets no gradient (negative: from the end, as in torch).
    scale_grad_by_freq: must be False: it divides by counts over the whole batch, so that one
        sample's gradient would depend on the others.
    left: factor of size D; right: ``Diagonal`` of size V; float32 (float64 for float64 errors).
    formula: ``auto`` or ``segments``, which is the only one.

    About 3 B T D flops, B T D elements read, a sort of T tokens for each sample.
    """
    op = "embedding_norms"
    if scale_grad_by_freq:
        raise ValueError(
            f"{op}: scale_grad_by_freq divides by counts over the whole batch, so that a sample's "
            "gradient depends on the others; switch it off for private training"
        )
    if formula not in ("auto", *FORMULAS):
        raise ValueError(f"{op}: no formula {formula!r}; there are auto, {', '.join(FORMULAS)}")
    _check_shapes(op, tuple(indices.shape), tuple(errors.shape))
    if indices.dtype not in (torch.int64, torch.int32) or errors.dtype not in DTYPES:
        raise ValueError(
            f"{op}: indices must be int64 or int32 and errors float32, bf16, fp16 or float64, got "
            f"{describe(indices)} and {describe(errors)}"
        )
    if indices.device != errors.device:
        raise ValueError(
            f"{op}: indices and errors must be on one device, got {describe(indices)} and "
            f"{describe(errors)}"
        )
    _check_sides(op, errors.shape[-1], num_embeddings, left, right)
    check_factor(op, "left", left, [errors.shape[-1]], errors)
    check_factor(op, "right", right, [num_embeddings], errors)
    padding = _padding(op, padding_idx, num_embeddings)
    _check_indices(op, indices, num_embeddings)
    batch = indices.shape[0]
    tokens = indices.reshape(batch, math.prod(indices.shape[1:])).long()
    d = errors.detach()
    if d.dim() != 3:
        d = d.reshape(batch, tokens.shape[1], d.shape[-1])
    if left is not None:
        d = apply_factor(d, left)
    scale = None
    if isinstance(right, Diagonal):
        scale = right.values.detach().double()
    run = backend.select(_sq_norms, d.device, d.dtype)
    sq_norms: Tensor = run(tokens, d, scale, num_embeddings, padding)
    return EmbeddingNorms(sq_norms, "segments", (d,), tokens, scale, num_embeddings, padding)


def embedding_clip_and_sum(
    indices: Tensor,
    errors: Tensor,
    max_norm: float,
    *,
    num_embeddings: int,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    left: Factor | None = None,
    right: Factor | None = None,
    formula: str = "auto",
    out: Tensor | None = None,
    accumulate: bool = False,
) -> LayerSum:
    """Clip every sample's gradient of one table to ``max_norm`` and add them up.

    Arguments as for ``embedding_norms`` and ``EmbeddingNorms.weighted_sum``. L2 sensitivity:
    ``max_norm``.
    """
    norms = embedding_norms(
        indices,
        errors,
        num_embeddings=num_embeddings,
        padding_idx=padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        left=left,
        right=right,
        formula=formula,
    )
    factors = clip_factors(norms.sq_norms, max_norm, dtype=sum_dtype(errors.dtype))
    table, _ = norms.weighted_sum(factors, out=out, accumulate=accumulate)
    return LayerSum(table, None, norms.sq_norms, factors)


def _check_shapes(op: str, indices: tuple[int, ...], errors: tuple[int, ...]) -> None:
    if not indices or errors[:-1] != indices:
        raise ValueError(
            f"{op}: indices must be [B, ...] and errors [B, ..., D], got {list(indices)} and "
            f"{list(errors)}"
        )


def _check_sides(
    op: str, width: int, num_embeddings: int, left: Factor | None, right: Factor | None
) -> None:
    check_factor_size(op, "left", left, [width])
    if right is not None and not isinstance(right, Diagonal):
        raise ValueError(
            f"{op}: right must be a Diagonal over the vocabulary or None, got "
            f"{type(right).__name__}; a dense one would make every row of the table non-zero"
        )
    check_factor_size(op, "right", right, [num_embeddings])


def _padding(op: str, padding_idx: int | None, num_embeddings: int) -> int:
    """Return the index of the padding token, or -1 for none."""
    if padding_idx is None:
        return -1
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"{op}: padding_idx must be in [{-num_embeddings}, {num_embeddings}), got {padding_idx}"
        )
    return padding_idx % num_embeddings


def _check_indices(op: str, indices: Tensor, num_embeddings: int) -> None:
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or indices.numel() == 0:
        return
    low, high = (int(end) for end in indices.aminmax())
    if low < 0 or high >= num_embeddings:
        raise IndexError(
            f"{op}: indices must be in [0, {num_embeddings}), got {low if low < 0 else high}"
        )


def _fake_sq_norms(
    indices: Tensor, errors: Tensor, scale: Tensor | None, vocabulary: int, padding_index: int
) -> Tensor:
    return errors.new_empty(errors.shape[0], dtype=torch.float64)


def _fake_weighted_sum(
    out: Tensor,
    indices: Tensor,
    errors: Tensor,
    factors: Tensor,
    scale: Tensor | None,
    padding_index: int,
    accumulate: bool,
) -> None:
    return None


_sq_norms = backend.register(
    "ghost_embedding_sq_norms(Tensor indices, Tensor errors, Tensor? scale, int vocabulary, "
    "int padding_index) -> Tensor",
    reference=reference_embedding.embedding_sq_norms,
    fake=_fake_sq_norms,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_embedding:embedding_sq_norms",
)
_weighted_sum = backend.register(
    "ghost_embedding_weighted_sum_(Tensor(a!) out, Tensor indices, Tensor errors, Tensor factors, "
    "Tensor? scale, int padding_index, bool accumulate) -> ()",
    reference=reference_embedding.embedding_weighted_sum_,
    fake=_fake_weighted_sum,
    dtypes=DTYPES,
    triton="dpkernels.ops.ghost.triton_embedding:embedding_weighted_sum_",
)
