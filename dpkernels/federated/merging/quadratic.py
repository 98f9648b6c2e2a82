"""What the FedFisher server minimises, as a function of how far the weights moved from their mean.

``f(W) = sum_i p_i (W - W_i)^T F_i (W - W_i) + sum_l mu_l |W_l - start_l|^2``. With D = W - start
and C_i = W_i - start half its gradient is ``F D - r``, where ``F = sum_i p_i F_i + mu`` and
``r = sum_i p_i F_i C_i``. Nothing is lost to rounding where all W_i are close to each other, as
there would be with W itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.merging.blocks import Block, Factors, blocks_of
from dpkernels.federated.merging.states import State
from dpkernels.fisher import Diagonal, Fisher, Kronecker
from dpkernels.ops.kron_sum import DiagonalFisher, KronFisher, kron_sum

Tensors = list[Tensor]


@dataclass(frozen=True)
class Quadratic:
    """The objective; blocks of K-FAC first, then those of diagonals.

    gs: p_i G_i, ``[n, O, O]`` for each block of K-FAC; as_: A_i, ``[n, I, I]``.
    fs: ``sum_i p_i f_i`` for each of the others.
    residual: r, a tensor for each block.
    value: f at the start, where D = 0.
    shifts: mu_l, for each block.
    """

    gs: Tensors
    as_: Tensors
    fs: Tensors
    residual: Tensors
    value: float
    shifts: list[float]

    def product(self, xs: Tensors, of: Sequence[int] | None = None) -> Tensors:
        """Return ``F X`` for the blocks ``of`` (all if None), of which ``xs`` are.

        2 n O I (O + I) flops for each block of K-FAC, all of them in one call.
        """
        which = range(len(self.residual)) if of is None else of
        split = sum(index < len(self.gs) for index in which)
        some = list(which)[:split]
        found = kron_sum(
            [self.gs[index] for index in some], [self.as_[index] for index in some], xs[:split]
        )
        assert isinstance(found, list)
        for index, x in zip(list(which)[split:], xs[split:], strict=True):
            found.append(self.fs[index - len(self.gs)] * x)
        for index, product, x in zip(which, found, xs, strict=True):
            if self.shifts[index] > 0:
                product.add_(x, alpha=self.shifts[index])
        return found

    def half_gradient(self, moved: Tensors) -> Tensors:
        """Return ``F D - r``."""
        return [
            product.sub_(residual)
            for product, residual in zip(self.product(moved), self.residual, strict=True)
        ]

    def value_at(self, moved: Tensors, half_gradient: Tensors) -> float:
        """Return f(start + D) from F D - r: ``f(start) + <D, (F D - r) - r>``.

        The numbers are of the blocks' dtype and their sum is float64: it errs by about that dtype's
        eps times f(start).
        """
        value = self.value
        for x, gradient, r in zip(moved, half_gradient, self.residual, strict=True):
            value += dot(x, gradient - r)
        return value


def dot(x: Tensor, y: Tensor) -> float:
    """Return ``<x, y>``, summed in float64."""
    return float(torch.sum(x * y, dtype=torch.float64))


def quadratic(
    states: Sequence[State],
    fishers: Sequence[Fisher],
    p: Sequence[float],
    start: State,
    damping: float,
    clients: Sequence[int],
) -> tuple[list[Block], Quadratic]:
    """Return the blocks that have an F, and the objective around ``start``, float64.

    damping: ``mu_l = damping * tr(sum_i p_i F_i) / d_l``, d_l the number of weights of block l:
        that many times the mean eigenvalue. For K-FAC ``tr F_i = tr G_i tr A_i``.
    clients: numbers of the clients, for messages.

    G_i and A_i are made symmetric, as compression may have bent them. All is computed in float32,
    or in float64 where a block or a factor is.
    """
    blocks, factors = blocks_of(states, fishers, clients)
    dtype = _dtype(states[0], blocks, factors)
    gs, as_, fs_of, centers = [], [], [], []
    for block, found in zip(blocks, factors, strict=True):
        middle = block.join(start)
        moved = torch.stack([block.join(state).double() - middle for state in states])
        centers.append(moved.to(dtype))
        if block.kronecker:
            kron = [layer for layer in found if isinstance(layer, Kronecker)]
            pairs = zip(kron, p, strict=True)
            gs.append(torch.stack([_symmetric(x.g, dtype) * share for x, share in pairs]))
            as_.append(torch.stack([_symmetric(x.a, dtype) for x in kron]))
        else:
            values = [layer.values for layer in found if isinstance(layer, Diagonal)]
            shared = zip(values, p, strict=True)
            fs_of.append(torch.stack([x.detach().to(dtype) * share for x, share in shared]))
    count = len(gs)
    kronecker = KronFisher(gs, as_, centers[:count])
    diagonal = DiagonalFisher(fs_of, centers[count:])
    zeros = [torch.zeros_like(center[0]) for center in centers]
    gradients = [*kronecker.gradient(zeros[:count]), *diagonal.gradient(zeros[count:])]
    value = float(kronecker.value(zeros[:count])) if count else 0.0
    for fs, center in zip(fs_of, centers[count:], strict=True):
        value += dot(fs * center, center)
    sums = [f.sum(0) for f in fs_of]
    return blocks, Quadratic(
        gs, as_, sums, [-x for x in gradients], value, shifts_of(gs, as_, sums, damping)
    )


def shifts_of(gs: Tensors, as_: Tensors, fs: Tensors, damping: float) -> list[float]:
    """Return the mu_l of all blocks."""
    means = []
    for g, a in zip(gs, as_, strict=True):
        traces = _traces(g) * _traces(a)
        means.append(float(traces.sum()) / (g.shape[1] * a.shape[1]))
    means += [float(f.mean(dtype=torch.float64)) if f.numel() else 0.0 for f in fs]
    return [damping * max(0.0, mean) for mean in means]


def _traces(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64)


def _symmetric(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    wide = matrix.detach().to(dtype)
    return (wide + wide.mT) / 2


def _dtype(state: State, blocks: list[Block], factors: list[list[Factors]]) -> torch.dtype:
    found = torch.float32
    for block, layers in zip(blocks, factors, strict=True):
        tensors = [state[name] for name in block.parameters]
        for layer in layers:
            tensors += [layer.values] if isinstance(layer, Diagonal) else [layer.g, layer.a]
        for tensor in tensors:
            found = torch.promote_types(found, tensor.dtype)
    return found
