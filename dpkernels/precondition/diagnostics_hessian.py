"""The density of a Hessian's eigenvalues, by stochastic Lanczos quadrature."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpkernels.engine.in_place import make_plain
from dpkernels.precondition.estimate import check_summed

# Of each element in one step: the product, and two passes of projection.
_ROUNDINGS = 4


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues that stand for many: nodes ``[k]`` and their weights ``[k]``, which add up to 1.

    A mean over all eigenvalues of a function is about the weighted mean over the nodes.
    size: how many eigenvalues there are. Not private if it is of private samples.
    """

    nodes: Tensor
    weights: Tensor
    size: int

    def density(self, at: Tensor, width: float) -> Tensor:
        """Return the density at points ``[n]``, every node smeared out by a Gaussian."""
        distance = (at.double()[:, None] - self.nodes) / width
        bells = torch.exp(-0.5 * distance.square()) / (width * math.sqrt(2 * math.pi))
        return bells @ self.weights

    def decay(self) -> tuple[Tensor, Tensor]:
        """Return magnitudes ``[k]``, largest first, and how many eigenvalues are as large ``[k]``.

        The latter are expected numbers, from 0 to ``size`` (DP-KFC, Fig. 7).
        """
        magnitudes, order = self.nodes.abs().sort(descending=True)
        return magnitudes, self.size * self.weights[order].cumsum(0)


def hessian_spectrum(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Sequence[Tensor],
    targets: Tensor,
    *,
    steps: int = 60,
    vectors: int = 4,
    seed: int = 0,
) -> Spectrum:
    """Return the spectrum of the Hessian of the mean loss in the trained parameters.

    loss: ``loss(model(*inputs), targets)``: the samples' losses, or their sum.
    steps: of Lanczos' iteration for each vector; exact if it is the number of parameters.
    vectors: random ones, over which is averaged.

    The model is copied, and evaluated without dropout. Not private if the samples are. Cost:
    ``vectors * steps`` products of Hessian and vector, about four passes each, and ``steps``
    vectors of all parameters in memory. Raises ValueError if ``steps`` or ``vectors`` is below 1,
    for a loss that is an average already, or for a gradient that is not finite.
    """
    if steps < 1 or vectors < 1:
        raise ValueError(
            f"hessian_spectrum: steps and vectors must be at least 1, got {steps} and {vectors}"
        )
    model = make_plain(copy.deepcopy(model)).eval()
    check_summed(model, inputs, targets, loss)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Fused attention has no second derivatives.
    with sdpa_kernel(SDPBackend.MATH):
        mean = loss(model(*inputs), targets).sum() / targets.shape[0]
    gradients = torch.autograd.grad(mean, parameters, create_graph=True, materialize_grads=True)
    gradient = torch.cat([g.flatten() for g in gradients])
    if not gradient.isfinite().all():
        raise ValueError(
            "hessian_spectrum: the gradient of the loss must be finite, got infinities or NaN; "
            "check parameters, inputs and loss"
        )

    def product(vector: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            gradient @ vector, parameters, retain_graph=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in parts])

    generator = Generator(gradient.device).manual_seed(seed)
    found = []
    for _ in range(vectors):
        start = torch.randn(
            len(gradient), generator=generator, dtype=gradient.dtype, device=gradient.device
        )
        found.append(lanczos(product, start, steps))
    nodes = torch.cat([spectrum.nodes for spectrum in found])
    weights = torch.cat([spectrum.weights for spectrum in found]) / vectors
    order = nodes.argsort()
    return Spectrum(nodes[order], weights[order], len(gradient))


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Spectrum:
    """Return the Gauss quadrature of a symmetric operator's spectral measure at ``start``.

    It is exact for polynomials of degrees below ``2 * steps``. Vectors are made orthogonal to all
    before them, twice: without that, rounding gives eigenvalues several times.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, len(start))):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        known = torch.stack(basis)
        scale = float(image.norm())
        for _ in range(2):
            image = image - known.T @ (known @ image)
        length = float(image.norm())
        # What is left is rounding: the space of the vectors so far is invariant. Errors of n
        # elements add up as sqrt(n); n eps would be more than 1 for large models in float32.
        if length <= _ROUNDINGS * scale * len(start) ** 0.5 * torch.finfo(image.dtype).eps:
            break
        beside.append(length)
        basis.append(image / length)
    size = len(diagonal)
    sides = torch.tensor(beside[: size - 1], dtype=torch.float64)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    matrix = matrix + torch.diag(sides, 1) + torch.diag(sides, -1)
    nodes, eigenvectors = torch.linalg.eigh(matrix)
    return Spectrum(nodes, eigenvectors[0].square(), len(start))
