"""Inverse p-th roots by matrix products alone: the coupled Newton iteration.

With B = A + damping I and M_0 = z B, X_0 = z^(1/p) I (Guo and Higham 2006, eq. 3.4; z as in
Shampoo, so that the spectrum of M_0 is in (0, (p + 1) / 2])::

    T_k = ((p + 1) I - M_k) / p        X_(k+1) = X_k T_k        M_(k+1) = T_k^p M_k

M goes to I and X to B^(-1/p). p = 2 is the Newton-Schulz iteration for the inverse square root.
Small eigenvalues of M grow by (1 + 1/p)^p in each step, then convergence is quadratic: about
log(condition number) / (p log(1 + 1/p)) + 4 steps, with 2 + log2(p) products of 2 n^3 flops each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.roots.reference import symmetrised

# The condition number of float64's range of eigenvalues takes 60 steps for p = 1, the slowest.
MAX_STEPS = 100


def inverse_root_newton(matrices: list[Tensor], root: int, damping: list[float]) -> list[Tensor]:
    """``(A + damping I)^(-1/root)`` of each batch ``[b, n, n]``.

    Raises RuntimeError, with the matrix's place in the list, if the iteration does not converge:
    A + damping I is singular, or has a negative eigenvalue.
    """
    return [_batch(i, batch, root, damping[i]) for i, batch in enumerate(matrices)]


def _batch(index: int, batch: Tensor, root: int, damping: float) -> Tensor:
    if batch.numel() == 0:
        return batch.clone()
    symmetric, scale = symmetrised("inverse_root", index, batch)
    # A second scale, for damping that is larger than the matrix.
    both = 1.0 / (scale * damping).clamp(min=1.0)
    identity = torch.eye(batch.shape[1], dtype=batch.dtype, device=batch.device)
    shifted = symmetric * both.to(batch.dtype)[:, :, None]
    shifted = shifted + (scale * both * damping).to(batch.dtype)[:, :, None] * identity
    result, residual = _iterate(shifted, identity, root)
    if not residual <= torch.finfo(batch.dtype).eps ** 0.5:
        raise RuntimeError(
            f"inverse_root: newton_schulz did not converge for matrix {index} of the list "
            f"({list(batch.shape)}): |M - I| is {residual:.3g} after up to {MAX_STEPS} steps; use "
            "more damping, or method='eigh'"
        )
    return result * (scale * both).pow(1.0 / root).to(batch.dtype)[:, :, None]


def _iterate(b: Tensor, identity: Tensor, root: int) -> tuple[Tensor, float]:
    """Return the inverse root of ``b`` and the largest element of M - I."""
    z = (1 + root) / (2 * torch.linalg.matrix_norm(b, keepdim=True).clamp(min=1e-30))
    m, x = b * z, identity * z.pow(1.0 / root)
    best, least = x, float("inf")
    for _ in range(MAX_STEPS):
        residual = float((m - identity).abs().max())
        if residual < least:
            best, least = x, residual
        elif least < 0.5:
            break  # Rounding errors ended the quadratic phase: nothing is gained any more.
        if residual <= torch.finfo(b.dtype).eps:
            break
        t = ((root + 1) * identity - m) / root
        x = x @ t
        m = torch.linalg.matrix_power(t, root) @ m
        # Products of matrices that commute are symmetric; rounding must not undo that.
        m = (m + m.mT) / 2
    return (best + best.mT) / 2, least
