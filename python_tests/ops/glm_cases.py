"""Records for the ``glm`` tests, and what autograd makes of them one record at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from dpkernels.ops.glm import Records

GRADIENT_BOUND, HESSIAN_BOUND = 1.5, 1.0


@dataclass(frozen=True)
class Problem:
    """Ragged records and weights, as plain tensors; ``offsets`` has one more than the clients."""

    x: Tensor
    labels: Tensor
    offsets: list[int]
    theta: Tensor

    @property
    def records(self) -> Records:
        """The records as the operations take them."""
        return Records.ragged(self.x, self.labels, self.offsets)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.offsets) - 1

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the same numbers in another dtype."""
        return replace(self, x=self.x.to(dtype), theta=self.theta.to(dtype))

    def client(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return one client's features, labels and weights ``[C, d]``."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        theta = self.theta if self.theta.dim() == 2 else self.theta[index]
        return self.x[rows], self.labels[rows], theta


def problem(
    classes: int,
    features: int,
    counts: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    shared: bool = False,
    seed: int = 0,
) -> Problem:
    """Return random records: features of several scales, so that some are clipped and some not."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(counts)
    scales = torch.randn(n, 1, generator=generator).mul(0.7).exp() / max(1, features) ** 0.5
    x = torch.randn(n, features, generator=generator) * scales
    shape = (classes, features) if shared else (len(counts), classes, features)
    theta = torch.randn(shape, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return Problem(x.to(dtype), labels, offsets, theta.to(dtype))


def loss(theta: Tensor, x: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of one record."""
    scores = torch.log_softmax(theta @ x, 0)
    return -scores.gather(0, label.unsqueeze(0)).squeeze(0)


def record_gradients(x: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    """Gradients ``[B, C d]`` by autograd."""
    if len(x) == 0:
        return x.new_zeros(0, theta.numel())
    return vmap(grad(loss), (None, 0, 0))(theta, x, labels).flatten(1)


def record_hessians(x: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    """Hessians ``[B, C d, C d]`` by autograd."""
    width = theta.numel()
    if len(x) == 0:
        return x.new_zeros(0, width, width)
    return vmap(hessian(loss), (None, 0, 0))(theta, x, labels).reshape(len(x), width, width)


def clipped_sum(values: Tensor, bound: float) -> Tensor:
    """Clip each of ``values [B, ...]`` to the norm ``bound`` and add them up."""
    norms = values.flatten(1).norm(dim=1)
    factors = torch.where(norms > bound, bound / norms, 1.0)
    return torch.tensordot(factors, values, 1)


def autograd_sums(data: Problem) -> tuple[Tensor, Tensor]:
    """Clipped sums of gradients ``[clients, C, d]`` and Hessians, in the dtype of ``data``."""
    gradients, hessians = [], []
    for index in range(data.clients):
        theta = data.client(index)[2]
        gradient = clipped_sum(record_gradients(*data.client(index)), GRADIENT_BOUND)
        gradients.append(gradient.reshape(theta.shape))
        hessians.append(clipped_sum(record_hessians(*data.client(index)), HESSIAN_BOUND))
    return torch.stack(gradients), torch.stack(hessians)


def plain_sums(data: Problem) -> tuple[Tensor, Tensor]:
    """The same sums from the closed forms, as one would write them in PyTorch."""
    gradients, hessians = [], []
    for index in range(data.clients):
        x, labels, theta = data.client(index)
        classes, features = theta.shape
        p = torch.softmax(x @ theta.mT, 1)
        residual = p - torch.nn.functional.one_hot(labels, classes)
        curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        gradient = residual.unsqueeze(2) * x.unsqueeze(1)
        hessian = torch.einsum("nab,ni,nj->naibj", curvature, x, x)
        gradients.append(clipped_sum(gradient, GRADIENT_BOUND))
        width = classes * features
        hessians.append(clipped_sum(hessian.reshape(-1, width, width), HESSIAN_BOUND))
    return torch.stack(gradients), torch.stack(hessians)


def wide_sums(data: Problem) -> tuple[Tensor, Tensor]:
    """The closed forms in 80-bit numbers, rounded to float64: the truth for float64 records."""
    gradients, hessians = [], []
    for index in range(data.clients):
        x, labels, theta = (t.numpy() for t in data.client(index))
        x, (classes, features) = x.astype(np.longdouble), theta.shape
        logits = x @ theta.astype(np.longdouble).T
        e = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
        p = e / e.sum(1, keepdims=True)
        residual = p - np.eye(classes)[labels]
        curvature = np.eye(classes) * p[:, None] - p[:, :, None] * p[:, None]
        squares = (x**2).sum(1)
        norms = np.sqrt((residual**2).sum(1) * squares)
        weights = np.minimum(1, GRADIENT_BOUND / np.where(norms == 0, 1, norms))
        gradients.append((residual * weights[:, None]).T @ x)
        norms = np.sqrt((curvature**2).sum((1, 2))) * squares
        weights = np.minimum(1, HESSIAN_BOUND / np.where(norms == 0, 1, norms))
        pairs = (curvature * weights[:, None, None]).reshape(-1, classes**2)
        products = (x[:, :, None] * x[:, None]).reshape(-1, features**2)
        blocks = (pairs.T @ products).reshape(classes, classes, features, features)
        hessians.append(blocks.transpose(0, 2, 1, 3).reshape(2 * (classes * features,)))
    stacked = (np.stack(gradients).astype(np.float64), np.stack(hessians).astype(np.float64))
    return torch.from_numpy(stacked[0]), torch.from_numpy(stacked[1])


def autograd_sq_norms(data: Problem) -> tuple[Tensor, Tensor]:
    """Squared norms of gradients and Hessians, ``[N]``, in the dtype of ``data``."""
    clients = [data.client(index) for index in range(data.clients)]
    gradients = [record_gradients(*client).square().sum(1) for client in clients]
    hessians = [record_hessians(*client).square().sum((1, 2)) for client in clients]
    return torch.cat(gradients), torch.cat(hessians)


def solved(hessians: Tensor, v: Tensor, gamma: float | Tensor) -> Tensor:
    """``(H + gamma I)^-1 v`` by ``torch.linalg.solve``, shaped like ``v``.

    One system at a time: MKL's batched factorisation breaks once the thread count has been set.
    """
    eye = torch.eye(hessians.shape[1], dtype=hessians.dtype)
    damping = torch.as_tensor(gamma, dtype=hessians.dtype).reshape(-1, 1, 1)
    damped = hessians + damping * eye
    pairs = zip(damped, v.flatten(1), strict=True)
    return torch.stack([torch.linalg.solve(*pair) for pair in pairs]).reshape(v.shape)
