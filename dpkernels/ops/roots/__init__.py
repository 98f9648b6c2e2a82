"""Eigendecompositions of many symmetric matrices of different sizes in one call, and their roots.

Matrices are one batch ``[b, n, n]``, one matrix ``[n, n]``, or a list of either; float32 or
float64. Results have the same form. Each matrix is replaced by its symmetric part
``(A + A^T) / 2``; one that differs from its transpose by more than 2^-10 of its largest element is
refused. A power of two brings the largest element near 1 first, so 1e-30 and 1e30 are the same.
No gradient flows through any of these.

On the CPU, small matrices of one size are decomposed together, one in each SIMD lane; large and
lonely ones run side by side through LAPACK, one thread each. A root with damping needs no
eigenvectors: see ``inverse_root``. On CUDA, matrices up to 64 x 64 are decomposed by a kernel of
ours and larger ones by ``torch.linalg.eigh``; roots come from the eigenpairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite
from dpkernels.ops.factor import Full, LowRank
from dpkernels.ops.roots import newton, reference

__all__ = [
    "DTYPES",
    "Eigh",
    "eigh",
    "inverse_root",
    "inverse_root_factors",
    "low_rank_inverse_root",
]

EighMethod = Literal["auto", "ql", "jacobi", "lapack"]
RootMethod = Literal["auto", "eigh", "tridiagonal", "newton_schulz"]
EIGH_METHODS: tuple[EighMethod, ...] = ("auto", "ql", "jacobi", "lapack")
ROOT_METHODS: tuple[RootMethod, ...] = ("auto", "eigh", "tridiagonal", "newton_schulz")
DTYPES = frozenset({torch.float32, torch.float64})
Matrices = Tensor | Sequence[Tensor]


class Eigh(NamedTuple):
    """Eigenvalues, ascending, ``[(b,) n]``, and eigenvectors, columns of ``[(b,) n, n]``."""

    values: Tensor | list[Tensor]
    vectors: Tensor | list[Tensor]


def eigh(matrices: Matrices, *, method: EighMethod = "auto") -> Eigh:
    """``A = V diag(L) V^T`` for every matrix, in one call.

    matrices: ``[n, n]`` or ``[b, n, n]``, or a list of such, of one dtype and device.
    method: of the compiled CPU implementation; ``ql`` (tridiagonal QR, one matrix in each SIMD
        lane), ``lapack``, ``jacobi`` (slow; the arithmetic of the CUDA kernel), or ``auto``: the
        first up to 128 x 128 where enough matrices of one size fill the lanes, else the second.

    About 9 n^3 flops and, while it runs, 2 n^2 elements for each matrix in work. Raises ValueError
    for a matrix with NaN or Inf or that is not symmetric, and names it.
    """
    batches = _batches("eigh", matrices)
    if method not in EIGH_METHODS:
        raise ValueError(f"eigh: method must be one of {', '.join(EIGH_METHODS)}, got {method!r}")
    if not batches:
        return Eigh([], [])
    run = backend.select(_eigh, batches[0].device, batches[0].dtype)
    values, vectors = run(batches, method)
    return Eigh(_like(matrices, values), _like(matrices, vectors))


def inverse_root(
    matrices: Matrices,
    *,
    power: float = -0.5,
    damping: float | Sequence[float],
    method: RootMethod = "auto",
) -> Tensor | list[Tensor]:
    """``(A + damping I)^power`` of positive semidefinite matrices.

    matrices: ``[n, n]`` or ``[b, n, n]``, or a list of such, of one dtype and device. Negative
        eigenvalues count as 0; ``newton_schulz`` takes them as they are, and needs A + damping I
        to be positive definite.
    power: any number; -1/2, -1 and -1/4 are usual.
    damping: >= 0; one number, or one for each entry of the list. With 0 and a negative power, a
        matrix with an eigenvalue up to n eps times its largest is refused as singular.
    method: ``eigh``: V (L + damping)^power V^T, about 10 n^3 flops, any power.
        ``tridiagonal``: A = Q T Q^T by Householder reflections, then the power of T as a sum of
        shifted inverses, no eigenvectors: 10/3 n^3 flops, for -1 <= power < 0. A matrix with
        damping 0, or with a negative eigenvalue that is no rounding error, goes to ``eigh``.
        In float64 it errs up to 2.3 times as much as ``eigh`` (60 x 60, condition number 4096).
        ``newton_schulz``: matrix products only, for powers -1/p and well-conditioned matrices.
        ``auto``: ``tridiagonal`` for float32 above 64 x 64 where it applies, else ``eigh``. The
        compiled CPU implementation has both; the others take ``eigh`` for ``tridiagonal``.

    Memory: n^2 elements beside the result for each matrix in work. Raises ValueError for NaN, Inf,
    asymmetric or singular matrices, RuntimeError if newton_schulz does not converge.
    """
    op = "inverse_root"
    batches = _batches(op, matrices)
    check_finite(op, "power", power)
    each = damping if isinstance(damping, Sequence) else [damping] * len(batches)
    dampings = [float(value) for value in each]
    if len(dampings) != len(batches):
        raise ValueError(
            f"{op}: damping must be one number or one for each of {len(batches)} matrices, got "
            f"{len(dampings)}"
        )
    for value in dampings:
        check_finite(op, "damping", value, at_least=0.0)
    _check_root_method(op, power, method)
    if not batches:
        return []
    device, dtype = batches[0].device, batches[0].dtype
    if method == "newton_schulz":
        backend.select(_inverse_root_newton, device, dtype)
        # Through the dispatcher: how many steps it takes is not for a compiler to trace.
        return _like(matrices, _inverse_root_newton.overload(batches, round(-1 / power), dampings))
    if _eigh.has_cuda and device.type == "cuda":
        # The eigenpairs take the time, and have a kernel.
        values, vectors = backend.select(_eigh, device, dtype)(batches, "auto")
        return _like(matrices, reference.power_of_pairs(values, vectors, power, dampings))
    run = backend.select(_inverse_root, device, dtype)
    return _like(matrices, run(batches, power, dampings, method))


def inverse_root_factors(
    matrices: Sequence[Tensor],
    *,
    power: float = -0.5,
    damping: float | Sequence[float],
    method: RootMethod = "auto",
) -> list[Full]:
    """``inverse_root`` of a list of ``[n, n]``, as sides of a Kronecker preconditioner."""
    _check_single("inverse_root_factors", matrices)
    roots = inverse_root(matrices, power=power, damping=damping, method=method)
    return [Full(root) for root in roots]


def low_rank_inverse_root(
    matrices: Sequence[Tensor], rank: int, *, power: float = -0.5, damping: float
) -> list[LowRank]:
    """The ``rank`` largest eigenpairs of each ``(A + damping I)^power``'s A; the rest by its mean.

    matrices: list of ``[n, n]``. rank: >= 0; all of a smaller matrix.

    U = tail I + V diag(values - tail) V^T with V the eigenvectors of the ``rank`` largest
    eigenvalues L of A, values = (L + damping)^power, and tail = (m + damping)^power for the mean m
    of the other eigenvalues (1 if there are none). Costs an ``eigh``, keeps n rank elements.
    Raises as ``inverse_root`` does.
    """
    op = "low_rank_inverse_root"
    _check_single(op, matrices)
    check_finite(op, "power", power)
    check_finite(op, "damping", damping, at_least=0.0)
    if rank < 0:
        raise ValueError(f"{op}: rank must be >= 0, got {rank}")
    found = eigh(matrices)
    pairs = zip(found.values, found.vectors, strict=True)
    return [_truncated(op, i, v, x, rank, power, damping) for i, (v, x) in enumerate(pairs)]


def _truncated(
    op: str, index: int, values: Tensor, vectors: Tensor, rank: int, power: float, damping: float
) -> LowRank:
    n = len(values)
    kept = min(rank, n)
    positive = values.double().clamp(min=0)
    rest = positive[: n - kept]
    top = positive[n - kept :].flip(0)
    means = [rest.mean().item()] if len(rest) else []
    cutoff = float(positive[-1:].sum()) * n * torch.finfo(values.dtype).eps
    used = [*top[-1:].tolist(), *means]
    if power < 0 and damping == 0 and any(value <= cutoff for value in used):
        raise ValueError(
            f"{op}: matrix {index} of the list ({n} x {n}) is singular to working precision and "
            "damping is 0; pass damping > 0"
        )
    tail = (means[0] + damping) ** power if means else 1.0
    scaled = (top + damping).pow(power).to(values.dtype)
    return LowRank(vectors[:, n - kept :].flip(1).contiguous(), scaled, tail)


def _check_single(op: str, matrices: Sequence[Tensor]) -> None:
    if isinstance(matrices, Tensor) or any(matrix.dim() != 2 for matrix in matrices):
        raise ValueError(f"{op}: matrices must be a list of [n, n]; unbind a batch first")


def _check_root_method(op: str, power: float, method: str) -> None:
    if method not in ROOT_METHODS:
        raise ValueError(f"{op}: method must be one of {', '.join(ROOT_METHODS)}, got {method!r}")
    if method == "tridiagonal" and not -1.0 <= power < 0.0:
        raise ValueError(f"{op}: method tridiagonal needs -1 <= power < 0, got {power}; use eigh")
    if method == "newton_schulz" and (power >= 0 or abs(-1 / power - round(-1 / power)) > 1e-9):
        raise ValueError(
            f"{op}: method newton_schulz needs power = -1/p for a whole p >= 1, got {power}; use "
            "eigh"
        )


def _batches(op: str, matrices: Matrices) -> list[Tensor]:
    """Return every entry as ``[b, n, n]``; raise ValueError for anything that is not such."""
    tensors = [matrices] if isinstance(matrices, Tensor) else list(matrices)
    for tensor in tensors:
        if tensor.dim() not in (2, 3) or tensor.shape[-1] != tensor.shape[-2]:
            raise ValueError(
                f"{op}: matrices must be [n, n] or [b, n, n], got {list(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{op}: matrices must be float32 or float64, got {tensor.dtype}; convert them first"
            )
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise ValueError(
                f"{op}: all matrices must share dtype and device, got {tensors[0].dtype} on "
                f"{tensors[0].device} and {tensor.dtype} on {tensor.device}"
            )
    return [t.detach() if t.dim() == 3 else t.detach().unsqueeze(0) for t in tensors]


def _like(matrices: Matrices, results: list[Tensor]) -> Tensor | list[Tensor]:
    """Return results ``[b, ...]`` in the form of ``matrices``."""
    if isinstance(matrices, Tensor):
        return results[0] if matrices.dim() == 3 else results[0][0]
    pairs = zip(results, matrices, strict=True)
    return [result if matrix.dim() == 3 else result[0] for result, matrix in pairs]


def _fake_eigh(matrices: list[Tensor], method: str) -> tuple[list[Tensor], list[Tensor]]:
    return [m.new_empty(m.shape[:2]) for m in matrices], [m.new_empty(m.shape).mT for m in matrices]


def _fake_inverse_root(
    matrices: list[Tensor], power: float, damping: list[float], method: str
) -> list[Tensor]:
    return [m.new_empty(m.shape) for m in matrices]


def _fake_inverse_root_newton(
    matrices: list[Tensor], root: int, damping: list[float]
) -> list[Tensor]:
    return [m.new_empty(m.shape) for m in matrices]


# None has a Triton implementation. An eigensolver needs barriers between rotations of one matrix
# in shared memory, which Triton does not express: csrc/roots/cuda.cu has it. What follows from the
# eigenpairs, and all of Newton's iteration, is torch.matmul.
_eigh = backend.register(
    "eigh(Tensor[] matrices, str method) -> (Tensor[], Tensor[])",
    reference=reference.eigh,
    fake=_fake_eigh,
    dtypes=DTYPES,
)
_inverse_root = backend.register(
    "inverse_root(Tensor[] matrices, float power, float[] damping, str method) -> Tensor[]",
    reference=reference.inverse_root,
    fake=_fake_inverse_root,
    dtypes=DTYPES,
)
_inverse_root_newton = backend.register(
    "inverse_root_newton(Tensor[] matrices, int root, float[] damping) -> Tensor[]",
    reference=newton.inverse_root_newton,
    fake=_fake_inverse_root_newton,
    dtypes=DTYPES,
)
