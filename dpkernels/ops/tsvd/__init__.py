"""Truncated tensor SVD by soft threshold: FedCEO's low-rank proximal step over clients.

A layer's weights of K clients are a tensor ``[d, h, K]``. Its slices ``F_0 ... F_{K-1}``, ``d x h``
and complex, are those of the unnormalised discrete Fourier transform over the clients. Slice
``K - k`` is the conjugate of slice ``k``, so only ``K // 2 + 1`` of them are worked on. The nuclear
norm of the tensor (FedCEO, Definition 2.2) is the mean of theirs, ``|W|_* = sum_k |F_k|_* / K``.

``soft_threshold(W_N, tau)`` shrinks every singular value ``s`` of every slice to ``max(0, s -
tau)``. By Parseval ``|W|_F^2 = sum_k |F_k|_F^2 / K``, with the same 1 / K as the nuclear norm, so
the problem falls apart into one for each slice, and the result is (Theorem 3.1)

    argmin_W  c |W - W_N|_F^2 + |W|_*    with  tau = 1 / (2 c);

FedCEO's ``c = lambda / theta^(t/I)`` is ``tau = theta^(t/I) / (2 lambda)``. Judge tau against
``singular_values``: they grow with K, because the transform is not normalised.

With ``M`` a slice (or its transpose, whichever has fewer columns) of singular vectors V, the result
is ``M P``, ``P = V max(0, 1 - tau / s) V^H``, and V and s^2 are the eigenpairs of ``G = M^H M``.
The compiled kernels take this way, with G and its eigenpairs in float64. How accurate is it? The P
that comes out is that of a matrix ``G + E``, where ``|E|_F <= c 2^-53 |M|_F^2``, c moderate, is the
backward error of product and eigensolver. For eigenvalues ``a = s^2`` of G and ``b`` of G + E, and
``f(a) = max(0, 1 - tau / sqrt(a))``, the elements of ``V^H (f(G + E) - f(G)) V'`` are those of
``V^H E V'`` times ``(f(b) - f(a)) / (b - a)``, and s times that is at most ``1 / (2 tau)``. Hence

    |M P - M P_exact|_F  <=  |E|_F / (2 tau)  <=  c 2^-54 |M|_F^2 / tau.

A float32 SVD errs by about ``2^-24 |M|_F``, so the Gram matrix serves if ``tau >= 2^-24 |M|_F``: it
is then better by ``2^6 / c``. Below that an SVD is taken; ``tau = 0`` changes nothing. For float64
the same comparison asks for ``tau >= c |M|_F / 2``, above nearly all singular values, so float64
is left to the reference, which takes an SVD. Singular values alone need no threshold: ``|s' - s| <=
sqrt(|E|_F)``, about ``2^-26 |M|_F``, is a quarter of what float32 can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite
from dpkernels.ops.tsvd import reference

__all__ = ["Thresholded", "nuclear_norm", "singular_values", "soft_threshold"]

DTYPES = frozenset({torch.float32, torch.float64})
# What the compiled kernels take: see above.
COMPILED_DTYPES = frozenset({torch.float32})


class Thresholded(NamedTuple):
    """What ``soft_threshold`` returns.

    tensors: ``[d, h, K]``, with the strides of the input if that was dense; a list for a list.
    kept: int64 ``[K // 2 + 1]``, how many singular values of each slice exceed the threshold; all
        ``min(d, h)`` where that is 0, because nothing is cut then. A list for a list.
    """

    tensors: Tensor | list[Tensor]
    kept: Tensor | list[Tensor]


def soft_threshold(
    tensors: Tensor | Sequence[Tensor], thresholds: float | Sequence[float]
) -> Thresholded:
    """Shrink the singular values ``s`` of all Fourier slices to ``max(0, s - threshold)``.

    tensors: ``[d, h, K]`` float32 or float64, K >= 1 clients last, or a list of such (the layers of
        a model) sharing dtype and device. Any strides: ``torch.stack(weights).permute(1, 2, 0)`` is
        taken without a copy, and the result has its layout.
    thresholds: >= 0, one for all tensors or one for each.

    With n = min(d, h), m = max(d, h): about ``K (6 m n^2 + 9 n^3)`` flops. Takes the memory of the
    tensors (K + 2) / K times for their slices, and 2 n / m of that for the operators P.
    Raises ValueError for bad input, and for a value that is not finite, naming the tensor.
    """
    op = "soft_threshold"
    layers = _layers(op, tensors)
    limits = _thresholds(op, thresholds, len(layers))
    # No kernel has to know about thresholds of 0 and empty tensors.
    busy = [i for i, x in enumerate(layers) if limits[i] > 0 and x.numel() > 0]
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    if busy:
        run = backend.select(_soft_threshold, layers[0].device, layers[0].dtype)
        found = run([layers[i] for i in busy], [limits[i] for i in busy])
    results, counts = (dict(zip(busy, part, strict=True)) for part in found)
    out = [results[i] if i in results else x.clone() for i, x in enumerate(layers)]
    kept = [counts[i] if i in counts else _all_kept(x) for i, x in enumerate(layers)]
    return Thresholded(*((out[0], kept[0]) if isinstance(tensors, Tensor) else (out, kept)))


def singular_values(tensors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Singular values of the slices 0 to K // 2: ``[K // 2 + 1, min(d, h)]``, largest first.

    tensors: as for ``soft_threshold``; the result has their dtype, and is a list for a list.

    The remaining slices have the values of slices ``1 ... (K - 1) // 2`` again. About
    ``K (2 m n^2 + 3 n^3)`` flops. Raises as ``soft_threshold`` does.
    """
    layers = _layers("singular_values", tensors)
    busy = [i for i, x in enumerate(layers) if x.numel() > 0]
    found: list[Tensor] = []
    if busy:
        run = backend.select(_singular_values, layers[0].device, layers[0].dtype)
        found = run([layers[i] for i in busy])
    results = dict(zip(busy, found, strict=True))
    empty = [x.new_empty(_slices(x), 0) for x in layers]
    values = [results.get(i, empty[i]) for i in range(len(layers))]
    return values[0] if isinstance(tensors, Tensor) else values


def nuclear_norm(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Tensor nuclear norm ``sum_k |F_k|_* / K``: float64 ``[]``, or ``[L]`` for a list.

    tensors, cost, what raises: as for ``singular_values``.
    """
    values = singular_values(tensors)
    if isinstance(tensors, Tensor):
        assert isinstance(values, Tensor)
        return _nuclear_norm(values, tensors.shape[2])
    norms = [_nuclear_norm(v, x.shape[2]) for v, x in zip(values, tensors, strict=True)]
    return torch.stack(norms)


def _nuclear_norm(values: Tensor, clients: int) -> Tensor:
    sums = values.sum(1, dtype=torch.float64)
    # Slices 1 to (K - 1) // 2 stand for their conjugates too.
    return (sums.sum() + sums[1 : (clients + 1) // 2].sum()) / clients


def _slices(tensor: Tensor) -> int:
    return tensor.shape[2] // 2 + 1


def _all_kept(tensor: Tensor) -> Tensor:
    return tensor.new_full((_slices(tensor),), min(tensor.shape[:2]), dtype=torch.int64)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _layers(op: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    layers = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not layers:
        raise ValueError(f"{op}: tensors is an empty list; pass at least one [d, h, K] tensor")
    first = layers[0]
    for x in layers:
        if x.dim() != 3 or x.dtype not in DTYPES:
            raise ValueError(
                f"{op}: tensors must be [d, h, K] float32 or float64, got {_describe(x)}; stack "
                "the clients' weights, as matrices, along a last dimension"
            )
        if x.shape[2] == 0:
            raise ValueError(f"{op}: tensors must have at least one client, got {_describe(x)}")
        if x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"{op}: all of tensors must share dtype and device, got {_describe(first)} and "
                f"{_describe(x)}"
            )
    return [x.detach() for x in layers]


def _thresholds(op: str, thresholds: float | Sequence[float], count: int) -> list[float]:
    if isinstance(thresholds, Sequence):
        limits = [float(threshold) for threshold in thresholds]
    else:
        limits = [float(thresholds)] * count
    if len(limits) != count:
        raise ValueError(
            f"{op}: thresholds has {len(limits)} numbers for {count} tensors; pass one for all, or "
            "one for each"
        )
    for threshold in limits:
        check_finite(op, "thresholds", threshold, at_least=0.0)
    return limits


def _fake_soft_threshold(
    tensors: list[Tensor], thresholds: list[float]
) -> tuple[list[Tensor], list[Tensor]]:
    kept = [x.new_empty((_slices(x),), dtype=torch.int64) for x in tensors]
    return [torch.empty_like(x) for x in tensors], kept


def _fake_singular_values(tensors: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(_slices(x), torch.sym_min(x.shape[0], x.shape[1])) for x in tensors]


_soft_threshold = backend.register(
    "tsvd_soft_threshold(Tensor[] tensors, float[] thresholds) -> (Tensor[] out, Tensor[] kept)",
    reference=reference.soft_threshold,
    fake=_fake_soft_threshold,
    dtypes=COMPILED_DTYPES,
    triton="dpkernels.ops.tsvd.triton_impl:soft_threshold",
)
_singular_values = backend.register(
    "tsvd_singular_values(Tensor[] tensors) -> Tensor[]",
    reference=reference.singular_values,
    fake=_fake_singular_values,
    dtypes=COMPILED_DTYPES,
    triton="dpkernels.ops.tsvd.triton_impl:singular_values",
)
