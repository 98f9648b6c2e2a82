"""The same rounds in plain PyTorch with all clients in one ``bmm``: what a careful user writes."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.federated.loops import GradientLoop, NewtonLoop

# Clients whose Hessians are held at a time: 32 of 640 x 640 take 52 MB, and 32 x x^T 52 MB more.
_GROUP = 32
_MOST_ITERATIONS = 200


class BatchedGradients(GradientLoop):
    """FedGD and FedSOFIM with every operation over all clients, tables ``[n, C, B]``."""

    _stacks: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def clients(self) -> None:
        """Clip, sum, add noise."""
        if self._stacks is None:
            norms = torch.stack(self.norms).unsqueeze(1)
            self._stacks = (
                torch.stack(self.x),
                norms,
                torch.stack(self.directions),
                torch.stack(self.targets),
            )
        x, norms, directions, targets = self._stacks
        p = torch.softmax(_logits(x, self.server.theta), 1)
        residuals = torch.addcmul(targets, p, norms)
        residuals.mul_((residuals * residuals).sum(1, keepdim=True).clamp_(min=1.0).rsqrt_())
        self.stacked.normal_(0.0, self.std, generator=self.generator)
        scale = self.algorithm.clip / self.size.records
        self.stacked.baddbmm_(residuals, directions, alpha=scale)


def conjugate_gradients(loop: NewtonLoop) -> None:
    """All clients in one iteration, until the last has converged."""
    x, p, weighted, s = _systems(loop, slice(None))
    columns, gamma = x.mT, loop.algorithm.gamma
    y, residual, direction = torch.zeros_like(s), s, s.clone()
    square = _squares(residual)
    wanted = loop.algorithm.tolerance**2 * square
    for _ in range(_MOST_ITERATIONS):
        if bool((square <= wanted).all()):
            break
        logits = torch.bmm(direction, columns)
        logits.sub_((p * logits).sum(1, keepdim=True)).mul_(weighted)
        image = torch.baddbmm(direction, logits, x, beta=gamma)
        step = torch.where(square > wanted, square / (direction * image).sum((1, 2), True), 0.0)
        y.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1.0)
        before, square = square, _squares(residual)
        direction.mul_(square / before).add_(residual)
    loop.stacked.normal_(0.0, loop.std, generator=loop.generator).add_(y)


def exact(loop: NewtonLoop) -> None:
    """Hessians and Cholesky factors of a group of clients at a time."""
    size = loop.size
    width = size.classes * size.features
    loop.stacked.normal_(0.0, loop.std, generator=loop.generator)
    for begin in range(0, size.clients, _GROUP):
        group = slice(begin, min(begin + _GROUP, size.clients))
        x, p, weighted, s = _systems(loop, group)
        curvature = torch.mul(weighted.unsqueeze(2), p.unsqueeze(1)).neg_()
        curvature.diagonal(dim1=1, dim2=2).add_(weighted.mT)
        outer = torch.mul(x.unsqueeze(3), x.unsqueeze(2)).flatten(2)
        sums = torch.bmm(curvature.flatten(1, 2), outer)
        shaped = sums.view(-1, size.classes, size.classes, size.features, size.features)
        hessians = shaped.transpose(2, 3).reshape(-1, width, width)
        hessians.diagonal(dim1=1, dim2=2).add_(loop.algorithm.gamma)
        factors = torch.linalg.cholesky_ex(hessians).L
        found = torch.cholesky_solve(s.reshape(-1, width, 1), factors)
        loop.stacked[group].add_(found.view_as(s))


def _logits(x: Tensor, theta: Tensor) -> Tensor:
    """``[n, C, B]``, contiguous; one product for all clients, then a transposed copy."""
    return torch.mm(x.flatten(0, 1), theta.t()).view(*x.shape[:2], -1).mT.contiguous()


def _systems(loop: NewtonLoop, group: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x ``[k, B, d]``, p and weighted p ``[k, C, B]``, and s ``[k, C, d]``."""
    algorithm, records = loop.algorithm, loop.size.records
    stacks = loop.stacks()
    x, norms, directions, targets, allowed = (stack[group] for stack in stacks)
    p = torch.softmax(_logits(x, loop.server.theta), 1)
    residuals = torch.addcmul(targets, p, norms)
    residuals.mul_((residuals * residuals).sum(1, keepdim=True).clamp_(min=1.0).rsqrt_())
    pull = loop.server.other.mul(algorithm.rho).expand(len(x), -1, -1)
    s = torch.baddbmm(pull, residuals, directions, alpha=algorithm.clip / records)
    bound = algorithm.total_clip
    s.mul_(torch.clamp(bound * _squares(s).rsqrt_(), max=1.0))
    squares = p * p
    second = squares.sum(1, keepdim=True)
    third = squares.mul_(p).sum(1, keepdim=True)
    lengths = torch.addcmul(second, second, second).sub_(third, alpha=2.0).sqrt_()
    weights = torch.div(allowed, lengths).clamp_(max=1.0).div_(records)
    return x, p, weights * p, s


def _squares(values: Tensor) -> Tensor:
    """Squared norms, ``[k, 1, 1]``."""
    return values.square().sum((1, 2), True)
