"""Sherman-Morrison in plain PyTorch, any device and dtype. Dot products are float64."""

from __future__ import annotations

import torch
from torch import Tensor


def sofim_step_(
    params: list[Tensor],
    momentum: list[Tensor],
    grads: list[Tensor],
    beta: float,
    rho: float,
    lr: float,
) -> Tensor:
    """One step over all tensors as one vector; returns float64 ``(M.G, |M|^2, applied)``.

    Nothing changes (applied = 0) unless both dot products and the coefficients are finite.
    """
    updated = [
        torch.add(beta * m, g.to(m.dtype), alpha=1 - beta)
        for m, g in zip(momentum, grads, strict=True)
    ]
    dot = _sum_of_products(updated, grads)
    sq_norm = _sum_of_products(updated, updated)
    dtype = params[0].dtype
    along_grad = torch.full_like(dot, lr / rho)
    along_momentum = along_grad * (dot / (rho + sq_norm))
    in_dtype = torch.stack((along_grad, along_momentum)).to(dtype)
    applied = torch.stack((dot, sq_norm)).isfinite().all() & in_dtype.isfinite().all()
    for p, m, new, g in zip(params, momentum, updated, grads, strict=True):
        step = in_dtype[0] * g.to(dtype) - in_dtype[1] * new
        p.copy_(torch.where(applied, p - step, p))
        m.copy_(torch.where(applied, new, m))
    return torch.stack((dot, sq_norm, applied.double()))


def _sum_of_products(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    parts = [(x.double() * y.double()).sum() for x, y in zip(xs, ys, strict=True)]
    return torch.stack(parts).sum()


def rank_one_inverse_update_(
    inverse: Tensor, u: Tensor, v: Tensor | None, tolerance: float
) -> Tensor:
    """``H <- H - (H u)(H^T v)^T / (1 + v^T H u)``; returns float64 (denominator, magnitude).

    Nothing changes unless ``|denominator| > tolerance * magnitude`` and both are finite. Without v
    it is u, and H stays symmetric: both sides of the product are scaled alike.
    """
    p = inverse @ u
    terms = p.double() * (u if v is None else v).double()
    denominator, magnitude = 1 + terms.sum(), 1 + terms.abs().sum()
    if v is None:
        q = p / denominator.abs().sqrt().to(p.dtype)
        p = q * denominator.sign().to(p.dtype)
    else:
        p, q = p / denominator.to(p.dtype), inverse.T @ v
    regular = (denominator.abs() > tolerance * magnitude) & magnitude.isfinite()
    inverse.copy_(torch.where(regular, inverse - torch.outer(p, q), inverse))
    return torch.stack((denominator, magnitude))


def window_gram(u: Tensor, v: Tensor | None, g: Tensor) -> Tensor:
    """``[V U^T, V g]``: float64 ``[k, k + 1]`` from ``[k, d]`` and ``[d]``; V = U if None."""
    right = torch.cat((u, g.unsqueeze(0))).double()
    return (u if v is None else v).double() @ right.T


def window_project(window: Tensor, g: Tensor) -> Tensor:
    """``W g``: float64 ``[k]`` from a ``[k, d]`` window and ``[d]``."""
    return window.double() @ g.double()


def window_combine_(out: Tensor, window: Tensor, g: Tensor, weights: Tensor, scale: float) -> None:
    """``out = scale * (g - W^T weights)``, summed in float64."""
    out.copy_(scale * (g.double() - weights @ window.double()))
