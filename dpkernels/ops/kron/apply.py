"""Apply one or both sides of a Kronecker preconditioner."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_writable
from dpkernels.ops.factor import Factor, parts_of
from dpkernels.ops.kron import reference
from dpkernels.ops.kron.inputs import DTYPES, describe


def apply_factor(
    x: Tensor, factor: Factor | None, *, bias: bool = False, out: Tensor | None = None
) -> Tensor:
    """Multiply every vector of ``x`` by a symmetric factor: ``x U``, or ``[x, 1] U`` with ``bias``.

    x: ``[..., n]`` float32, bfloat16, float16 or float64, any strides.
    factor: of size n (n + 1 with ``bias``), float32 (float64 for float64 x); None: the identity.
    bias: append a 1 to every vector, without storing it: ``x U[:n] + U[n]``.
    out: contiguous ``[..., n]`` (``[..., n + 1]`` with ``bias``) of the factor's dtype; may be x
        itself, which then goes through a copy. Allocated if None.

    For M vectors 2 M n^2 flops (full), 4 M n r (rank r) or M n (diagonal); x read and out written
    once. Returns ``out``. Raises ValueError for wrong shapes, dtypes or devices.
    """
    op = "apply_factor"
    if x.dim() == 0 or x.dtype not in DTYPES:
        raise ValueError(f"{op}: x must be [..., n] float32/bf16/fp16/float64, got {describe(x)}")
    width = x.shape[-1] + bias
    _check_factor(op, "factor", factor, width, x)
    parts, tail = parts_of(factor)
    target, in_place = _target(op, out, x, [*x.shape[:-1], width], parts)
    if target.numel():
        run = backend.select(_apply_factor, x.device, x.dtype)
        rows = x.detach().reshape(target.numel() // width, x.shape[-1])
        run(target.view(-1, width), rows, parts, tail, bias)
    return target if in_place is None else in_place.copy_(target)


def apply_kron(
    x: Tensor, left: Factor | None, right: Factor | None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply every matrix of ``x`` from both sides: ``U_G X U_A``, any mix of forms.

    x: ``[..., O, I]`` float32, bfloat16, float16 or float64, any strides.
    left, right: of sizes O and I, float32 (float64 for float64 x); None: the identity.
    out: contiguous, x's shape, of the factors' dtype; may be x itself, which then goes through a
        copy. Allocated if None.

    For N matrices 2 N O I (O + I) flops with full factors, 4 N O I (r_G + r_A) with low ranks; the
    two orders cost the same, because a factor is square. Returns ``out``. Raises ValueError for
    wrong shapes, dtypes or devices.
    """
    op = "apply_kron"
    if x.dim() < 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"{op}: x must be [..., O, I] float32/bf16/fp16/float64, got {describe(x)}; for "
            "vectors there is apply_factor"
        )
    rows, columns = x.shape[-2:]
    _check_factor(op, "left", left, rows, x)
    _check_factor(op, "right", right, columns, x)
    (left_parts, left_tail), (right_parts, right_tail) = parts_of(left), parts_of(right)
    target, in_place = _target(op, out, x, list(x.shape), left_parts + right_parts)
    if target.numel():
        run = backend.select(_apply_kron, x.device, x.dtype)
        matrices = x.detach().reshape(-1, rows, columns)
        run(target.view(matrices.shape), matrices, left_parts, left_tail, right_parts, right_tail)
    return target if in_place is None else in_place.copy_(target)


def _check_factor(op: str, name: str, factor: Factor | None, size: int, x: Tensor) -> None:
    if factor is None:
        return
    if factor.size != size:
        raise ValueError(
            f"{op}: {name} must take vectors of {size} elements, got one for {factor.size} (x is "
            f"{describe(x)}; a bias counts as one more)"
        )
    wanted = reference.sum_dtype(x.dtype)
    for part in parts_of(factor)[0]:
        if part.dtype != wanted or part.device != x.device:
            raise ValueError(
                f"{op}: {name} must be {wanted} on {x.device}, as x is {x.dtype}, got "
                f"{describe(part)}"
            )


def _target(
    op: str, out: Tensor | None, x: Tensor, shape: list[int], inputs: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return the buffer to write, and ``out`` if that is x and the buffer is to be copied to it."""
    dtype = reference.sum_dtype(x.dtype)
    if out is None:
        return x.new_empty(shape, dtype=dtype), None
    if list(out.shape) != shape or out.dtype != dtype or out.device != x.device:
        raise ValueError(f"{op}: out must be {shape} {dtype} on {x.device}, got {describe(out)}")
    check_writable(op, "out", [out], inputs if out is x else [x, *inputs])
    if out is x:
        return torch.empty_like(x, memory_format=torch.contiguous_format), out
    if not out.is_contiguous():
        raise ValueError(f"{op}: out must be contiguous, got strides {list(out.stride())}")
    return out, None


def _fake_apply_factor(
    out: Tensor, x: Tensor, factor: list[Tensor], tail: float, bias: bool
) -> None:
    return None


def _fake_apply_kron(
    out: Tensor,
    x: Tensor,
    left: list[Tensor],
    left_tail: float,
    right: list[Tensor],
    right_tail: float,
) -> None:
    return None


_apply_factor = backend.register(
    "apply_factor_(Tensor(a!) out, Tensor x, Tensor[] factor, float tail, bool bias) -> ()",
    reference=reference.apply_factor_,
    fake=_fake_apply_factor,
    dtypes=DTYPES,
    triton="dpkernels.ops.kron.triton_impl:apply_factor_",
)
_apply_kron = backend.register(
    "apply_kron_(Tensor(a!) out, Tensor x, Tensor[] left, float left_tail, Tensor[] right, "
    "float right_tail) -> ()",
    reference=reference.apply_kron_,
    fake=_fake_apply_kron,
    dtypes=DTYPES,
    triton="dpkernels.ops.kron.triton_impl:apply_kron_",
)
