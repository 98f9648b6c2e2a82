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

``shrink`` takes other functions f of the singular values (``shrinkers``), with ``0 <= f(s) <= s``
and ``f(s) = 0`` up to a cut. Let L be the largest ``|f(s) - f(s')| / |s - s'|`` over singular
values s of M and s' of the perturbed matrix. For ``P = V f(s) / s V^H`` the elements of
``V^H E V'`` are multiplied with ``(f(s') / s' - f(s) / s) / (s'^2 - s^2)``, and s times
that is at most

    |f(s) - f(s') s / s'| / (|s - s'| (s + s'))  <=  (L + f(s') / s') / (s + s')  <=  (L + 1) / cut,

because one of s and s' is above the cut, or the element is 0. So the error is at most ``c 2^-53
(L + 1) |M|_F^2 / cut``. A float32 SVD errs by about ``2^-24 L |M|_F``, so the same rule serves: the
Gram matrix if ``cut >= 2^-24 |M|_F``, which is then better by ``2^5 L / (c (L + 1))``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.tsvd import reference
from dpkernels.ops.tsvd.layers import (
    COMPILED_DTYPES,
    Thresholded,
    checked_layers,
    fake_thresholded,
    gathered,
    slice_count,
)
from dpkernels.ops.tsvd.shrink import shrink, shrink_matrices
from dpkernels.ops.tsvd.shrinkers import (
    Hard,
    Optimal,
    Shrinker,
    Soft,
    numbers,
    slice_noise,
)

__all__ = [
    "Hard",
    "Optimal",
    "Shrinker",
    "Soft",
    "Thresholded",
    "nuclear_norm",
    "shrink",
    "shrink_matrices",
    "singular_values",
    "slice_noise",
    "soft_threshold",
]


def soft_threshold(
    tensors: Tensor | Sequence[Tensor], thresholds: float | Tensor | Sequence[float | Tensor]
) -> Thresholded:
    """Shrink the singular values ``s`` of all Fourier slices to ``max(0, s - threshold)``.

    tensors: ``[d, h, K]`` float32 or float64, K >= 1 clients last, or a list of such (the layers of
        a model) sharing dtype and device. Any strides: ``torch.stack(weights).permute(1, 2, 0)`` is
        taken without a copy, and the result has its layout.
    thresholds: >= 0, one for all tensors or one for each; a tensor ``[K // 2 + 1]`` has one for
        each frequency, and is ``shrink`` with ``Soft``.

    With n = min(d, h), m = max(d, h): about ``K (6 m n^2 + 9 n^3)`` flops. Takes the memory of the
    tensors (K + 2) / K times for their slices, and 2 n / m of that for the operators P.
    Raises ValueError for bad input, and for a value that is not finite, naming the tensor.
    """
    op = "soft_threshold"
    layers = checked_layers(op, tensors)
    limits = _thresholds(op, thresholds, len(layers))
    single = [limit for limit in limits if isinstance(limit, float)]
    if len(single) < len(limits):
        return shrink(tensors, [Soft(limit) for limit in limits])
    # No kernel has to know about thresholds of 0 and empty tensors.
    busy = [i for i, x in enumerate(layers) if single[i] > 0 and x.numel() > 0]
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    if busy:
        run = backend.select(_soft_threshold, layers[0].device, layers[0].dtype)
        found = run([layers[i] for i in busy], [single[i] for i in busy])
    return gathered(layers, busy, found, as_list=not isinstance(tensors, Tensor))


def singular_values(tensors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Singular values of the slices 0 to K // 2: ``[K // 2 + 1, min(d, h)]``, largest first.

    tensors: as for ``soft_threshold``; the result has their dtype, and is a list for a list.

    The remaining slices have the values of slices ``1 ... (K - 1) // 2`` again. About
    ``K (2 m n^2 + 3 n^3)`` flops. Raises as ``soft_threshold`` does.
    """
    layers = checked_layers("singular_values", tensors)
    busy = [i for i, x in enumerate(layers) if x.numel() > 0]
    found: list[Tensor] = []
    if busy:
        run = backend.select(_singular_values, layers[0].device, layers[0].dtype)
        found = run([layers[i] for i in busy])
    results = dict(zip(busy, found, strict=True))
    empty = [x.new_empty(slice_count(x), 0) for x in layers]
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


def _thresholds(
    op: str, thresholds: float | Tensor | Sequence[float | Tensor], count: int
) -> list[float | tuple[float, ...]]:
    each = list(thresholds) if isinstance(thresholds, Sequence) else [thresholds] * count
    if len(each) != count:
        raise ValueError(
            f"{op}: thresholds has {len(each)} numbers for {count} tensors; pass one for all, or "
            "one for each"
        )
    return [numbers(op, "thresholds", threshold) for threshold in each]


def _fake_singular_values(tensors: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(slice_count(x), torch.sym_min(x.shape[0], x.shape[1])) for x in tensors]


_soft_threshold = backend.register(
    "tsvd_soft_threshold(Tensor[] tensors, float[] thresholds) -> (Tensor[] out, Tensor[] kept)",
    reference=reference.soft_threshold,
    fake=fake_thresholded,
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
