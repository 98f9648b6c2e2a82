"""Second moments that are diagonal: of one-hot inputs, and of layers that scale and shift.

Plain PyTorch throughout: a scatter or two passes over memory, with nothing for a kernel to fuse
that would matter beside the forward pass that made the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.factor import Diagonal
from dpkernels.ops.kron import reference
from dpkernels.ops.kron.inputs import SHARINGS, Sharing, describe, finite, known, rows_of


def token_frequencies(tokens: Tensor, vocabulary: int, padding_idx: int | None = None) -> Diagonal:
    """A of an embedding: its inputs are one-hot, so E[a a^T] is diagonal, the tokens' frequencies.

    tokens: integers of any shape in [0, vocabulary).
    padding_idx: a token that gets no gradient: its frequency is 0, and it is no sample.

    Returns float32 ``[vocabulary]``.
    Raises ValueError if there are no tokens, IndexError for one outside of the vocabulary.
    """
    op = "token_frequencies"
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"{op}: tokens must be integers, got {describe(tokens)}")
    if padding_idx is not None and not 0 <= padding_idx < vocabulary:
        raise ValueError(f"{op}: padding_idx must be in [0, {vocabulary}), got {padding_idx}")
    flat = tokens.flatten().long()
    if not torch.compiler.is_compiling() and bool(((flat < 0) | (flat >= vocabulary)).any()):
        wrong = flat[(flat < 0) | (flat >= vocabulary)][0].item()
        raise IndexError(f"{op}: tokens must be in [0, {vocabulary}), got {wrong}")
    # Integers: exact for any number of tokens, and in any order of addition.
    counts = torch.zeros(vocabulary, dtype=torch.int64, device=tokens.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    if padding_idx is not None:
        counts[padding_idx] = 0
    total = counts.sum()
    if not torch.compiler.is_compiling() and total == 0:
        raise ValueError(f"{op}: tokens has none, got {describe(tokens)}; skip empty batches")
    return Diagonal((counts.double() / total).float())


def scale_and_shift_moments(
    normalised: Tensor, errors: Tensor, *, channel_dim: int = -1, sharing: Sharing = "reduce"
) -> tuple[Diagonal, Diagonal]:
    """Second moments, channel by channel, of the gradients of LayerNorm, GroupNorm or RMSNorm.

    y = scale * x + shift has the gradients sum_t d_t x_t and sum_t d_t in each channel. They are
    vectors, not matrices, so they get the diagonal of their second moment, E[(.)^2], as a factor.

    normalised: x, what the scale multiplies: ``[B, T..., n]``, or n elsewhere (``channel_dim``).
    errors: d, of the same shape, of a loss summed over samples.
    sharing: ``reduce`` sums over positions first: exactly the per-sample gradients; ``expand``
        takes every position as a sample.

    Returns the factors of scale and shift, ``[n]`` float32 (float64 for float64). Raises
    ValueError as ``second_moment``.
    """
    op = "scale_and_shift_moments"
    if normalised.shape != errors.shape or normalised.dtype != errors.dtype:
        raise ValueError(
            f"{op}: normalised and errors must have one shape and dtype, got "
            f"{describe(normalised)} and {describe(errors)}"
        )
    known(op, "sharing", sharing, SHARINGS)
    x, d = rows_of(op, normalised, channel_dim), rows_of(op, errors, channel_dim)
    dtype = reference.sum_dtype(x.dtype)
    if x.shape[0] * x.shape[1] == 0:
        raise ValueError(f"{op}: no samples, got {describe(normalised)}; skip empty batches")
    scales, shifts = x.to(dtype) * d.to(dtype), d.to(dtype)
    if sharing == "reduce":
        scales, shifts = scales.sum(1, keepdim=True), shifts.sum(1, keepdim=True)
    moments = (gradients.square().mean((0, 1)) for gradients in (scales, shifts))
    scale, shift = (finite(op, moment) for moment in moments)
    return Diagonal(scale), Diagonal(shift)
