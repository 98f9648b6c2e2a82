"""Records and what plain PyTorch needs to clip them; shared by the ``glm`` cases.

A problem is ``[x, labels, theta]`` (and right-hand sides ``v``): x ``[clients, B, d]``, theta
``[clients, C, d]``. Half of the Hessians are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.registry import Inputs
from dpkernels.ops.glm import Records

# About the median norm of the gradients, of the Hessians and of x x^T that make_problem gives.
GRADIENT_BOUND, HESSIAN_BOUND, FEATURE_BOUND = 0.95, 0.33, 0.97
GAMMA = 0.5


@dataclass(frozen=True)
class Size:
    """How many clients, records of each, features and classes."""

    clients: int
    records: int
    features: int
    classes: int

    @property
    def width(self) -> int:
        """Rows of a Hessian."""
        return self.features * self.classes

    def __str__(self) -> str:
        clients = f"{self.clients} clients of " if self.clients > 1 else ""
        return f"{clients}{self.records} records, {self.features} x {self.classes}"

    @property
    def parameters(self) -> dict[str, int]:
        """The same for the table of results."""
        return {
            "clients": self.clients,
            "records": self.records,
            "features": self.features,
            "classes": self.classes,
        }


def make_problem(size: Size, device: torch.device, generator: torch.Generator) -> Inputs:
    """Return ``[x, labels, theta, v]``; norms of x are log-normal around one."""
    shape = (size.clients, size.records)

    def normals(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    scales = normals(*shape, 1).mul_(0.5).exp_() / size.features**0.5
    x = normals(*shape, size.features).mul_(scales)
    labels = torch.randint(size.classes, shape, generator=generator, device=device)
    theta = normals(size.clients, size.classes, size.features)
    return [x, labels, theta, normals(size.clients, size.classes, size.features)]


def records_of(inputs: Inputs) -> Records:
    """Return the inputs as records; made once, not in every round."""
    return Records.padded(inputs[0], inputs[1])


def probabilities(x: Tensor, theta: Tensor) -> Tensor:
    """``[clients, B, C]``."""
    return torch.softmax(torch.bmm(x, theta.mT), 2)


def hessian_factors(x: Tensor, p: Tensor) -> Tensor:
    """``min(1, C / norm)``, ``[clients, B]``, from the closed form of the norm."""
    squares = p.square()
    total = squares.sum(2)
    products = total - 2 * (squares * p).sum(2) + total.square()
    norms = products.clamp(min=0).sqrt() * x.square().sum(2)
    return (HESSIAN_BOUND / norms).clamp(max=1.0)


def curvatures(p: Tensor, factors: Tensor) -> Tensor:
    """Clipped ``diag p - p p^T``, ``[clients, B, C, C]``."""
    weighted = p * factors.unsqueeze(2)
    curvature = weighted.unsqueeze(3) * -p.unsqueeze(2)
    curvature.diagonal(dim1=2, dim2=3).add_(weighted)
    return curvature


def exact_hessian(x: Tensor, theta: Tensor) -> Tensor:
    """The clipped Hessian sum of one client, ``[C d, C d]``, in float64."""
    x, theta = x.double().unsqueeze(0), theta.double().unsqueeze(0)
    p = probabilities(x, theta)
    curvature = curvatures(p, hessian_factors(x, p))[0]
    classes, features = theta.shape[1:]
    total = x.new_empty(classes, features, classes, features)
    for a in range(classes):
        for b in range(classes):
            total[a, :, b] = (x[0] * curvature[:, a, b].unsqueeze(1)).T @ x[0]
    return total.reshape(classes * features, classes * features)
