"""Softmax regression over many clients: clipped gradients and Hessians, private Newton steps.

A record (x in R^d, y in 0..C-1) has ``p = softmax(W x)``, the gradient ``(p - e_y) x^T`` and the
Hessian ``(diag p - p p^T) (x) x x^T``. Both Frobenius norms are products of two small norms, so a
clip factor is closed-form and a clipped sum is a few weighted products: nothing of the size of a
Hessian is formed for a record. Logistic regression is C = 2; a bias is the feature 1
(``Records.ragged(..., bias=True)``).

Layout: W is ``[C, d]``, row-major. A Hessian is ``[C d, C d]`` over W flattened, so that the entry
for ``W[a, i]`` and ``W[b, j]`` is at ``[a d + i, b d + j]``; block (a, b) is
``sum_i c_i (p_a delta_ab - p_a p_b) x x^T``, symmetric, and equal to block (b, a).

Norms and factors are float64 whatever the features are; norms are sums of squares that do not
cancel where p is nearly one-hot, and factors are rounded towards zero, so a clipped contribution
has at most the norm C (Hessian weights are rounded three times more, by 6e-8 each). Probabilities
are float64, too, but for gradients of float32 records on AVX2 and AVX-512: there ``p - e_y`` is
float32, and the norm that is clipped is that of the float32 numbers that are summed. What a record
adds depends on it and on theta alone, to the last bit. A record with a non-finite norm contributes
exactly zero, and so does one with logits beyond float32.

Methods for ``(H + gamma I)^-1 v``: ``solve`` for given Hessians, ``newton_step`` from records with
one client's Hessian at a time, ``newton_step_cg`` without any, ``FeatureCovariance`` for
``H = I_C (x) sum c_i x x^T`` (the FC variant of DP-FedNew).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite, check_writable
from dpkernels.ops.clip.reference import valid
from dpkernels.ops.glm import operators
from dpkernels.ops.glm.buffers import sum_buffer
from dpkernels.ops.glm.covariance import FeatureCovariance, clipped_covariance_sum
from dpkernels.ops.glm.damping import check_solved, damping_of, divided
from dpkernels.ops.glm.records import DTYPES, Records

__all__ = [
    "CgStep",
    "ClippedSums",
    "FeatureCovariance",
    "NewtonStep",
    "RecordNorms",
    "Records",
    "clipped_covariance_sum",
    "clipped_gradient_sum",
    "clipped_hessian_sum",
    "clipped_sums",
    "newton_step",
    "newton_step_cg",
    "record_norms",
    "solve",
]


class RecordNorms(NamedTuple):
    """Squared Frobenius norms, float64 ``[N]``; 0 for rows of no client. Private."""

    gradient: Tensor
    hessian: Tensor

    def nonfinite(self) -> Tensor:
        """Return how many records were left out of the gradient or of the Hessian sum."""
        return (~(valid(self.gradient) & valid(self.hessian))).sum()


class ClippedSums(NamedTuple):
    """What ``clipped_sums`` returns.

    gradients: ``[clients, C, d]``. hessians: ``[clients, C d, C d]``.
    sq_norms: of all records. Private: depends on each record.
    """

    gradients: Tensor
    hessians: Tensor
    sq_norms: RecordNorms


class NewtonStep(NamedTuple):
    """What ``newton_step`` returns: ``[clients, C, d]``, and float64 ``[N]`` (private)."""

    solutions: Tensor
    hessian_sq_norms: Tensor


class CgStep(NamedTuple):
    """What ``newton_step_cg`` returns.

    solutions: ``[clients, C, d]``.
    iterations: int64 ``[clients]``.
    residuals: float64 ``[clients]``, ``|v - (scale H + gamma I) y| / |v|`` computed from y.
    hessian_sq_norms: float64 ``[N]``. Private.
    """

    solutions: Tensor
    iterations: Tensor
    residuals: Tensor
    hessian_sq_norms: Tensor


def record_norms(records: Records, theta: Tensor) -> RecordNorms:
    """Squared Frobenius norms of every record's gradient and Hessian.

    theta: ``[C, d]`` or ``[clients, C, d]``, the dtype of the features.

    ``|p - e_y|^2 |x|^2`` and ``|diag p - p p^T|_F^2 |x|^4``. 2 N C d flops, N d elements read.
    Raises ValueError for wrong shapes and dtypes, and for a label >= C.
    """
    weights = _theta("record_norms", records, theta)
    run = backend.select(operators.record_norms, weights.device, weights.dtype)
    return RecordNorms(*run(records.x, records.labels, records.spans, records.most, weights))


def clipped_sums(
    records: Records,
    theta: Tensor,
    *,
    gradient_bound: float,
    hessian_bound: float,
    gradients_out: Tensor | None = None,
    hessians_out: Tensor | None = None,
) -> ClippedSums:
    """Clipped sums of gradients and Hessians of every client, in one pass over the records.

    theta: as for ``record_norms``.
    gradient_bound, hessian_bound: > 0. A record's gradient is scaled by ``min(1, bound / norm)``,
        its Hessian likewise; adding or removing one record changes its client's sums by at most
        these.
    gradients_out, hessians_out: buffers to write, contiguous ``[clients, C, d]`` and
        ``[clients, C d, C d]``, the dtype of the features. Allocated if None.

    N C (C + 1) d (d + 1) / 2 flops for the Hessians. Beside the results, memory of 12 N C bytes
    (float32). Raises ValueError as ``record_norms``, for bounds that are not positive, and
    for buffers that do not fit, before anything is written.
    """
    op = "clipped_sums"
    weights = _theta(op, records, theta)
    (shape, width), buffer = _sum_widths(weights), (records, weights)
    gradients = sum_buffer(op, "gradients_out", gradients_out, shape, *buffer)
    hessians = sum_buffer(op, "hessians_out", hessians_out, width, *buffer)
    check_writable(op, "hessians_out", [hessians], [gradients])
    bounds = (gradient_bound, hessian_bound)
    norms = _write_sums(op, records, weights, bounds, gradients, hessians)
    return ClippedSums(gradients, hessians, norms)


def clipped_gradient_sum(
    records: Records, theta: Tensor, bound: float, *, out: Tensor | None = None
) -> Tensor:
    """``[clients, C, d]``: the gradients of ``clipped_sums`` alone; 4 N C d flops."""
    op = "clipped_gradient_sum"
    weights = _theta(op, records, theta)
    gradients = sum_buffer(op, "out", out, _sum_widths(weights)[0], records, weights)
    _write_sums(op, records, weights, (bound, None), gradients, None)
    return gradients


def clipped_hessian_sum(
    records: Records, theta: Tensor, bound: float, *, out: Tensor | None = None
) -> Tensor:
    """``[clients, C d, C d]``: the Hessians of ``clipped_sums`` alone."""
    op = "clipped_hessian_sum"
    weights = _theta(op, records, theta)
    hessians = sum_buffer(op, "out", out, _sum_widths(weights)[1], records, weights)
    _write_sums(op, records, weights, (None, bound), None, hessians)
    return hessians


def solve(hessians: Tensor, v: Tensor, gamma: float | Tensor) -> Tensor:
    """``(H_i + gamma_i I)^-1 v_i`` for every client, by Cholesky, each client on one core.

    hessians: ``[clients, n, n]`` float32 or float64, symmetric; only one triangle is read.
    v: ``[clients, n]`` or ``[clients, C, d]`` with C d = n, the same dtype.
    gamma: > 0, a number or float64 ``[clients]``.

    Returns a tensor like ``v``. clients (n^3 / 3 + 2 n^2) flops; memory for one matrix in each
    thread. Raises ValueError for bad input and for a client whose matrix is not positive definite.
    (While ``torch.compile`` traces nobody can look: such a client's solution is NaN.)
    """
    op = "solve"
    if hessians.dim() != 3 or hessians.shape[1] != hessians.shape[2]:
        raise ValueError(f"{op}: hessians must be [clients, n, n], got {list(hessians.shape)}")
    _check_dtype(op, "hessians", hessians)
    clients, n = hessians.shape[:2]
    flat = v.flatten(1) if v.dim() > 1 else v
    if flat.shape != (clients, n) or v.dtype != hessians.dtype or v.device != hessians.device:
        raise ValueError(
            f"{op}: v must be [{clients}, {n}] (or [{clients}, C, d] with C d = {n}) "
            f"{hessians.dtype} on {hessians.device}, got {list(v.shape)} {v.dtype} on {v.device}"
        )
    gammas = damping_of(op, gamma, clients, hessians.device)
    run = backend.select(operators.solve, hessians.device, hessians.dtype)
    solutions, failed = run(hessians.detach(), flat.detach(), gammas)
    check_solved(op, failed)
    result: Tensor = solutions.reshape(v.shape)
    return result


def newton_step(
    records: Records,
    theta: Tensor,
    v: Tensor,
    *,
    hessian_bound: float,
    gamma: float | Tensor,
    scale: float | Tensor = 1.0,
) -> NewtonStep:
    """``(scale_i H_i + gamma_i I)^-1 v_i`` with H_i the clipped Hessian sum of client i.

    theta, hessian_bound: as for ``clipped_sums``.
    v: ``[clients, C, d]``, the dtype of the features.
    gamma: > 0, a number or float64 ``[clients]``.
    scale: > 0, the same; a public constant such as 1 / |D_i|.

    The compiled version solves for C - 1 classes: all Hessians map what is the same for all classes
    to zero. Hessian sum and then clients ((C - 1) d)^3 / 3 flops, with one Hessian in each thread.
    A client with few records B, whose curvature does not outweigh gamma, needs no Hessian: it is C
    blocks less B columns, which takes about C (2 B d^2 + d^3 / 3 + B^2 d) flops and C d (d + B)
    elements of memory (Woodbury's identity, one step of refinement, and the residual is checked).
    Raises as ``solve``.
    """
    op = "newton_step"
    weights, rhs, gammas = _system(op, records, theta, v, hessian_bound, gamma, scale)
    run = backend.select(operators.newton, weights.device, weights.dtype)
    solutions, failed, sq_norms = run(
        records.x, records.spans, records.most, weights, hessian_bound, rhs, gammas
    )
    check_solved(op, failed)
    return NewtonStep(solutions, sq_norms)


def newton_step_cg(
    records: Records,
    theta: Tensor,
    v: Tensor,
    *,
    hessian_bound: float,
    gamma: float | Tensor,
    scale: float | Tensor = 1.0,
    tolerance: float = 1e-5,
    max_iterations: int = 100,
) -> CgStep:
    """``newton_step`` by conjugate gradients, without any Hessian: for large C d.

    ``H V = sum_i c_i (diag p_i - p_i p_i^T) V x_i x_i^T`` takes two products: 4 B C d flops for a
    client's B records and each iteration. Every client stops by itself when its residual, as the
    iteration tracks it, is at most ``tolerance`` times ``|v|``, or after ``max_iterations``.

    tolerance: >= 0. max_iterations: >= 0. The rest as for ``newton_step``.
    Raises ValueError for bad input; not having converged is in the result, not an error.
    """
    op = "newton_step_cg"
    check_finite(op, "tolerance", tolerance, at_least=0.0)
    check_finite(op, "max_iterations", max_iterations, at_least=0)
    weights, rhs, gammas = _system(op, records, theta, v, hessian_bound, gamma, scale)
    run = backend.select(operators.newton_cg, weights.device, weights.dtype)
    shared = (records.x, records.spans, records.most, weights, hessian_bound, rhs, gammas)
    return CgStep(*run(*shared, tolerance, max_iterations))


def _check_dtype(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{op}: {name} must be float32 or float64, got {tensor.dtype}")


def _theta(op: str, records: Records, theta: Tensor) -> Tensor:
    """Return the weights as ``[1 or clients, C, d]``, checked against the records."""
    x = records.x
    shaped = theta.unsqueeze(0) if theta.dim() == 2 else theta
    if (
        shaped.dim() != 3
        or (theta.dim() == 3 and shaped.shape[0] != records.clients)
        or shaped.shape[2] != records.features
        or shaped.shape[1] == 0
        or theta.dtype != x.dtype
        or theta.device != x.device
    ):
        raise ValueError(
            f"{op}: theta must be [C, {records.features}] or [{records.clients}, C, "
            f"{records.features}] {x.dtype} on {x.device}, got {list(theta.shape)} {theta.dtype} "
            f"on {theta.device}"
        )
    if records.label_count > shaped.shape[1]:
        raise ValueError(
            f"{op}: theta has {shaped.shape[1]} classes, but the records have the label "
            f"{records.label_count - 1}"
        )
    return shaped.detach()


def _sum_widths(theta: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of one client's gradient and Hessian sum."""
    classes, features = theta.shape[1:]
    return (classes, features), (classes * features, classes * features)


def _write_sums(
    op: str,
    records: Records,
    theta: Tensor,
    bounds: tuple[float | None, float | None],
    gradients: Tensor | None,
    hessians: Tensor | None,
) -> RecordNorms:
    """Write the sums that there are buffers for; ``bounds`` of gradients and Hessians."""
    for name, bound in zip(("gradient_bound", "hessian_bound"), bounds, strict=True):
        if bound is not None:
            check_finite(op, name, bound, above=0.0)
    run = backend.select(operators.clipped_sums, theta.device, theta.dtype)
    shared = (records.x, records.labels, records.spans, records.most, theta)
    given = [1.0 if bound is None else bound for bound in bounds]
    return RecordNorms(*run(gradients, hessians, *shared, *given))


def _system(
    op: str,
    records: Records,
    theta: Tensor,
    v: Tensor,
    hessian_bound: float,
    gamma: float | Tensor,
    scale: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return theta, right-hand sides and damping of ``(H + gamma/scale I) y = v/scale``."""
    weights = _theta(op, records, theta)
    check_finite(op, "hessian_bound", hessian_bound, above=0.0)
    wanted = (records.clients, *weights.shape[1:])
    if v.shape != wanted or v.dtype != weights.dtype or v.device != weights.device:
        raise ValueError(
            f"{op}: v must be {list(wanted)} {weights.dtype} on {weights.device}, got "
            f"{list(v.shape)} {v.dtype} on {v.device}"
        )
    gammas = damping_of(op, gamma, records.clients, v.device)
    if isinstance(scale, float) and scale == 1.0:
        return weights, v.detach(), gammas
    scales = damping_of(op, scale, records.clients, v.device, name="scale")
    return weights, divided(v.detach(), scales), gammas / scales
