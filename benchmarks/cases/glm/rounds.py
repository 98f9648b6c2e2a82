"""One round of many small clients against a loop over them in plain PyTorch.

A simulation of a federation is such a loop. These are as fast as they get: what does not change
from round to round is prepared (norms of the features, one-hot labels), results go to kept buffers,
and nothing is recorded for autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases.glm.data import (
    GAMMA,
    GRADIENT_BOUND,
    HESSIAN_BOUND,
    Size,
    make_problem,
    probabilities,
    records_of,
)
from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.glm import Records, clipped_gradient_sum

LOOP = "Python loop over the clients"
CHOLESKY_LOOP = "Python loop of Z^T Z, cholesky_ex, cholesky_solve"


def prepared(inputs: Inputs, bound: float, power: int) -> tuple[Tensor, Tensor]:
    """Return one-hot labels ``[clients, B, C]`` and ``bound / |x|^power``, ``[clients, B, 1]``."""
    x, labels, theta = inputs[:3]
    one_hot = torch.nn.functional.one_hot(labels, theta.shape[1]).to(x.dtype)
    return one_hot, bound / torch.linalg.vector_norm(x, dim=2, keepdim=True) ** power


@torch.inference_mode()
def _gradient_loop(
    x: Tensor, theta: Tensor, labels: Tensor, bounds: Tensor, out: Tensor
) -> Outputs:
    clients = (x.unbind(), theta.unbind(), labels.unbind(), bounds.unbind(), out.unbind())
    for some, weights, one_hot, bound, sums in zip(*clients, strict=True):
        residual = torch.softmax(torch.mm(some, weights.t()), 1).sub_(one_hot)
        factors = bound.div(torch.linalg.vector_norm(residual, 2, 1, True)).clamp_(max=1.0)
        torch.mm(residual.mul_(factors).t(), some, out=sums)
    return [out]


def _gradient_batch(
    x: Tensor, theta: Tensor, labels: Tensor, bounds: Tensor, out: Tensor
) -> Outputs:
    residual = probabilities(x, theta).sub_(labels)
    factors = bounds.div(torch.linalg.vector_norm(residual, dim=2, keepdim=True)).clamp_(max=1.0)
    return [torch.bmm(residual.mul_(factors).mT, x, out=out)]


def gradient_case(size: Size, target: Target) -> Case:
    """Clipped gradient sums: what every client uploads in a round of a first-order method."""

    def out(inputs: Inputs) -> Tensor:
        return poisoned(size.clients, size.classes, size.features, like=inputs[0])

    def arguments(inputs: Inputs) -> tuple[Tensor, ...]:
        one_hot, bounds = prepared(inputs, GRADIENT_BOUND, 1)
        return inputs[0], inputs[2], one_hot, bounds, out(inputs)

    def ours(records: Records, theta: Tensor, out: Tensor) -> Outputs:
        return [clipped_gradient_sum(records, theta, GRADIENT_BOUND, out=out)]

    def truth(inputs: Inputs) -> Outputs:
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        return _gradient_batch(*(t.double() for t in arguments(wide)))

    return Case(
        op="glm_clipped_sums_",
        name=f"glm clipped gradient sums, {size}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * size.clients * (size.records * size.features + 2 * size.width),
        flops=4 * size.clients * size.records * size.width,
        bound="gemm",
        ours=Form("dpkernels", ours, lambda i: (records_of(i), i[2], out(i))),
        plain=(
            Form(LOOP, _gradient_loop, arguments, compilable=False),
            Form("batched bmm, kept", _gradient_batch, arguments),
        ),
        truth=truth,
        target=target,
    )


def clipped_weights(x: Tensor, theta: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``p [B, C]`` of one client and the factors of its Hessians, ``[B, 1]``.

    bounds: ``bound / |x|^2``, ``[B, 1]``; the rest of the squared norm is
        ``sum p^2 - 2 sum p^3 + (sum p^2)^2``.
    """
    p = torch.softmax(torch.mm(x, theta.t()), 1)
    power = p * p
    squares = power.sum(1, keepdim=True)
    cubes = power.mul_(p).sum(1, keepdim=True)
    norms = torch.addcmul(squares, squares, squares).sub_(cubes, alpha=2.0).clamp_(min=0).sqrt_()
    return p, torch.div(bounds, norms).clamp_(max=1.0)


@torch.inference_mode()
def cg_loop(
    x: Tensor,
    theta: Tensor,
    v: Tensor,
    bounds: Tensor,
    out: Tensor,
    tolerance: float,
    iterations: int,
) -> Outputs:
    """Conjugate gradients, client after client, each until it has converged."""
    clients = (x.unbind(), theta.unbind(), v.unbind(), bounds.unbind(), out.unbind())
    for some, weights, rhs, bound, y in zip(*clients, strict=True):
        p, factors = clipped_weights(some, weights, bound)
        weighted = factors.mul(p)
        y.zero_()
        remainder, direction = rhs.clone(), rhs.clone()
        square = start = torch.dot(remainder.view(-1), remainder.view(-1)).item()
        for _ in range(iterations):
            scores = torch.mm(some, direction.t())
            scores.sub_((p * scores).sum(1, keepdim=True)).mul_(weighted)
            image = torch.addmm(direction, scores.t(), some, beta=GAMMA)
            step = square / torch.dot(direction.view(-1), image.view(-1)).item()
            y.add_(direction, alpha=step)
            remainder.sub_(image, alpha=step)
            before, square = square, torch.dot(remainder.view(-1), remainder.view(-1)).item()
            if square <= tolerance**2 * start:
                break
            direction.mul_(square / before).add_(remainder)
    return [out.flatten(1)]


@torch.inference_mode()
def newton_loop(x: Tensor, theta: Tensor, v: Tensor, bounds: Tensor, hessian: Tensor) -> Outputs:
    """Hessian sums and Cholesky solves, client after client.

    A Hessian is one block for each class less ``Z^T Z`` with a row ``sqrt(c) p (x) x`` for each
    record: one product, which beats one for each pair of classes.
    """
    classes, features = theta.shape[1:]
    width = classes * features
    blocks = hessian.view(classes, features, classes, features).diagonal(dim1=0, dim2=2)
    out = torch.empty_like(v).flatten(1)
    clients = (x.unbind(), theta.unbind(), v.unbind(), bounds.unbind(), out.unbind())
    for some, weights, rhs, bound, y in zip(*clients, strict=True):
        p, factors = clipped_weights(some, weights, bound)
        z = factors.sqrt().mul(p).unsqueeze(2).mul(some.unsqueeze(1)).view(-1, width)
        torch.mm(z.t(), z, out=hessian).neg_()
        weighted = factors.mul(p).t().unsqueeze(2).mul(some)
        blocks.permute(2, 0, 1).add_(torch.matmul(some.t(), weighted))
        hessian.diagonal().add_(GAMMA)
        factor = torch.linalg.cholesky_ex(hessian).L
        torch.cholesky_solve(rhs.reshape(width, 1), factor, out=y.view(width, 1))
    return [out]


def hessian_bounds(inputs: Inputs) -> Tensor:
    """Return ``bound / |x|^2``, ``[clients, B, 1]``: the part of the factors that data gives."""
    return prepared(inputs, HESSIAN_BOUND, 2)[1]
