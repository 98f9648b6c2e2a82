"""DP-FedNew: private Newton directions by one pass of ADMM, at record and at user level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import client_gradients, summed
from dpkernels.federated.algorithms.newton import HESSIANS, Hessian, Newton
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Seen, Stage, Tensors, Terms, Visit
from dpkernels.federated.received import all_finite
from dpkernels.federated.softmax import UNCLIPPED
from dpkernels.ops.checks import check_finite

Dual = Literal["none", "uploaded", "clean"]
Rescale = Literal["project", "xi"]
# What float32 leaves of a residual, relative to |s_i|, in a solve by factorisation. The largest
# error that was measured, 1,000 records and gamma = 0.2, is 1/100 of what this allows for.
_ROUNDING = 1e-6
# Of a solve inside the ball: what its right-hand side may be off by, relative to C1 / |D|.
_SLACK = 1e-2


@dataclass(frozen=True)
class FedNew(Algorithm):
    """s_i = g_i - lambda_i + rho y;  y_i = (H_i + gamma I)^-1 s_i;  gamma = alpha + rho.

    Clients upload y_i with noise; the server takes y = mean, theta <- theta - lr y; clients take
    lambda_i <- lambda_i + rho (own y_i - y) in the next round.

    Unit record (Algorithm 2): g_i, H_i are sums of records' gradients and Hessians, clipped to
    ``clip`` = C1 and ``hessian_clip`` = Delta_H, over |D|; s_i is projected to norm ``total_clip``
    = C2. Unit user (Algorithm 1): neither is clipped, and y_i is clipped to ``clip``.

    dual: what a client's lambda_i is made of.
        ``none``: lambda_i = 0. Sound under both views.
        ``uploaded``: the noisy upload, as in the paper. Sound under ``each_upload``, where it is
            post-processing. Under ``aggregate`` it is void: later uploads depend on the client's
            own noise, of which one share alone is too little.
        ``clean``: the client's own y_i before the noise. Unit user: sound, an upload has norm
            ``clip`` at most whatever lambda_i is. Unit record: sound with ``radius``, below.
    radius: R, for ``clean`` at record level: y_i minimises y.(H_i + gamma I) y / 2 - y.s_i over
        |y| <= R, and s_i is not projected.
    rescale: ``project``, or ``xi`` for the paper's rescaling (line 8), whose xi depends on the
        private gradient: void.
    hessian: ``exact``, ``cg``, ``covariance`` (DP-FedNew-FC) or ``none`` (H = 0).
    tolerance: of ``cg``, relative to |s_i|.

    Sensitivity of an upload, one record more or less, H' the one with more:

        y' - y = (H' + gamma)^-1 (s' - s)  +  [(H' + gamma)^-1 - (H + gamma)^-1] s

    The first term is at most C1 / (gamma |D|), because a projection moves no two points apart. In
    the second, H' - H = E >= 0 with |E| <= e = Delta_H / |D|, and with A = H + gamma I >= gamma I,
    A^-1 - (A + E)^-1 = A^-1/2 [I - (I + A^-1/2 E A^-1/2)^-1] A^-1/2 <= (1/gamma) (e/gamma) / (1 +
    e/gamma). Together

        C1 / (gamma |D|) + Delta_H C2 / (gamma^2 |D| + gamma Delta_H),

    without a condition on gamma (Lemma 3 of the paper has gamma^2 |D| - gamma Delta_H). A residual
    of at most tol |s_i| adds 2 tol C2 / gamma; solves by factorisation have 1e-6 for float32. H as
    it is added up is off by what ``summed`` allows for, r Delta_H, which adds r Delta_H C2 /
    gamma^2.

    Sensitivity of T uploads together with ``clean`` and ``radius`` (ours). Fix what the server has
    broadcast. For neighbours let z_k = y_k - y'_k and l_k = lambda_k - lambda'_k, so l_k = l_(k-1)
    + rho z_k and l_0 = 0. Both y_k minimise over the same ball; the two variational inequalities,
    each tried at the other's point, add up to

        gamma |z_k|^2 + l_(k-1).z_k <= (g - g').z_k - z_k.(H - H') y'_k <= b |z_k|,
        b = (C1 + Delta_H R) / |D|,

    where z.H z >= 0 was dropped. With 2 rho l_(k-1).z_k = |l_k|^2 - |l_(k-1)|^2 - rho^2 |z_k|^2 the
    sum over k telescopes: (gamma - rho/2) sum |z_k|^2 <= b sum |z_k| <= b sqrt(T sum |z_k|^2). So

        (sum over T rounds of |z_k|^2)^(1/2) <= sqrt(T) 2 (C1 + Delta_H R) / ((2 alpha + rho) |D|),

    for every T and every transcript. Gaussian releases whose squared sensitivities, over noise,
    add up to at most mu^2 on every path are mu-GDP (Smith and Thakurta 2022), so that the rounds
    are accounted as T releases with sensitivity 2 (C1 + Delta_H R) / ((2 alpha + rho) |D|). A
    right-hand side that is off by r in either world adds 2 r to b. Duals and y_k are float64 there;
    rounding the upload to float32 moves it by 2^-24 R at most, twice that between neighbours.
    """

    name: ClassVar[str] = "fednew"
    lr: float = 1.0
    alpha: float = 0.1
    rho: float = 0.1
    clip: float = 1.0
    total_clip: float = 1.0
    hessian_clip: float = 1.0
    hessian: Hessian = "cg"
    dual: Dual = "none"
    radius: float | None = None
    rescale: Rescale = "project"
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("lr", "alpha", "rho", "clip", "total_clip", "hessian_clip", "tolerance"):
            check_finite("FedNew", name, getattr(self, name), above=0.0)
        for name, known in (
            ("hessian", HESSIANS),
            ("dual", get_args(Dual)),
            ("rescale", get_args(Rescale)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"FedNew: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.radius is not None:
            check_finite("FedNew", "radius", self.radius, above=0.0)
            if self.dual != "clean" or self.rescale != "project":
                raise ValueError(
                    "FedNew: radius is for dual='clean' with rescale='project', got dual="
                    f"{self.dual!r}, rescale={self.rescale!r}; leave it out"
                )

    @property
    def gamma(self) -> float:
        """What is added to the diagonal of H."""
        return self.alpha + self.rho

    def sensitivity(self, terms: Terms) -> float:
        """Return how far one unit more or less moves an upload; the proofs are above."""
        if terms.unit == "user":
            return self.clip
        gamma, count = self.gamma, terms.records
        if self.radius is not None:
            b = summed(self.clip + self._curvature * self.radius, terms) + 2 * self._slack(terms)
            return 2 * b / (2 * self.alpha + self.rho) + 2 * 2.0**-24 * self.radius
        residual = max(self.tolerance, _ROUNDING) if self.hessian == "cg" else _ROUNDING
        moved = self._curvature * self.total_clip / (gamma**2 * count + gamma * self._curvature)
        rounded = summed(self._curvature, terms) - self._curvature / count
        moved += rounded * self.total_clip / gamma**2
        return summed(self.clip, terms) / gamma + moved + 2 * residual * self.total_clip / gamma

    @property
    def _curvature(self) -> float:
        return 0.0 if self.hessian == "none" else self.hessian_clip

    def _slack(self, terms: Terms) -> float:
        return _SLACK * self.clip / terms.records

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of directions."""
        if terms.sampled and self.dual != "none":
            raise ValueError(
                f"FedNew: dual={self.dual!r} needs the mean of every round that a client was in; "
                "let all clients take part, or take dual='none'"
            )
        if terms.records_sampled and self.dual == "clean" and terms.unit == "record":
            raise ValueError(
                "FedNew: dual='clean' remembers a record in rounds that do not draw it, so that "
                "drawing records hides nothing; take every record in every round (record_rate=1), "
                "or another dual"
            )
        if self.radius is not None and (terms.unit == "user" or self.hessian == "cg"):
            raise ValueError(
                "FedNew: radius is for unit 'record' and an exact solve, got unit "
                f"{terms.unit!r} and hessian={self.hessian!r}"
            )
        return (Stage("direction", Query(terms.shape, self.sensitivity(terms)), terms.rounds),)

    def void(self, terms: Terms) -> str | None:
        """Return why the paper's own steps have no guarantee."""
        if self.rescale == "xi" and terms.unit == "record":
            return (
                "rescale='xi' is the paper's: xi is chosen from the private gradient, so a record "
                "moves the upload by more than its noise is for"
            )
        if self.dual == "uploaded" and terms.view == "aggregate":
            return (
                "dual='uploaded' under 'aggregate' is the paper's: the dual is made of the "
                "client's own share of the noise, which is too little by itself"
            )
        if self.dual == "clean" and terms.unit == "record" and self.radius is None:
            return (
                "dual='clean' at record level has no bound without radius: the dual remembers a "
                "record's effect in all rounds"
            )
        return None

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta and y."""
        return {"theta": theta, "y": torch.zeros_like(theta)}

    def client_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return the dual and the client's last y, both zero."""
        if self.dual == "none":
            return {}
        zeros = torch.zeros_like(theta, dtype=self._dual_dtype(theta))
        return {"dual": zeros, "own": zeros}

    def _dual_dtype(self, theta: Tensor) -> torch.dtype:
        """Return float64 where the proof is for exact duals: rho times float32's error adds up."""
        return theta.dtype if self.radius is None else torch.float64

    def broadcast(self, stage: Stage, server: Tensors) -> Tensors:
        """Send theta and y."""
        return {"theta": server["theta"], "y": server["y"]}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy directions, and the duals' new state."""
        y, state = visit.sent["y"], visit.state
        y = y.to(self._dual_dtype(y))
        pull = (self.rho * y).expand(len(visit.cohort), *y.shape)
        dual = None
        if self.dual != "none":
            dual = state["dual"] + self.rho * (state["own"] - y)
            pull = pull - dual
        own = self._direction(visit, pull)
        if not all_finite(own):
            # What cannot be computed is left out of the dual, too.
            own[~own.flatten(1).isfinite().all(1)] = 0.0
        kept = own.clone() if self.dual == "clean" else None
        upload = visit.noisy(own.to(visit.sent["theta"].dtype))
        if dual is None:
            return upload, {}
        return upload, {"dual": dual, "own": upload.clone() if kept is None else kept}

    def _direction(self, visit: Visit, pull: Tensor) -> Tensor:
        """Return y_i before the noise."""
        terms, problem, cohort = visit.terms, visit.problem, visit.cohort
        theta = visit.sent["theta"]
        bound = UNCLIPPED if terms.unit == "user" else self.hessian_clip
        newton = Newton(self.hessian, problem, cohort, theta, bound, terms.records, self.tolerance)
        if terms.unit == "user":
            gradient = problem.gradient_sums(cohort, theta).div_(terms.records)
            return clip_rows(newton.solve(gradient + pull, self.gamma), self.clip)
        gradient = client_gradients(visit, theta, self.clip)
        if self.radius is not None:
            s = gradient + pull
            return newton.solve_in_ball(s, self.gamma, self.radius, self._slack(terms))
        if self.rescale == "xi":
            s = rescaled_by_xi(gradient, pull, self.total_clip)
        else:
            s = clip_rows(gradient + pull, self.total_clip)
        return newton.solve(s, self.gamma)

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take the mean direction."""
        return {"theta": server["theta"].sub(seen.mean, alpha=self.lr), "y": seen.mean}


def rescaled_by_xi(gradient: Tensor, pull: Tensor, bound: float) -> Tensor:
    """Return ``g + xi a`` with |g + xi a| = ``bound`` where |g + a| is more (Lemma 4). Not private.

    gradient, pull: ``[k, *shape]``. Where no real xi exists, xi = 0.
    """
    g, a = gradient.flatten(1).double(), pull.flatten(1).double()
    length = a.norm(dim=1)
    along = (g * a).sum(1) / length
    root = (along.square() + bound**2 - g.square().sum(1)).clamp(min=0.0).sqrt()
    xi = torch.where(length > 0, (root - along) / length, 0.0).clamp(min=0.0)
    xi = torch.where((g + a).norm(dim=1) > bound, xi, 1.0)
    return gradient + xi[:, None, None].to(pull.dtype) * pull
