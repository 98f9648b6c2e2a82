"""The feature-covariance (FC) variant of DP-FedNew: one small factorisation for all classes.

H is replaced by ``I_C (x) K`` with ``K = sum_i c_i x_i x_i^T``, which does not depend on theta:
it is factorised once and serves every round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite
from dpkernels.ops.clip.reference import valid
from dpkernels.ops.glm import operators
from dpkernels.ops.glm.damping import check_solved, damping_of
from dpkernels.ops.glm.records import Records


def clipped_covariance_sum(records: Records, bound: float) -> Tensor:
    """``sum_i min(1, bound / |x_i|^2) x_i x_i^T`` of every client, ``[clients, d, d]``.

    bound: > 0; adding or removing one record changes a client's sum by at most this, in the
        Frobenius norm. A record that is not finite adds exactly zero.

    N d (d + 1) flops. Raises ValueError for a bound that is not positive.
    """
    return _covariance_sums("clipped_covariance_sum", records, bound)[0]


def _covariance_sums(op: str, records: Records, bound: float) -> tuple[Tensor, Tensor]:
    check_finite(op, "bound", bound, above=0.0)
    run = backend.select(operators.feature_covariance, records.x.device, records.x.dtype)
    sums, sq_norms = run(records.x, records.spans, records.most, bound)
    return sums, sq_norms


@dataclass(frozen=True)
class FeatureCovariance:
    """Factorised ``scale_i K_i + gamma_i I`` of every client.

    factors: ``[clients, d, d]``, lower triangular.
    sq_norms: float64 ``[N]``, ``|x x^T|_F^2 = |x|^4`` of every record; 0 for rows of no client.
        Private: depends on each record.
    """

    factors: Tensor
    sq_norms: Tensor

    @classmethod
    def factor(
        cls,
        records: Records,
        *,
        bound: float,
        gamma: float | Tensor,
        scale: float | Tensor = 1.0,
    ) -> FeatureCovariance:
        """Sum the clipped ``x x^T`` of every client and factorise.

        bound: > 0; a record counts with ``min(1, bound / |x|^2)``, so adding or removing one
            changes K by at most this in the Frobenius norm.
        gamma: > 0, a number or float64 ``[clients]``.
        scale: > 0, the same; a public constant such as 1 / |D_i|.

        N d (d + 1) + clients d^3 / 3 flops. Raises ValueError for bad input, and for a client whose
        matrix is not positive definite.
        """
        op = "FeatureCovariance.factor"
        x = records.x
        gammas = damping_of(op, gamma, records.clients, x.device)
        scales = damping_of(op, scale, records.clients, x.device, name="scale")
        sums, sq_norms = _covariance_sums(op, records, bound)
        sums.mul_(scales.to(x.dtype)[:, None, None])
        sums.diagonal(dim1=1, dim2=2).add_(gammas.to(x.dtype).unsqueeze(1))
        factors, info = torch.linalg.cholesky_ex(sums)
        check_solved(op, info)
        return cls(factors, sq_norms)

    def solve(self, v: Tensor) -> Tensor:
        """``(I_C (x) (scale_i K_i + gamma_i I))^-1 v_i`` for ``v [clients, C, d]``.

        2 clients C d^2 flops. Raises ValueError for another shape, dtype or device.
        """
        clients, features = self.factors.shape[:2]
        if (
            v.dim() != 3
            or (v.shape[0], v.shape[2]) != (clients, features)
            or v.dtype != self.factors.dtype
            or v.device != self.factors.device
        ):
            raise ValueError(
                f"FeatureCovariance.solve: v must be [{clients}, C, {features}] "
                f"{self.factors.dtype} on {self.factors.device}, got {list(v.shape)} {v.dtype} on "
                f"{v.device}"
            )
        return torch.cholesky_solve(v.mT, self.factors).mT

    def nonfinite(self) -> Tensor:
        """Return how many records were left out because their norm is not finite."""
        return (~valid(self.sq_norms)).sum()
