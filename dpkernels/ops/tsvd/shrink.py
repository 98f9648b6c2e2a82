"""``shrink``: any shrinker on the Fourier slices of a model's layers, in one call."""

from __future__ import annotations

from collections.abc import Sequence

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
from dpkernels.ops.tsvd.shrinkers import Shrinker


def shrink(
    tensors: Tensor | Sequence[Tensor], shrinkers: Shrinker | Sequence[Shrinker]
) -> Thresholded:
    """Shrink the singular values of all Fourier slices by ``Soft``, ``Hard`` or ``Optimal``.

    tensors: ``[d, h, K]`` float32 or float64, K >= 1 clients last, or a list of such (the layers of
        a model, sizes mixed) sharing dtype and device. Any strides, as for ``soft_threshold``.
    shrinkers: one for all tensors or one for each; the numbers in a shrinker are one for all
        frequencies, or one for each of 0 ... K // 2.

    How accurate is it? Let L be the largest slope of the shrinker between two singular values,
    ``|f(s) - f(s')| / |s - s'|``. An SVD in float32 errs by about ``2^-24 L |M|_F``, and the
    compiled kernels by less (the package has the bound). L is 1 for ``Soft``. For ``Hard`` it is s
    over the gap around tau: rounding decides whether a singular value within ``2^-24 |M|_F`` of
    tau is kept, and the result is then off by all of it; so is ``Optimal`` at its cut if it has a
    margin. Without one it is continuous but steep at its edge: a singular value that is off by e
    there comes out off by up to ``2 sqrt(e nu sqrt(max(d, h)))``, to first order.

    Cost as for ``soft_threshold``. Raises ValueError for bad input, and for a value that is not
    finite, naming the tensor.
    """
    layers = checked_layers("shrink", tensors)
    each = [shrinkers] * len(layers) if isinstance(shrinkers, Shrinker) else list(shrinkers)
    if len(each) != len(layers):
        raise ValueError(
            f"shrink: shrinkers has {len(each)} for {len(layers)} tensors; pass one for all, or "
            "one for each"
        )
    curves = [
        by.curves(x.shape[0], x.shape[1], slice_count(x))
        for by, x in zip(each, layers, strict=True)
    ]
    # No kernel has to know about empty tensors, nor about those that nothing is cut from.
    busy = [i for i, x in enumerate(layers) if x.numel() > 0 and any(c.cut > 0 for c in curves[i])]
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    if busy:
        run = backend.select(_shrink, layers[0].device, layers[0].dtype)
        flat = [number for i in busy for curve in curves[i] for number in curve]
        found = run([layers[i] for i in busy], flat)
    return gathered(layers, busy, found, as_list=not isinstance(tensors, Tensor))


def shrink_matrices(
    matrices: Tensor | Sequence[Tensor], shrinkers: Shrinker | Sequence[Shrinker]
) -> Tensor | list[Tensor]:
    """Shrink the singular values of plain matrices: ``shrink`` with one client.

    matrices: ``[d, h]`` float32 or float64, or a list of such, sizes mixed; say each layer's
        accumulated update, with ``Optimal(its noise)``.
    shrinkers, accuracy, cost, what raises: as for ``shrink``.
    """
    given = [matrices] if isinstance(matrices, Tensor) else list(matrices)
    for matrix in given:
        if matrix.dim() != 2:
            raise ValueError(
                f"shrink_matrices: matrices must be [d, h], got {list(matrix.shape)}; a layer's "
                "weight is folded to one by dpkernels.federated.folding"
            )
    found = [x.squeeze(2) for x in shrink([x.unsqueeze(2) for x in given], shrinkers).tensors]
    return found[0] if isinstance(matrices, Tensor) else found


_shrink = backend.register(
    "tsvd_shrink(Tensor[] tensors, float[] curves) -> (Tensor[] out, Tensor[] kept)",
    reference=reference.shrink,
    fake=fake_thresholded,
    dtypes=COMPILED_DTYPES,
    triton="dpkernels.ops.tsvd.triton_impl:shrink",
)
