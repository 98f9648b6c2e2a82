"""Softmax-regression records in plain PyTorch.

These functions are the documentation of the compiled ones, the fallback where those are missing,
and, given float64 inputs, the truth that the others are tested against. They take the arguments
of the operators' schemas (``dpkernels.ops.glm.operators``), already checked: ``x [N, d]``,
``labels [N]``, ``spans [clients, 2]``, ``most`` (the largest client's records) and
``theta [1 or clients, C, d]``.

Ragged clients are gathered into ``[clients, most, d]``; probabilities and norms are float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dpkernels.ops.clip.reference import LOST_SQUARES
from dpkernels.ops.clip.reference import clip_factors as clip_factor_rows
from dpkernels.ops.full_precision import full_precision

# Clients are solved in groups whose Hessians take at most this much, beside one that always fits.
GROUP_BYTES = 128 * 2**20


class Table(NamedTuple):
    """What the sums need of the records, padded to ``[clients, most]``.

    rows: where each record stands in ``x``; 0 for padding. inside: which are records.
    x: ``[clients, most, d]``, zero for padding and for rows with a NaN or an infinity.
    squares: float64 ``|x|^2``.
    p, q: float64 ``[clients, most, C]``, probabilities and ``1 - p`` without cancellation.
    """

    rows: Tensor
    inside: Tensor
    x: Tensor
    squares: Tensor
    p: Tensor
    q: Tensor

    def per_record(self, values: Tensor, count: int) -> Tensor:
        """Return padded ``values`` as ``[count]``, in the order of ``x``; 0 for rows of nobody."""
        inside = torch.where(self.inside, values, 0.0)
        return values.new_zeros(count).scatter_add(0, self.rows.flatten(), inside.flatten())


def gather(x: Tensor, spans: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the padded records are, which of them there are, and their features."""
    rows = spans[:, :1] + torch.arange(most, device=spans.device)
    inside = rows < spans[:, 1:]
    rows = torch.where(inside, rows, 0)
    return rows, inside, torch.where(inside.unsqueeze(2), x[rows], 0.0)


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q = 1 - p over the last axis.

    q of the likeliest class is the sum of the others' p: ``1 - p`` would lose all its digits.
    """
    top, index = logits.max(-1, keepdim=True)
    likeliest = torch.arange(logits.shape[-1], device=logits.device) == index
    e = (logits - top).exp()
    others = torch.where(likeliest, 0.0, e).sum(-1, keepdim=True)
    p = e / (1 + others)
    return p, torch.where(likeliest, others / (1 + others), 1 - p)


def tabulate(x: Tensor, spans: Tensor, most: int, theta: Tensor) -> Table:
    """Gather the records and take their probabilities."""
    rows, inside, padded = gather(x, spans, most)
    squares = padded.double().square().sum(2)
    p, q = softmax(padded.double() @ theta.double().mT)
    return Table(rows, inside, clean(padded, squares), squares, p, q)


def clean(padded: Tensor, squares: Tensor) -> Tensor:
    """Zero the rows whose squared norm is not finite: weight 0 times NaN would be NaN."""
    return torch.where(squares.isfinite().unsqueeze(2), padded, 0.0)


def residuals(table: Table, labels: Tensor) -> Tensor:
    """Return ``p - e_y`` of every record, ``[clients, most, C]`` float64."""
    classes = torch.arange(table.p.shape[2], device=labels.device)
    return torch.where(labels[table.rows].unsqueeze(2) == classes, -table.q, table.p)


def gradient_sq_norms(table: Table, labels: Tensor) -> Tensor:
    """``|p - e_y|^2 |x|^2``, ``[clients, most]``."""
    return (residuals(table, labels).square().sum(2) + LOST_SQUARES) * table.squares


def hessian_sq_norms(table: Table) -> Tensor:
    """``|diag p - p p^T|_F^2 |x|^4``, ``[clients, most]``, as a sum of squares.

    ``sum_c (p_c q_c)^2 + 2 sum_{c' < c} p_c'^2 p_c^2``: nothing cancels where p is nearly one-hot.
    """
    squares = table.p.square()
    before = torch.nn.functional.pad(squares.cumsum(2)[..., :-1], (1, 0))
    products = (table.p * table.q).square() + 2 * squares * before
    return (products.sum(2) + LOST_SQUARES) * table.squares.square()


def clip_factors(sq_norms: Tensor, bound: float, dtype: torch.dtype) -> Tensor:
    """``min(1, bound / norm)``, rounded towards zero; 0 for a norm that is not finite."""
    flat = clip_factor_rows(sq_norms.reshape(1, -1), [bound], False, 0.0, dtype)
    return flat.reshape(sq_norms.shape)


def weighted(factors: Tensor, values: Tensor) -> Tensor:
    """Return ``factors * values`` in the factors' dtype; a factor of 0 ignores its value."""
    return torch.where(factors != 0, factors.double() * values, 0.0).to(factors.dtype)


def glm_record_norms(
    x: Tensor, labels: Tensor, spans: Tensor, most: int, theta: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared norms of every record's gradient and Hessian, float64 ``[N]``."""
    table = tabulate(x, spans, most, theta)
    gradient = table.per_record(gradient_sq_norms(table, labels), x.shape[0])
    return gradient, table.per_record(hessian_sq_norms(table), x.shape[0])


def gradient_sums(table: Table, labels: Tensor, factors: Tensor) -> Tensor:
    """``sum_i factors_i (p_i - e_y) x_i^T``, ``[clients, C, d]``."""
    errors = weighted(factors.unsqueeze(2), residuals(table, labels))
    with full_precision(errors):
        return errors.mT @ table.x


def hessian_sums(table: Table, factors: Tensor) -> Tensor:
    """``sum_i factors_i (diag p_i - p_i p_i^T) (x) x_i x_i^T``, ``[clients, C d, C d]``.

    Every block (a, b) is symmetric and equals block (b, a).
    """
    clients, classes, features = table.x.shape[0], table.p.shape[2], table.x.shape[2]
    sums = table.x.new_empty(clients, classes, features, classes, features)
    for a in range(classes):
        for b in range(a, classes):
            entry = table.p[..., a] * (table.q[..., a] if a == b else -table.p[..., b])
            weights = weighted(factors, entry).unsqueeze(2)
            with full_precision(table.x):
                block = (table.x * weights).mT @ table.x
            block = block.triu() + block.triu(1).mT
            sums[:, a, :, b] = block
            if a != b:
                sums[:, b, :, a] = block
    return sums.reshape(clients, classes * features, classes * features)


def glm_clipped_sums_(
    gradients: Tensor | None,
    hessians: Tensor | None,
    x: Tensor,
    labels: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    gradient_bound: float,
    hessian_bound: float,
) -> tuple[Tensor, Tensor]:
    """Write clipped sums of gradients and Hessians; return the squared norms of what is summed.

    Norms are float64 ``[N]``; ``[0]`` for a sum that is not asked for.
    """
    table = tabulate(x, spans, most, theta)
    norms = [table.squares.new_empty(0), table.squares.new_empty(0)]
    if gradients is not None:
        of_gradients = gradient_sq_norms(table, labels)
        norms[0] = table.per_record(of_gradients, x.shape[0])
        factors = clip_factors(of_gradients, gradient_bound, x.dtype)
        gradients.copy_(gradient_sums(table, labels, factors))
    if hessians is not None:
        of_hessians = hessian_sq_norms(table)
        norms[1] = table.per_record(of_hessians, x.shape[0])
        hessians.copy_(hessian_sums(table, clip_factors(of_hessians, hessian_bound, x.dtype)))
    return norms[0], norms[1]


def glm_feature_covariance(
    x: Tensor, spans: Tensor, most: int, bound: float
) -> tuple[Tensor, Tensor]:
    """``sum_i min(1, bound / |x_i|^2) x_i x_i^T``, ``[clients, d, d]``, and ``|x|^4``, ``[N]``."""
    rows, inside, padded = gather(x, spans, most)
    squares = padded.double().square().sum(2)
    sq_norms = squares.square()
    cleaned = clean(padded, squares)
    scaled = cleaned * clip_factors(sq_norms, bound, x.dtype).unsqueeze(2)
    with full_precision(scaled):
        sums = scaled.mT @ cleaned
    norms = torch.where(inside, sq_norms, 0.0).flatten()
    return sums, sq_norms.new_zeros(x.shape[0]).scatter_add(0, rows.flatten(), norms)


def glm_solve(hessians: Tensor, v: Tensor, gammas: Tensor) -> tuple[Tensor, Tensor]:
    """``(H + gamma I)^-1 v`` by Cholesky, and where a matrix was not positive definite."""
    eye = torch.eye(hessians.shape[1], dtype=hessians.dtype, device=hessians.device)
    damped = hessians + gammas.to(hessians.dtype)[:, None, None] * eye
    factors, info = torch.linalg.cholesky_ex(damped)
    solutions = torch.cholesky_solve(v.unsqueeze(2), factors).squeeze(2)
    failed = info.to(torch.int64)
    return torch.where(failed.unsqueeze(1) != 0, torch.nan, solutions), failed


def groups(clients: int, width: int, itemsize: int) -> int:
    """Return how many clients' Hessians ``[width, width]`` fit in GROUP_BYTES, at least one."""
    return max(1, min(clients, GROUP_BYTES // max(1, width * width * itemsize)))


def glm_newton(
    x: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    hessian_bound: float,
    v: Tensor,
    gammas: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(H + gamma I)^-1 v`` with H = the clipped Hessian sums, a group of clients at a time."""
    clients, width = v.shape[0], theta.shape[1] * theta.shape[2]
    size = groups(clients, width, x.element_size())
    solutions, failed = torch.empty_like(v), gammas.new_empty(clients, dtype=torch.int64)
    sq_norms = gammas.new_zeros(x.shape[0])
    for first in range(0, clients, size):
        part = slice(first, min(first + size, clients))
        table = tabulate(x, spans[part], most, theta if theta.shape[0] == 1 else theta[part])
        norms = hessian_sq_norms(table)
        hessians = hessian_sums(table, clip_factors(norms, hessian_bound, x.dtype))
        y, failed[part] = glm_solve(hessians, v[part].reshape(-1, width), gammas[part])
        solutions[part] = y.reshape(v[part].shape)
        sq_norms += table.per_record(norms, x.shape[0])
    return solutions, failed, sq_norms


def apply_hessians(table: Table, factors: Tensor, gammas: Tensor, v: Tensor) -> Tensor:
    """``sum_i factors_i (diag p - p p^T) V x_i x_i^T + gamma V``, ``[clients, C, d]``."""
    scores = table.x @ v.mT
    p = table.p.nan_to_num().to(v.dtype)
    curved = p * (scores - (p * scores).sum(2, keepdim=True))
    return (factors.unsqueeze(2) * curved).mT @ table.x + gammas[:, None, None] * v


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum((1, 2))


def glm_newton_cg(
    x: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    hessian_bound: float,
    v: Tensor,
    gammas: Tensor,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``glm_newton`` by conjugate gradients; a client that has converged stands still."""
    table = tabulate(x, spans, most, theta)
    sq_norms = hessian_sq_norms(table)
    factors = clip_factors(sq_norms, hessian_bound, x.dtype)
    damping = gammas.to(v.dtype)
    y, remainder, direction = torch.zeros_like(v), v, v
    start = square = _dots(v, v)
    iterations = torch.zeros_like(square, dtype=torch.int64)
    active = square > tolerance**2 * start
    for _ in range(max_iterations):
        # While it is compiled there is nothing to look at yet: all iterations are gone through.
        if not torch.compiler.is_compiling() and not bool(active.any()):
            break
        image = apply_hessians(table, factors, damping, direction)
        curvature = _dots(direction, image)
        active = active & (curvature > 0)
        step = torch.where(active, square / curvature, 0.0).to(v.dtype)[:, None, None]
        y = y + step * direction
        remainder = remainder - step * image
        before, square = square, torch.where(active, _dots(remainder, remainder), square)
        ratio = torch.where(active, square / before, 0.0).to(v.dtype)[:, None, None]
        direction = torch.where(active[:, None, None], remainder + ratio * direction, direction)
        iterations = iterations + active
        active = active & (square > tolerance**2 * start)
    left = v - apply_hessians(table, factors, damping, y)
    residuals = torch.where(start > 0, _dots(left, left) / start, 0.0).sqrt()
    return y, iterations, residuals, table.per_record(sq_norms, x.shape[0])
