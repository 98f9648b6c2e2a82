"""Clip materialised per-sample gradients: row norms, clip factors, weighted and clipped sums.

Gradients are ``[B, D]``, one row for each sample, or a list of L such tensors that share B (the
parameters of a model): the norm of a sample is then the norm over all of them.

Squared norms are float64 whatever the gradients are. A product of two float32 numbers is exact
there and neither 1e30 nor 1e-30 leaves its range, so the norm is never under-estimated; with
factors rounded towards zero, ``factor * |row| <= C`` holds without a fudge term (a float32 product
``factor * row`` is rounded once more, by 6e-8 of itself). A row with a NaN or an infinity has a
non-finite norm, gets the factor 0 and contributes exactly zero.

Cost of ``clip_and_sum``: 4 B D flops; B D elements read once where a few rows fit in the cache
(twice otherwise), D written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite, check_writable
from dpkernels.ops.clip import reference

Mode = Literal["flat", "automatic", "per_layer"]
Bound = float | list[float] | tuple[float, ...]
MODES: tuple[Mode, ...] = ("flat", "automatic", "per_layer")
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class ClippedSum(NamedTuple):
    """What ``clip_and_sum`` returns.

    sum: ``[D]``, or a list of L tensors ``[D_l]``; the buffer that was passed, if one was.
    sq_norms: float64 ``[B]``, or ``[L, B]`` for ``per_layer``. Private: depends on each sample.
    factors: float32 (float64 for float64 gradients), the shape of ``sq_norms``.
    """

    sum: Tensor | list[Tensor]
    sq_norms: Tensor
    factors: Tensor

    def nonfinite(self) -> Tensor:
        """Return how many samples were dropped: norm not finite (or, of float64, past 1e154)."""
        dropped = ~reference.valid(self.sq_norms)
        return (dropped if dropped.dim() == 1 else dropped.any(0)).sum()


def sensitivity(max_norm: Bound, mode: Mode = "flat") -> float:
    """L2 sensitivity of the clipped sum when one sample is added or removed.

    C for ``flat`` and ``automatic``; the root of the sum of squared bounds for ``per_layer``.
    Replacing one sample by another has twice this sensitivity.
    """
    return math.hypot(*_bounds("sensitivity", max_norm, mode, None))


def row_sq_norms(grads: Tensor | Sequence[Tensor], *, per_tensor: bool = False) -> Tensor:
    """Squared L2 norm of every sample's gradient, in float64.

    grads: ``[B, D]`` float32, bfloat16, float16 or float64, or a list of such sharing B.
    per_tensor: return ``[L, B]``, one norm for each tensor, instead of ``[B]`` over all of them.

    2 B D flops, B D elements read. Raises ValueError for wrong shapes, dtypes or devices.
    """
    tensors = _gradients("row_sq_norms", grads)
    run = backend.select(_row_sq_norms, tensors[0].device, tensors[0].dtype)
    result: Tensor = run(tensors, per_tensor)
    return result


def clip_factors(
    sq_norms: Tensor,
    max_norm: Bound,
    mode: Mode = "flat",
    *,
    gamma: float = 0.01,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Clip factors from squared norms, rounded towards zero.

    A sample whose squared norm is not finite, or negative, in any layer gets the factor 0 in all.

    sq_norms: float64 ``[B]``, or ``[L, B]`` for ``per_layer``.
    max_norm: the bound C > 0; for ``per_layer`` a list of L bounds.
    mode: ``flat`` and ``per_layer``: ``min(1, C / norm)``; ``automatic``: ``C / (norm + gamma)``
        (Bu et al. 2023, AUTO-S), which brings every sample to a norm just below C.
    gamma: >= 0, used by ``automatic`` only.
    dtype: of the factors: float32, or float64 for float64 gradients.

    Returns a tensor of the shape of ``sq_norms``.
    """
    op = "clip_factors"
    rank = 2 if mode == "per_layer" else 1
    if sq_norms.dtype != torch.float64 or sq_norms.dim() != rank:
        raise ValueError(
            f"{op}: sq_norms must be {'[L, B]' if rank == 2 else '[B]'} float64 for mode "
            f"{mode!r}, got {_describe(sq_norms)}; row_sq_norms makes them"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: dtype must be float32 or float64, got {dtype}")
    bounds = _bounds(op, max_norm, mode, sq_norms.shape[0] if rank == 2 else None)
    check_finite(op, "gamma", gamma, at_least=0.0)
    run = backend.select(_clip_factors, sq_norms.device, dtype)
    rows = sq_norms if rank == 2 else sq_norms.unsqueeze(0)
    factors: Tensor = run(rows, bounds, mode == "automatic", gamma, dtype)
    return factors if rank == 2 else factors.squeeze(0)


def layer_factors(
    sq_norms: Sequence[Tensor],
    max_norm: float,
    mode: Mode = "flat",
    *,
    scale: float = 1.0,
    gamma: float = 0.01,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Clip factors of samples whose gradients are spread over layers, in a unit of their own.

    sq_norms: float64 ``[B]`` of each layer, of gradients that are ``1 / scale`` of each sample's
        own, as those of an averaged loss are.
    max_norm, gamma, dtype: as for ``clip_factors``; mode: ``flat`` or ``automatic``.
    scale: > 0. The factors, for gradients as they are, are ``scale min(1, C / (scale norm))``.

    Returns ``[B]``, rounded towards zero; 0 for a sample with a norm that is not finite.
    """
    op = "layer_factors"
    for row in sq_norms:
        if row.dtype != torch.float64 or row.dim() != 1 or row.shape != sq_norms[0].shape:
            raise ValueError(
                f"{op}: sq_norms must be float64 [B], of one B, got {_describe(row)} beside "
                f"{_describe(sq_norms[0])}"
            )
    if not sq_norms or dtype not in (torch.float32, torch.float64) or mode == "per_layer":
        raise ValueError(
            f"{op}: takes at least one layer, dtype float32 or float64 and mode flat or automatic, "
            f"got {len(sq_norms)}, {dtype} and {mode!r}"
        )
    (bound,) = _bounds(op, max_norm, mode, None)
    check_finite(op, "gamma", gamma, at_least=0.0)
    check_finite(op, "scale", scale, above=0.0)
    run = backend.select(_layer_factors, sq_norms[0].device, dtype)
    factors: Tensor = run(list(sq_norms), scale, bound, mode == "automatic", gamma, dtype)
    return factors


def weighted_row_sum(
    grads: Tensor | Sequence[Tensor],
    factors: Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    accumulate: bool = False,
) -> Tensor | list[Tensor]:
    """``sum_b factors[b] * grads[b]``: the second half of ``clip_and_sum``.

    grads: as for ``row_sq_norms``.
    factors: float32 (float64 for float64 gradients), ``[B]`` or ``[L, B]``. A factor of 0 leaves
        its row out whatever it holds, NaN included.
    out: buffers to write, ``[D]`` or a list of L ``[D_l]``, contiguous, of the factors' dtype.
    accumulate: add to ``out`` instead of overwriting it.

    2 B D flops, B D elements read, D written.
    """
    op = "weighted_row_sum"
    tensors = _gradients(op, grads)
    wanted, device = reference.sum_dtype(tensors[0].dtype), tensors[0].device
    batch = tensors[0].shape[0]
    shapes = ([batch], [len(tensors), batch])
    if factors.dtype != wanted or factors.device != device or list(factors.shape) not in shapes:
        raise ValueError(
            f"{op}: factors must be [{batch}] or [{len(tensors)}, {batch}] {wanted} on {device}, "
            f"got {_describe(factors)}"
        )
    buffers = _outputs(op, out, grads, tensors, accumulate, [factors])
    add_weighted_rows(buffers, tensors, factors, accumulate)
    return buffers[0] if isinstance(grads, Tensor) else buffers


def add_weighted_rows(
    out: list[Tensor], grads: list[Tensor], factors: Tensor, accumulate: bool
) -> None:
    """``weighted_row_sum`` for callers whose buffers are known to fit: nothing is checked."""
    run = backend.select(_weighted_row_sum, grads[0].device, grads[0].dtype)
    run(out, grads, factors if factors.dim() == 2 else factors.unsqueeze(0), accumulate)


def clip_and_sum(
    grads: Tensor | Sequence[Tensor],
    max_norm: Bound,
    mode: Mode = "flat",
    *,
    gamma: float = 0.01,
    out: Tensor | Sequence[Tensor] | None = None,
    accumulate: bool = False,
) -> ClippedSum:
    """Clip every sample's gradient and add them up: ``sum_b factor_b * grads[b]``.

    grads: as for ``row_sq_norms``; non-contiguous tensors are taken as they are.
    max_norm, mode, gamma: as for ``clip_factors``; ``sensitivity(max_norm, mode)`` bounds what one
        sample can change.
    out: buffers to write, ``[D]`` or a list of L ``[D_l]``, contiguous, float32 (float64 for
        float64 gradients). Allocated if None.
    accumulate: add to ``out`` instead of overwriting it.

    4 B D flops. Raises ValueError for bad input before anything is written.
    """
    op = "clip_and_sum"
    tensors = _gradients(op, grads)
    bounds = _bounds(op, max_norm, mode, len(tensors))
    check_finite(op, "gamma", gamma, at_least=0.0)
    buffers = _outputs(op, out, grads, tensors, accumulate, [])
    run = backend.select(_clip_and_sum, tensors[0].device, tensors[0].dtype)
    sq_norms, factors = run(buffers, tensors, bounds, mode == "automatic", gamma, accumulate)
    if mode != "per_layer":
        sq_norms, factors = sq_norms.squeeze(0), factors.squeeze(0)
    return ClippedSum(buffers[0] if isinstance(grads, Tensor) else buffers, sq_norms, factors)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _gradients(op: str, grads: Tensor | Sequence[Tensor]) -> list[Tensor]:
    tensors = [grads] if isinstance(grads, Tensor) else list(grads)
    if not tensors:
        raise ValueError(f"{op}: grads is an empty list; pass at least one [B, D] tensor")
    first = tensors[0]
    for g in tensors:
        if g.dim() != 2 or g.dtype not in DTYPES:
            raise ValueError(
                f"{op}: grads must be [B, D] float32/bf16/fp16/float64, got {_describe(g)}; "
                "flatten per-sample gradients first"
            )
        if g is not first and (
            g.shape[0] != first.shape[0] or g.dtype != first.dtype or g.device != first.device
        ):
            raise ValueError(
                f"{op}: all of grads must share batch size, dtype and device, got "
                f"{_describe(first)} and {_describe(g)}"
            )
    return [g.detach() for g in tensors]


def _bounds(op: str, max_norm: Bound, mode: Mode, layers: int | None) -> list[float]:
    if mode not in MODES:
        raise ValueError(f"{op}: no mode {mode!r}; there are {', '.join(MODES)}")
    if not isinstance(max_norm, list | tuple):
        if mode == "per_layer":
            raise ValueError(
                f"{op}: max_norm must be a list with one bound for each tensor for mode "
                f"'per_layer', got the number {max_norm}"
            )
        bounds = [float(max_norm)]
    else:
        bounds = [float(bound) for bound in max_norm]
        if mode != "per_layer":
            raise ValueError(
                f"{op}: max_norm must be one number for mode {mode!r}, got {len(bounds)} of them; "
                "mode 'per_layer' takes one for each tensor"
            )
        if layers is not None and len(bounds) != layers:
            raise ValueError(
                f"{op}: max_norm has {len(bounds)} bounds for {layers} tensors; pass one for each"
            )
    for bound in bounds:
        check_finite(op, "max_norm", bound, above=0.0)
    return bounds


def _outputs(
    op: str,
    out: Tensor | Sequence[Tensor] | None,
    grads: Tensor | Sequence[Tensor],
    tensors: list[Tensor],
    accumulate: bool,
    inputs: list[Tensor],
) -> list[Tensor]:
    """Return the buffers to write: those passed, checked, or new ones."""
    dtype = reference.sum_dtype(tensors[0].dtype)
    if out is None:
        if accumulate:
            raise ValueError(f"{op}: accumulate=True needs out, the buffers to add to")
        return [g.new_empty(g.shape[1], dtype=dtype) for g in tensors]
    if isinstance(out, Tensor) != isinstance(grads, Tensor):
        raise ValueError(f"{op}: out must be a tensor if grads is one, and a list if it is a list")
    buffers = [out] if isinstance(out, Tensor) else list(out)
    if len(buffers) != len(tensors):
        raise ValueError(f"{op}: out has {len(buffers)} buffers for {len(tensors)} tensors")
    for buffer, g in zip(buffers, tensors, strict=True):
        if (
            list(buffer.shape) != [g.shape[1]]
            or buffer.dtype != dtype
            or buffer.device != g.device
            or not buffer.is_contiguous()
        ):
            raise ValueError(
                f"{op}: out must be contiguous [{g.shape[1]}] {dtype} on {g.device}, got "
                f"{_describe(buffer)} with strides {list(buffer.stride())}"
            )
    check_writable(op, "out", buffers, [*tensors, *inputs])
    return buffers


def _fake_sq_norms(grads: list[Tensor], per_tensor: bool) -> Tensor:
    batch = grads[0].shape[0]
    shape = (len(grads), batch) if per_tensor else (batch,)
    return grads[0].new_empty(shape, dtype=torch.float64)


def _fake_factors(
    sq_norms: Tensor, max_norms: list[float], normalise: bool, gamma: float, dtype: torch.dtype
) -> Tensor:
    return torch.empty(sq_norms.shape, dtype=dtype, device=sq_norms.device)


def _fake_layer_factors(
    sq_norms: list[Tensor],
    scale: float,
    max_norm: float,
    normalise: bool,
    gamma: float,
    dtype: torch.dtype,
) -> Tensor:
    return sq_norms[0].new_empty(sq_norms[0].shape, dtype=dtype)


def _fake_weighted_sum(
    out: list[Tensor], grads: list[Tensor], factors: Tensor, accumulate: bool
) -> None:
    return None


def _fake_clip_and_sum(
    out: list[Tensor],
    grads: list[Tensor],
    max_norms: list[float],
    normalise: bool,
    gamma: float,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    shape = (len(max_norms), grads[0].shape[0])
    dtype = reference.sum_dtype(grads[0].dtype)
    return grads[0].new_empty(shape, dtype=torch.float64), grads[0].new_empty(shape, dtype=dtype)


_row_sq_norms = backend.register(
    "row_sq_norms(Tensor[] grads, bool per_tensor) -> Tensor",
    reference=reference.row_sq_norms,
    fake=_fake_sq_norms,
    dtypes=DTYPES,
    triton="dpkernels.ops.clip.triton_impl:row_sq_norms",
)
_clip_factors = backend.register(
    "clip_factors(Tensor sq_norms, float[] max_norms, bool normalise, float gamma, "
    "ScalarType dtype) -> Tensor",
    reference=reference.clip_factors,
    fake=_fake_factors,
    dtypes=frozenset({torch.float32, torch.float64}),
    triton="dpkernels.ops.clip.triton_impl:clip_factors",
)
_layer_factors = backend.register(
    "layer_factors(Tensor[] sq_norms, float scale, float max_norm, bool normalise, float gamma, "
    "ScalarType dtype) -> Tensor",
    reference=reference.layer_factors,
    fake=_fake_layer_factors,
    dtypes=frozenset({torch.float32, torch.float64}),
    # A few numbers for each sample: torch's operations serve on a GPU.
    triton="dpkernels.ops.clip.reference:layer_factors",
)
_weighted_row_sum = backend.register(
    "weighted_row_sum_(Tensor(a!)[] out, Tensor[] grads, Tensor factors, bool accumulate) -> ()",
    reference=reference.weighted_row_sum_,
    fake=_fake_weighted_sum,
    dtypes=DTYPES,
    triton="dpkernels.ops.clip.triton_impl:weighted_row_sum_",
)
_clip_and_sum = backend.register(
    "clip_and_sum_(Tensor(a!)[] out, Tensor[] grads, float[] max_norms, bool normalise, "
    "float gamma, bool accumulate) -> (Tensor sq_norms, Tensor factors)",
    reference=reference.clip_and_sum_,
    fake=_fake_clip_and_sum,
    dtypes=DTYPES,
    triton="dpkernels.ops.clip.triton_impl:clip_and_sum_",
)
