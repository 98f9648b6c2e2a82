"""From the mean towards the minimum: gradient descent, Adam, conjugate gradients.

A solver yields the iterates, the start first. Which of them a score may choose from is public and
depends on no data: the start, every ``every``-th, and the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from dpkernels.federated.merging.preconditioners import Preconditioner, inverse_of
from dpkernels.federated.merging.quadratic import Quadratic, Tensors, dot
from dpkernels.ops.checks import check_finite

Form = Literal["torch", "published"]
# Kuczynski and Wozniakowski (1992), Theorem 4.1: after k steps from a random start the largest
# eigenvalue is above theta / (1 - eps) with probability <= .354 sqrt(d / (eps (k - 1)))
# (1 - eps)^(k - 1/2); 3e-11 for a million weights.
_POWER_STEPS, _EPS = 100, 0.25


class Iterate(NamedTuple):
    """step: its number, 0 at the start; moved: W - start, overwritten by the next; value: f."""

    step: int
    moved: Tensors
    value: float


@dataclass(frozen=True)
class GradientDescent:
    """``W <- W - rate (F W - sum_i p_i F_i W_i)``, Algorithm 1 of FedFisher.

    rate: of all layers; None: of each layer 1 / (an upper bound of its largest eigenvalue), by
        which Lemma 1 holds in every layer: the limit is the minimiser nearest to the mean. The
        bound is 4/3 of 100 power iterations from a random start; it fails with probability 3e-11.
    every: iterates between two that may be chosen.

    A product with F a step.
    """

    steps: int = 2000
    rate: float | None = None
    every: int = 100

    def __post_init__(self) -> None:
        _check_counts("GradientDescent", steps=self.steps, every=self.every)
        if self.rate is not None:
            check_finite("GradientDescent", "rate", self.rate, above=0.0)

    def iterates(self, quadratic: Quadratic) -> Iterator[Iterate]:
        """Yield all iterates."""
        moved = _zeros(quadratic)
        rates = [self.rate] * len(moved) if self.rate is not None else safe_rates(quadratic)
        for step in range(self.steps + 1):
            gradient = quadratic.half_gradient(moved)
            yield Iterate(step, moved, quadratic.value_at(moved, gradient))
            if step == self.steps:
                return
            for x, slope, rate in zip(moved, gradient, rates, strict=True):
                x.sub_(slope, alpha=rate)


@dataclass(frozen=True)
class Adam:
    """Adam with the gradient of Algorithm 1, ``F W - sum_i p_i F_i W_i``; FedFisher's Appendix D.

    form: ``torch``: Kingma and Ba's, as ``torch.optim.Adam`` has it. ``published``: of the authors'
        code, which does not average the moments, m <- beta1 m + g and v <- beta2 v + g^2, corrects
        no bias, and divides by sqrt(v + eps) for K-FAC, by sqrt(v) + eps for diagonals.
    every: iterates between two that may be chosen; the paper takes the best of every 100.

    ``eps`` makes it depend on the scale of F. A product with F a step.
    """

    steps: int = 2000
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 0.01
    every: int = 100
    form: Form = "torch"

    def __post_init__(self) -> None:
        _check_counts("Adam", steps=self.steps, every=self.every)
        check_finite("Adam", "lr", self.lr, above=0.0)
        check_finite("Adam", "eps", self.eps, above=0.0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Adam: betas must be in [0, 1), got {self.betas}")
        if self.form not in get_args(Form):
            raise ValueError(f"Adam: form must be one of {get_args(Form)}, got {self.form!r}")

    def iterates(self, quadratic: Quadratic) -> Iterator[Iterate]:
        """Yield all iterates."""
        moved, means, squares = (_zeros(quadratic) for _ in range(3))
        averaged = self.form == "torch"
        new, new_square = ((1 - beta) if averaged else 1.0 for beta in self.betas)
        for step in range(self.steps + 1):
            gradient = quadratic.half_gradient(moved)
            yield Iterate(step, moved, quadratic.value_at(moved, gradient))
            if step == self.steps:
                return
            unbias, unbias_square = (1 - beta ** (step + 1) for beta in self.betas)
            rate = self.lr / unbias if averaged else self.lr
            for index, (x, slope) in enumerate(zip(moved, gradient, strict=True)):
                mean, square = means[index], squares[index]
                mean.mul_(self.betas[0]).add_(slope, alpha=new)
                square.mul_(self.betas[1]).addcmul_(slope, slope, value=new_square)
                if averaged:
                    divisor = (square / unbias_square).sqrt_().add_(self.eps)
                elif index < len(quadratic.gs):
                    divisor = (square + self.eps).sqrt_()
                else:
                    divisor = square.sqrt().add_(self.eps)
                x.addcdiv_(mean, divisor, value=-rate)


@dataclass(frozen=True)
class ConjugateGradients:
    """Conjugate gradients in every layer by itself, one call for the products of all.

    Without a preconditioner the iterates differ from the mean by vectors of range(F) only, as those
    of gradient descent, and so have its limit, Lemma 1's; ``preconditioners`` says when it stays.

    iterations: at most. tolerance: a layer is done when its residual is at most so many times that
        of the start; also when rounding, or a compressed F_i that is not semidefinite, leaves it no
        direction along which f is convex.
    every: iterates between two that may be chosen.

    A product with F an iteration, of those layers that are not done.

    Measured on LeNet with 5 clients, Fashion-MNIST, Dirichlet .1: 12 iterations with ``kronecker``
    come as far as 50 without on three partitions, and 50 without further than Adam's 2,000 steps
    on the one where both ran. The accuracy is highest before the objective is lowest: ``choose``
    or ``damping`` gains more than further iterations do.
    """

    iterations: int = 50
    tolerance: float = 1e-6
    preconditioner: Preconditioner | None = None
    every: int = 1

    def __post_init__(self) -> None:
        op = "ConjugateGradients"
        _check_counts(op, iterations=self.iterations, every=self.every)
        check_finite(op, "tolerance", self.tolerance, at_least=0.0)
        if self.preconditioner not in (None, *get_args(Preconditioner)):
            raise ValueError(
                f"{op}: preconditioner must be None or one of {get_args(Preconditioner)}, got "
                f"{self.preconditioner!r}"
            )

    def iterates(self, quadratic: Quadratic) -> Iterator[Iterate]:
        """Yield all iterates; fewer than ``iterations`` where all layers are done before."""
        moved, value = _zeros(quadratic), quadratic.value
        yield Iterate(0, moved, value)
        residual = [r.clone() for r in quadratic.residual]
        wanted = [self.tolerance**2 * dot(r, r) for r in residual]
        active = [index for index, r in enumerate(residual) if dot(r, r) > 0]
        inverse = inverse_of(self.preconditioner, quadratic)
        direction = [r.clone() for r in residual]
        lengths = [0.0] * len(residual)
        for index, z in zip(active, inverse([residual[i] for i in active], active), strict=True):
            direction[index] = z.clone()
            lengths[index] = dot(residual[index], z)
        for step in range(1, self.iterations + 1):
            going = []
            images = quadratic.product([direction[index] for index in active], active)
            for index, image in zip(active, images, strict=True):
                curvature = dot(direction[index], image)
                if not (curvature > 0 and lengths[index] > 0):
                    continue
                rate = lengths[index] / curvature
                moved[index].add_(direction[index], alpha=rate)
                residual[index].sub_(image, alpha=rate)
                value -= rate * lengths[index]
                going.append(index)
            if not going:
                return
            yield Iterate(step, moved, value)
            active = [i for i in going if dot(residual[i], residual[i]) > wanted[i]]
            turned = inverse([residual[index] for index in active], active)
            for index, z in zip(active, turned, strict=True):
                before, lengths[index] = lengths[index], dot(residual[index], z)
                direction[index].mul_(lengths[index] / before).add_(z)


Solver = GradientDescent | Adam | ConjugateGradients


def safe_rates(quadratic: Quadratic) -> list[float]:
    """Return for each block 1 / (an upper bound of F's largest eigenvalue), or 0 where F is zero.

    The start of the power iteration is random, but always the same.
    """
    generator = torch.Generator().manual_seed(0)
    vectors = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r)
        for r in quadratic.residual
    ]
    thetas = [0.0] * len(vectors)
    for _ in range(_POWER_STEPS):
        for vector in vectors:
            vector.div_(max(math.sqrt(dot(vector, vector)), torch.finfo(vector.dtype).tiny))
        images = quadratic.product(vectors)
        thetas = [dot(x, y) for x, y in zip(vectors, images, strict=True)]
        vectors = images
    return [(1 - _EPS) / theta if theta > 0 else 0.0 for theta in thetas]


def _zeros(quadratic: Quadratic) -> Tensors:
    return [torch.zeros_like(r) for r in quadratic.residual]


def _check_counts(op: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{op}: {name} must be >= 1, got {count}")
