"""Damped Newton systems ``(H_i + gamma I) y_i = s_i`` of many clients, four kinds of H.

``exact``       H_i = sum of the records' clipped Hessians over |D|, by factorisation.
``cg``          the same by conjugate gradients; no Hessian is formed.
``covariance``  H_i = I_C (x) sum of clipped x x^T over |D| (DP-FedNew-FC).
``none``        H_i = 0: the control that shows what curvature brings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import MOST
from dpkernels.federated.problem import Cohort, Problem
from dpkernels.federated.softmax import SoftmaxProblem, others
from dpkernels.ops import glm

Hessian = Literal["exact", "cg", "covariance", "none"]
_Solve = Callable[[Cohort, Tensor, float | Tensor], Tensor]
HESSIANS: tuple[Hessian, ...] = get_args(Hessian)
# Systems with gamma >= 0.01 converge in 10 to 60 iterations; whoever needs more is solved exactly.
_MOST_ITERATIONS = 200
# Of the secant in ``solve_in_ball``; 4 to 8 are usual, and the bracket shrinks in any case.
_MOST_SECANTS = 100


@dataclass(frozen=True)
class Newton:
    """The Hessians of a cohort at theta.

    bound: what a record's Hessian is clipped to, in the Frobenius norm.
    records: |D|, what the sum of Hessians is divided by.
    tolerance: of ``cg``: the residual is at most this times |s_i|, for every client, always.
    """

    kind: Hessian
    problem: Problem
    cohort: Cohort
    theta: Tensor
    bound: float
    records: float
    tolerance: float

    def solve(self, s: Tensor, gamma: float | Tensor) -> Tensor:
        """Return ``(H_i + gamma_i I)^-1 s_i``, ``[k, *shape]``.

        s: ``[k, *shape]``. gamma: > 0, a number or float64 ``[k]``.

        Raises TypeError for Hessians of another model than softmax regression.
        """
        if self.kind == "none":
            return s / (_column(gamma, s) if isinstance(gamma, Tensor) else gamma)
        problem = self._softmax()  # or a TypeError that names the way out
        if len(large := problem.large(self.cohort)):
            return self._in_parts(large, s, gamma)
        if self.kind == "covariance":
            return self._each_solved(self._by_covariance, s, gamma)
        if self.kind == "exact":
            return self._each_solved(self._exactly, s, gamma)
        found = glm.newton_step_cg(
            self.cohort.held,
            self.theta,
            s,
            hessian_bound=self.bound,
            gamma=gamma,
            scale=1 / self.records,
            tolerance=0.5 * self.tolerance,  # of the tracked residual, which rounding moves
            max_iterations=_MOST_ITERATIONS,
        )
        for row in (found.residuals > self.tolerance).nonzero().flatten().tolist():
            found.solutions[row] = self._alone(row)._each_solved(
                self._exactly, s[row : row + 1], _part(gamma, row)
            )
        return found.solutions

    def _in_parts(self, large: Tensor, s: Tensor, gamma: float | Tensor) -> Tensor:
        """Return all solutions, those of the clients ``large`` in float64: see ``summed``."""
        found = torch.empty_like(s)
        for rows, wide in ((large, True), (others(large, len(s)), False)):
            if len(rows):
                cohort = self._softmax().subset(self.cohort, rows, wide=wide)
                dtype = cohort.held.x.dtype
                part = replace(self, cohort=cohort, theta=self.theta.to(dtype))
                own = gamma[rows] if isinstance(gamma, Tensor) else gamma
                found[rows] = part.solve(s[rows].to(dtype), own).to(s.dtype)
        return found

    def _alone(self, row: int) -> Newton:
        return replace(self, cohort=self.problem.only(self.cohort, row))

    def _each_solved(self, solve: _Solve, s: Tensor, gamma: float | Tensor) -> Tensor:
        """Return ``solve`` of every client; zero for one whose matrix cannot be factorised at all.

        Whether it can depends on the records, so a failure must not be seen: it would name the
        client. Clipped Hessians are far from it. A user's are not clipped, and features of 1e4 are
        enough in float32 at gamma = 0.1: such a client is solved in float64, and where that fails
        it uploads noise alone.
        """
        try:
            return solve(self.cohort, s, gamma)
        except ValueError as error:
            if "not positive definite" not in str(error):
                raise
            if len(self.cohort) == 1:
                return torch.zeros_like(s) if s.dtype == torch.float64 else self._widely(s, gamma)
        rows = range(len(self.cohort))
        parts = [self._alone(i)._each_solved(solve, s[i : i + 1], _part(gamma, i)) for i in rows]
        return torch.cat(parts)

    def solve_in_ball(self, s: Tensor, gamma: float, radius: float, slack: float) -> Tensor:
        """Return ``argmin_{|y| <= radius} y.(H_i + gamma I) y / 2 - y.s_i`` of every client.

        It solves ``(H_i + (gamma + nu_i) I) y_i = s_i`` with the least ``nu_i >= 0`` for which
        ``|y_i| <= radius``, in float64 and in the eigenvectors of H_i, where every nu costs a sum
        of d terms. The norm falls with nu, and 1 / norm is nearly linear in it: a bracketed secant
        finds nu. Where nu > 0 the result is scaled to the radius, so that it is the exact minimiser
        for the right-hand side ``s_i radius / |y_i|``, which is off by at most ``slack`` (for |s_i|
        below slack / 1e-13, where float64 ends).

        ``exact`` takes the eigenvectors of one client's Hessian at a time; not for ``cg``.
        """
        if self.kind == "exact" and len(self.cohort) > 1:
            rows = [
                self._alone(i).solve_in_ball(s[i : i + 1], gamma, radius, slack)
                for i in range(len(self.cohort))
            ]
            return torch.cat(rows)
        # H_i acts on the last axis of what is shaped so.
        shaped = s.double() if self.kind == "covariance" else s.double().flatten(1).unsqueeze(1)
        values, vectors = self._spectrum(len(s))
        turned = shaped if vectors is None else shaped @ vectors
        squares = turned.square().sum(1)
        lengths = squares.sum(1).sqrt()

        def norms_at(nu: Tensor) -> Tensor:
            return (squares / (values + gamma + nu[:, None]).square()).sum(1).sqrt()

        nu = low = torch.zeros_like(lengths)
        norms = norms_at(low)
        outside = norms > radius
        # |y| <= |s| / (gamma + nu): there it is at most the radius for certain.
        high = torch.where(outside, (lengths / radius - gamma).clamp(min=0.0), 0.0)
        low_value, high_value = 1 / norms, 1 / norms_at(high)
        for _ in range(_MOST_SECANTS):
            left = outside & (lengths * (radius / norms - 1).abs() > slack)
            if not bool(left.any()):
                break
            share = (1 / radius - low_value) / (high_value - low_value)
            share = torch.where(share.isfinite(), share, 0.5).clamp(0.02, 0.98)
            nu = torch.where(left, low + share * (high - low), nu)
            norms = torch.where(left, norms_at(nu), norms)
            above, below = left & (norms > radius), left & (norms <= radius)
            low, low_value = torch.where(above, nu, low), torch.where(above, 1 / norms, low_value)
            high = torch.where(below, nu, high)
            high_value = torch.where(below, 1 / norms, high_value)
        scale = torch.where(outside, radius / norms, 1.0)
        y = turned * (scale[:, None] / (values + gamma + nu[:, None])).unsqueeze(1)
        return (y if vectors is None else y @ vectors.mT).reshape(s.shape).to(s.dtype)

    def _spectrum(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return eigenvalues ``[k, m]`` (or ``[k, 1]``, all 0) and vectors of every H_i."""
        if self.kind == "none":
            return self.theta.new_zeros(count, 1, dtype=torch.float64), None
        problem = self._softmax()
        if self.kind == "covariance":
            most = MOST * self.records
            return problem.covariance_spectrum(self.cohort, self.bound, 1 / self.records, most)
        held, theta = self.cohort.held, self.theta
        if len(large := problem.large(self.cohort)):
            held, theta = problem.subset(self.cohort, large, wide=True).held, theta.double()
        hessians = glm.clipped_hessian_sum(held, theta, self.bound)
        values, vectors = torch.linalg.eigh(hessians.double() / self.records)
        return values.clamp(min=0.0), vectors

    def _widely(self, s: Tensor, gamma: float | Tensor) -> Tensor:
        """Return the solution of one client, in float64."""
        held = replace(self.cohort.held, x=self.cohort.held.x.double())
        wide = replace(self, cohort=replace(self.cohort, held=held), theta=self.theta.double())
        solve = wide._by_covariance if self.kind == "covariance" else wide._exactly
        return wide._each_solved(solve, s.double(), gamma).to(s.dtype)

    def _by_covariance(self, cohort: Cohort, s: Tensor, gamma: float | Tensor) -> Tensor:
        problem = self._softmax()
        return problem.covariance(cohort, self.bound, gamma, 1 / self.records).solve(s)

    def _exactly(self, cohort: Cohort, s: Tensor, gamma: float | Tensor) -> Tensor:
        return glm.newton_step(
            cohort.held,
            self.theta,
            s,
            hessian_bound=self.bound,
            gamma=gamma,
            scale=1 / self.records,
        ).solutions

    def _softmax(self) -> SoftmaxProblem:
        if not isinstance(self.problem, SoftmaxProblem):
            raise TypeError(
                f"hessian: {self.kind!r} is known for softmax regression only, got "
                f"{type(self.problem).__name__}; take hessian='none', or FedGD"
            )
        return self.problem


def _part(gamma: float | Tensor, row: int) -> float | Tensor:
    return gamma[row : row + 1] if isinstance(gamma, Tensor) else gamma


def _norms(values: Tensor) -> Tensor:
    """Return the norm of every row, float64 ``[k]``."""
    norms: Tensor = torch.linalg.vector_norm(values.flatten(1).double(), dim=1)
    return norms


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Return ``[k]`` as it multiplies ``like``, ``[k, *shape]``."""
    shaped = values.reshape(-1, *(1 for _ in like.shape[1:]))
    return shaped if values.dtype == torch.bool else shaped.to(like.dtype)
