"""``sum_i G_i X A_i`` over clients and layers: what the FedFisher server does in every step.

FedFisher (one-shot federation) minimises ``sum_i (w - w_i)^T F_i (w - w_i)`` over the weights w,
with one Fisher matrix F_i for each client. With K-FAC, F_i = G_i (x) A_i layer by layer, and half
the gradient is ``sum_i G_i (W - W_i) A_i``; a sum of Kronecker products is not one, so every
client's product has to be done, 2,000 times. With diagonal F_i it is ``sum_i f_i * (w - w_i)``.

Nothing here is private, as FedFisher is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_writable
from dpkernels.ops.kron_sum import reference

__all__ = ["DTYPES", "DiagonalFisher", "KronFisher", "kron_sum"]

DTYPES = frozenset({torch.float32, torch.float64})
Layers = Tensor | Sequence[Tensor]


def kron_sum(
    gs: Layers,
    as_: Layers,
    x: Layers,
    centers: Layers | None = None,
    *,
    out: Layers | None = None,
    accumulate: bool = False,
) -> Tensor | list[Tensor]:
    """``sum_i G_i X A_i``, or ``sum_i G_i (X - W_i) A_i`` with centers, for one layer or a list.

    gs: ``[n, O, O]`` float32 or float64, one matrix for each of n clients; or a list of layers.
    as_: ``[n, I, I]``, or a list.
    x: ``[O, I]``, or a list.
    centers: the W_i, ``[n, O, I]``, or a list; subtracted on the fly. None: zero.
    out: contiguous ``[O, I]``, or a list, to write to. Allocated if None.
    accumulate: add to ``out`` instead of overwriting it.

    2 n O I (O + I) flops in either order of the two products; n (O^2 + I^2) elements are read. All
    layers and clients are shared out over the threads together. Returns ``out``. Raises ValueError
    for wrong input before anything is written.
    """
    op = "kron_sum"
    g_list, a_list, x_list = (_list(layers) for layers in (gs, as_, x))
    center_list = [] if centers is None else _list(centers)
    inputs = [*g_list, *a_list, *x_list, *center_list]
    one = isinstance(x, Tensor)
    if out is None:
        if accumulate:
            raise ValueError(f"{op}: accumulate=True needs out, the buffers to add to")
        outs = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x_list]
    else:
        outs = [out] if isinstance(out, Tensor) else list(out)

    def check() -> None:
        _check_layers(op, g_list, a_list, x_list, center_list)
        if out is not None:
            _check_outputs(op, outs, x_list)
            check_writable(op, "out", outs, inputs)

    if not outs or not _checks_itself(outs[0], [*outs, *inputs]):
        check()
    if outs:
        run = backend.select(_kron_sum, outs[0].device, outs[0].dtype)
        try:
            run(outs, g_list, a_list, x_list, center_list, accumulate)
        except (RuntimeError, ValueError):
            check()
            raise
    return outs[0] if one else outs


def _checks_itself(first: Tensor, tensors: list[Tensor]) -> bool:
    """Return whether the compiled operator will serve: it makes all checks before it writes.

    Made in Python they take 0.1 ms for LeNet's layers, beside 1.2 ms for the sums. The words of a
    refusal come from here.
    """
    if torch.compiler.is_compiling() or first.dtype not in DTYPES:
        return False
    run = backend.select(_kron_sum, first.device, first.dtype)
    return run is _kron_sum.overload and all(tensor.is_cpu for tensor in tensors)


class KronFisher:
    """The clients' K-FAC Fishers as one quadratic function of the weights, for many steps.

    gs, as_, centers: as for ``kron_sum``; kept, not copied.

    ``sum_i G_i W_i A_i`` does not depend on W and is computed once: a step then subtracts nothing
    for each client. Where W is close to all W_i that is a difference of large numbers, so it costs
    accuracy there: about log2(|W| / |W - W_i|) bits of the gradient.
    """

    def __init__(self, gs: Layers, as_: Layers, centers: Layers) -> None:
        self._gs, self._as, self._centers = (_list(layers) for layers in (gs, as_, centers))
        weights = [layer.new_zeros(layer.shape[1:]) for layer in self._centers]
        constant = kron_sum(self._gs, self._as, weights, self._centers)
        assert isinstance(constant, list)
        self._constant = constant

    def gradient(self, x: Layers, *, out: Layers | None = None) -> Tensor | list[Tensor]:
        """Return ``sum_i G_i (X - W_i) A_i``, half the gradient; arguments as for ``kron_sum``."""
        op = "KronFisher.gradient"
        xs = _list(x)
        _check_like(op, "x", xs, self._constant)
        if out is None:
            outs = [t.clone() for t in self._constant]
        else:
            outs = [out] if isinstance(out, Tensor) else list(out)
            _check_outputs(op, outs, self._constant)
            check_writable(op, "out", outs, xs)
            torch._foreach_copy_(outs, self._constant)
        # What the clients sent was checked once, and there are thousands of steps.
        if outs:
            run = backend.select(_kron_sum, xs[0].device, xs[0].dtype)
            run(outs, self._gs, self._as, xs, [], True)
        return outs[0] if isinstance(x, Tensor) else outs

    def value(self, x: Layers) -> Tensor:
        """Return ``sum_i <X - W_i, G_i (X - W_i) A_i>`` over all layers, a float64 scalar.

        Not from the constant: near the minimum it would be a difference of large numbers.
        """
        xs = _list(x)
        _check_like("KronFisher.value", "x", xs, self._constant)
        device = xs[0].device if xs else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        layers = zip(self._gs, self._as, self._centers, xs, strict=True)
        for g, a, centers, weights in layers:
            for g_i, a_i, center in zip(g, a, centers, strict=True):
                difference = weights - center
                product = kron_sum(g_i.unsqueeze(0), a_i.unsqueeze(0), difference)
                assert isinstance(product, Tensor)
                total += torch.sum(difference * product, dtype=torch.float64)
        return total


class DiagonalFisher:
    """The clients' diagonal Fishers as one quadratic function of the weights.

    fs, centers: the f_i and w_i, ``[n, ...]`` each, or lists of such. Only their two sums are kept:
    ``sum_i f_i * (w - w_i) = F * w - c``, so a step is one fused multiply-add and the clients'
    uploads are not needed any more (they may be summed securely).
    """

    def __init__(self, fs: Layers, centers: Layers) -> None:
        op = "DiagonalFisher"
        f_list, center_list = _list(fs), _list(centers)
        if [f.shape for f in f_list] != [c.shape for c in center_list]:
            raise ValueError(
                f"{op}: fs and centers must have the same shapes, got "
                f"{[list(f.shape) for f in f_list]} and {[list(c.shape) for c in center_list]}"
            )
        self._sums = [f.sum(0) for f in f_list]
        pairs = zip(f_list, center_list, strict=True)
        self._constant = [-(f * center).sum(0) for f, center in pairs]

    def gradient(self, x: Layers) -> Tensor | list[Tensor]:
        """Return ``sum_i f_i * (w - w_i)``, half the gradient, for each layer."""
        xs = _list(x)
        _check_like("DiagonalFisher.gradient", "x", xs, self._sums)
        layers = zip(self._constant, self._sums, xs, strict=True)
        found = [torch.addcmul(constant, f, weights) for constant, f, weights in layers]
        return found[0] if isinstance(x, Tensor) else found


def _list(layers: Layers) -> list[Tensor]:
    tensors = [layers] if isinstance(layers, Tensor) else list(layers)
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _check_layers(
    op: str, gs: list[Tensor], as_: list[Tensor], xs: list[Tensor], centers: list[Tensor]
) -> None:
    counts = [len(gs), len(as_), len(xs), *([len(centers)] if centers else [])]
    if len(set(counts)) != 1:
        raise ValueError(
            f"{op}: gs, as_, x and centers must have one tensor for each layer, got {counts}"
        )
    for layer, x in enumerate(xs):
        where = f" of layer {layer}" if len(xs) > 1 else ""
        if x.dim() != 2 or x.dtype not in DTYPES:
            raise ValueError(
                f"{op}: x{where} must be [O, I] float32 or float64, got {_describe(x)}; flatten a "
                "convolution's weight behind its first axis"
            )
        rows, cols = x.shape
        clients = gs[layer].shape[0] if gs[layer].dim() else 0
        wanted = {
            "gs": (gs, rows, rows),
            "as_": (as_, cols, cols),
            "centers": (centers, rows, cols),
        }
        for name, (tensors, height, width) in wanted.items():
            if name == "centers" and not centers:
                continue
            found = tensors[layer]
            if (
                list(found.shape) != [clients, height, width]
                or found.dtype != xs[0].dtype
                or found.device != xs[0].device
            ):
                raise ValueError(
                    f"{op}: {name}{where} must be [{clients}, {height}, {width}] {xs[0].dtype} on "
                    f"{xs[0].device}, as x is {_describe(x)}, got {_describe(found)}"
                )


def _check_like(op: str, name: str, tensors: list[Tensor], like: list[Tensor]) -> None:
    if len(tensors) != len(like):
        raise ValueError(
            f"{op}: {name} must have a tensor for each of {len(like)} layers, got {len(tensors)}"
        )
    for found, wanted in zip(tensors, like, strict=True):
        if (
            found.shape != wanted.shape
            or found.dtype != wanted.dtype
            or found.device != wanted.device
        ):
            raise ValueError(f"{op}: {name} must be {_describe(wanted)}, got {_describe(found)}")


def _check_outputs(op: str, outs: list[Tensor], xs: list[Tensor]) -> None:
    _check_like(op, "out", outs, xs)
    for out in outs:
        if not out.is_contiguous():
            raise ValueError(
                f"{op}: out must be contiguous, got {_describe(out)} with strides "
                f"{list(out.stride())}"
            )


def _fake_kron_sum(
    out: list[Tensor],
    gs: list[Tensor],
    as_: list[Tensor],
    xs: list[Tensor],
    centers: list[Tensor],
    accumulate: bool,
) -> None:
    return None


_kron_sum = backend.register(
    "kron_sum_(Tensor(a!)[] out, Tensor[] gs, Tensor[] as_, Tensor[] xs, Tensor[] centers, "
    "bool accumulate) -> ()",
    reference=reference.kron_sum_,
    fake=_fake_kron_sum,
    dtypes=DTYPES,
    triton="dpkernels.ops.kron_sum.triton_impl:kron_sum_",
)
