"""Solvers of one client's Newton system for the loops of ``loops``: conjugate gradients, Cholesky.

H = sum_i c_i (diag p_i - p_i p_i^T) (x) x_i x_i^T, ``[C d, C d]``; c_i: the clip factor over |D|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.federated.loops import NewtonLoop, Solver

_MOST_ITERATIONS = 200


def conjugate_gradients(loop: NewtonLoop) -> None:
    """Solve by conjugate gradients to the algorithm's tolerance; no Hessian is formed."""
    theta, gamma = loop.server.theta, loop.algorithm.gamma
    tolerance = loop.algorithm.tolerance**2
    mm, dot = torch.mm, torch.dot
    residual, direction = torch.empty_like(theta), torch.empty_like(theta)
    flat_residual, flat_direction = residual.view(-1), direction.view(-1)
    for client, (x, columns, y) in enumerate(zip(loop.x, loop.columns, loop.uploads, strict=True)):
        p = torch.softmax(mm(theta, columns), 0)
        weighted = loop.weights(client, p) * p
        loop.right_hand_side(client, p, out=residual)
        direction.copy_(residual)
        y.zero_()
        square = dot(flat_residual, flat_residual).item()
        wanted = tolerance * square
        for _ in range(_MOST_ITERATIONS):
            if square <= wanted:
                break
            logits = mm(direction, columns)
            logits.sub_((p * logits).sum(0)).mul_(weighted)
            image = torch.addmm(direction, logits, x, beta=gamma)
            step = square / dot(flat_direction, image.view(-1)).item()
            y.add_(direction, alpha=step)
            residual.sub_(image, alpha=step)
            before, square = square, dot(flat_residual, flat_residual).item()
            direction.mul_(square / before).add_(residual)
        loop.add_noise(y)


def one_product(loop: NewtonLoop) -> None:
    """Form H as one product of curvatures ``[C C, B]`` with x x^T ``[B, d d]``; Cholesky."""
    classes, features, records = loop.size.classes, loop.size.features, loop.size.records
    width = classes * features
    hessian = torch.empty(width, width)
    blocks = hessian.view(classes, features, classes, features).permute(0, 2, 1, 3)
    diagonal, outer = hessian.diagonal(), torch.empty(records, features, features)
    s = torch.empty(classes, features)
    theta = loop.server.theta
    for client, (x, columns, y) in enumerate(zip(loop.x, loop.columns, loop.uploads, strict=True)):
        p = torch.softmax(torch.mm(theta, columns), 0)
        weighted = loop.weights(client, p) * p
        curvature = torch.mul(weighted.unsqueeze(1), p).neg_()
        curvature.diagonal().add_(weighted.t())
        torch.mul(x.unsqueeze(2), x.unsqueeze(1), out=outer)
        sums = torch.mm(curvature.view(-1, records), outer.view(records, -1))
        blocks.copy_(sums.view(classes, classes, features, features))
        diagonal.add_(loop.algorithm.gamma)
        _solve(loop, hessian, loop.right_hand_side(client, p, out=s), y)


def by_class(loop: NewtonLoop) -> None:
    """Form the upper triangle of H by one product for each class; Cholesky reads no more."""
    classes, features = loop.size.classes, loop.size.features
    width = classes * features
    hessian = torch.empty(width, width)
    diagonal = hessian.diagonal()
    s = torch.empty(classes, features)
    theta = loop.server.theta
    rows = [hessian[a * features : (a + 1) * features, a * features :] for a in range(classes)]
    for client, (x, columns, y) in enumerate(zip(loop.x, loop.columns, loop.uploads, strict=True)):
        p = torch.softmax(torch.mm(theta, columns), 0)
        weighted = loop.weights(client, p) * p
        curvature = torch.mul(weighted.unsqueeze(1), p).neg_()
        curvature.diagonal().add_(weighted.t())
        _upper(x, columns, curvature.permute(2, 0, 1).contiguous(), rows)
        diagonal.add_(loop.algorithm.gamma)
        _solve(loop, hessian, loop.right_hand_side(client, p, out=s), y, upper=True)


def low_rank(loop: NewtonLoop) -> None:
    """Form H as a block diagonal minus Z^T Z with Z = sqrt(c) p (x) x, ``[B, C d]``; Cholesky."""
    classes, features, records = loop.size.classes, loop.size.features, loop.size.records
    width = classes * features
    hessian = torch.empty(width, width)
    diagonal = hessian.diagonal()
    blocks = hessian.view(classes, features, classes, features).diagonal(dim1=0, dim2=2)
    blocks = blocks.permute(2, 0, 1)
    s = torch.empty(classes, features)
    theta = loop.server.theta
    for client, (x, columns, y) in enumerate(zip(loop.x, loop.columns, loop.uploads, strict=True)):
        p = torch.softmax(torch.mm(theta, columns), 0)
        factors = loop.weights(client, p)
        roots = (factors.sqrt() * p).t().contiguous()
        z = torch.mul(roots.unsqueeze(2), x.unsqueeze(1)).view(records, width)
        torch.mm(z.t(), z, out=hessian).neg_()
        scaled = torch.mul((factors * p).unsqueeze(2), x)
        blocks.add_(torch.matmul(columns, scaled))
        diagonal.add_(loop.algorithm.gamma)
        _solve(loop, hessian, loop.right_hand_side(client, p, out=s), y)


def one_class_less(loop: NewtonLoop) -> None:
    """Solve in the C - 1 directions that are orthogonal to (1, ..., 1); H is zero along it.

    With Q ``[C, C - 1]`` of orthonormal columns, Q^T 1 = 0, the system falls apart into one with
    (Q^T (diag p - p p^T) Q) (x) x x^T, of width (C - 1) d, and s / gamma along 1.
    """
    classes, features, records = loop.size.classes, loop.size.features, loop.size.records
    fewer = classes - 1
    width = fewer * features
    basis = torch.linalg.qr(torch.eye(classes)[:, :fewer] - 1 / classes).Q
    pairs = torch.mul(basis.unsqueeze(2), basis.unsqueeze(1)).view(classes, -1)
    hessian = torch.empty(width, width)
    diagonal = hessian.diagonal()
    s = torch.empty(classes, features)
    theta, gamma = loop.server.theta, loop.algorithm.gamma
    rows = [hessian[a * features : (a + 1) * features, a * features :] for a in range(fewer)]
    for client, (x, columns, y) in enumerate(zip(loop.x, loop.columns, loop.uploads, strict=True)):
        p = torch.softmax(torch.mm(theta, columns), 0)
        factors = loop.weights(client, p)
        # Q^T diag(c p) Q - c (Q^T p) (Q^T p)^T, [B, C - 1, C - 1]
        turned = torch.mm(p.t(), basis)
        curvature = torch.mm((factors * p).t(), pairs).view(records, fewer, fewer)
        curvature.sub_(torch.mul((factors.unsqueeze(1) * turned).unsqueeze(2), turned.unsqueeze(1)))
        _upper(x, columns, curvature, rows)
        diagonal.add_(gamma)
        loop.right_hand_side(client, p, out=s)
        turned_s = torch.mm(basis.t(), s)
        factor = torch.linalg.cholesky_ex(hessian, upper=True).L
        found = torch.cholesky_solve(turned_s.view(width, 1), factor, upper=True)
        torch.mm(basis, found.view(fewer, features), out=y)
        y.add_(s.mean(0), alpha=1 / gamma)
        loop.add_noise(y)


def _upper(x: Tensor, columns: Tensor, curvature: Tensor, rows: list[Tensor]) -> None:
    """Write the upper triangle of H by blocks of rows; curvature: ``[B, C, C]``."""
    for a, out in enumerate(rows):
        scaled = torch.mul(curvature[:, a, a:].unsqueeze(2), x.unsqueeze(1))
        torch.mm(columns, scaled.reshape(len(x), -1), out=out)


def _solve(loop: NewtonLoop, hessian: Tensor, s: Tensor, y: Tensor, upper: bool = False) -> None:
    factor = torch.linalg.cholesky_ex(hessian, upper=upper).L
    torch.cholesky_solve(s.view(-1, 1), factor, upper=upper, out=y.view(-1, 1))
    loop.add_noise(y)


CG: dict[str, Solver] = {"conjugate gradients": conjugate_gradients}
EXACT: dict[str, Solver] = {
    "one product with x x^T": one_product,
    "a product for each class": by_class,
    "block diagonal minus low rank": low_rank,
    "one class less": one_class_less,
}
