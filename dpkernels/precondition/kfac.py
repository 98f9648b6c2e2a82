"""K-FAC from probes: the preconditioner of DP-KFC (Algorithm 1, and what does better)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.sides import IDENTITY, Sides
from dpkernels.ops import roots
from dpkernels.ops.checks import check_finite
from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from dpkernels.precondition.estimate import Loss
from dpkernels.precondition.moments import Estimation, LayerMoments, Sharing, WhichSides, why_not
from dpkernels.precondition.probes import Probe
from dpkernels.precondition.refreshed import Refreshed
from dpkernels.precondition.report import KfacReport, LayerFactors, mean_eigenvalue

Normalise = Literal["none", "damping", "factors"]


class Kfac(Refreshed[LayerMoments]):
    """U_G g U_A for every layer, with U_A = (A + damping I)^(-1/2) and U_G likewise, from probes.

    By default U_G is the identity, and A is divided by its mean eigenvalue; Algorithm 1 of the
    paper is ``sides="AG", normalise="none", damping=1e-3``.

    A = E[a a^T] and G = E[d d^T] are second moments of what a layer gets and of the errors that
    come back to it, on probes, at the present parameters: from one sample's own loss each, not from
    an average over the batch, so they do not depend on ``batch_size`` but for chance.

    model: the one to be trained, before or after ``make_private``.
    probe: where inputs and targets come from; nothing else is looked at. Synthetic or public ones,
        and parameters that were released, cost no privacy. Of private ones ``not_private`` says so,
        and a run has no epsilon then. One that does not say is refused.
    loss: ``loss(outputs, targets)``: a sum over samples, or ``[B]``. An average is refused.
    batches, batch_size: how many probes a refresh takes.
    damping: what is added to A and to G: pi + gamma of Algorithm 1, which adds one before and one
        after the eigendecomposition.
    normalise: what the damping is measured by. ``factors``: A and G are divided by their mean
        eigenvalues first, so that factors turn and stretch the gradient of a layer, but leave its
        scale beside other layers, and the loss's units, alone. ``damping``: the damping of each
        side is multiplied by its mean eigenvalue. ``none``: as it is, as in the paper, which takes
        ``damping=1e-3``. The G of a convolution is a mean over all positions, and may be a
        thousandth of that: its factor is then a multiple of the identity, which ``report()``
        shows; and layers without factors, LayerNorm say, are left behind by those that have some.
    sides: ``A``, ``G`` or ``AG``, both. The errors of probes, whose labels mean nothing, become
        other than those of the data as training goes on: A alone does better.
    rank: keep that many eigenpairs of each side and put the mean of the others in their place, for
        sides of more than 2 ``rank``, where it is the cheaper form; None keeps all.
    diagonal: keep only the diagonals of A and G.
    sharing: what becomes of positions, ``expand`` or ``reduce``: ``Estimation``.
    refresh_every: estimate anew after so many steps of the optimizer; None: by ``refresh()`` only.
    max_size: of larger sides only the diagonal is kept. A side of 2048 takes 16 MB twice and
        29 Gflop for its root; twice the size, eight times the work.
    seed: of the probes. All processes must have the same one to get the same factors.

    Layers without a product (normalisation, bare parameters), with groups, or that share a weight
    are left as they are; ``report()`` names them.

    Factors are first estimated when they are first asked for, by ``make_private`` say. Passes are
    in evaluation mode, in the parameters' own precision, and leave the model, its gradients,
    torch's generators and whatever training has collected as they are. There is no constant on all
    factors together: that is the same as another clip norm. Defaults are among the best, within the
    noise of a seed, on held-out training images of FashionMNIST at epsilon 1 (``dpkernels repro
    dp-kfc --table search``).

    Raises ValueError for wrong arguments, Unsupported for a model that ``make_private`` refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        loss: Loss,
        *,
        batches: int = 8,
        batch_size: int = 256,
        damping: float = 0.1,
        normalise: Normalise = "factors",
        sides: WhichSides = "A",
        rank: int | None = None,
        diagonal: bool = False,
        sharing: Sharing = "expand",
        refresh_every: int | None = None,
        max_size: int = 2048,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            probe,
            loss,
            batches=batches,
            batch_size=batch_size,
            refresh_every=refresh_every,
            seed=seed,
        )
        self._check_counts(rank=rank, max_size=max_size)
        check_finite("Kfac", "damping", damping, above=0.0)
        for name, value, choices in (
            ("sides", sides, get_args(WhichSides)),
            ("sharing", sharing, get_args(Sharing)),
            ("normalise", normalise, get_args(Normalise)),
        ):
            if value not in choices:
                raise ValueError(f"Kfac: {name} must be one of {', '.join(choices)}, got {value!r}")
        if diagonal and rank is not None:
            raise ValueError(f"Kfac: a diagonal has no rank, got diagonal=True and rank={rank}")
        self.damping, self.normalise, self.rank = damping, normalise, rank
        self._how = Estimation(sides, sharing, diagonal, max_size)

    def report(self) -> KfacReport:
        """Return which layers have which factors, why others have none, and what they cost."""
        self._ensure()
        return KfacReport(
            tuple(LayerFactors.of(x, self.sides(name)) for name, x in self._moments.items()),
            self._probes(),
            self.damping,
            self.normalise,
            self.refreshes,
            1e3 * self._seconds,
            1e3 * self._sides_seconds,
            self.not_private,
        )

    def _estimation(self) -> dict[str, Any]:
        own = {"damping": self.damping, "normalise": self.normalise, "rank": self.rank}
        return super()._estimation() | own | dataclasses.asdict(self._how)

    def _start(self, layer: Layer) -> LayerMoments:
        return LayerMoments(layer, self._how)

    def _why_not(self, layer: Layer) -> str | None:
        return why_not(layer)

    def _sides_of(self, moments: Mapping[str, LayerMoments]) -> dict[str, Sides]:
        """Return the inverse roots of all A and G, by the layer's name, where there are any."""
        both = {name: (x.errors, x.activations) for name, x in moments.items()}
        there = [x for pair in both.values() for x in pair if x is not None]
        means = [1.0] * len(there)
        if self.normalise != "none":
            # Errors that are all zero have the mean 0, and the root of the damping.
            means = [mean_eigenvalue(x) or 1.0 for x in there]
        units = [x if mean == 1 else x / mean for x, mean in zip(there, means, strict=True)]
        factors = inverse_roots(units, self.damping, self.rank)
        if self.normalise == "damping":
            # (M + damping m I)^(-1/2) = m^(-1/2) (M / m + damping I)^(-1/2)
            pairs = zip(factors, means, strict=True)
            factors = [_scaled(factor, mean**-0.5) for factor, mean in pairs]
        factor_of = dict(zip(map(id, there), factors, strict=True))
        found = {name: Sides(*(factor_of.get(id(x)) for x in pair)) for name, pair in both.items()}
        return {name: sides for name, sides in found.items() if sides != IDENTITY}


def inverse_roots(
    moments: Sequence[Tensor], damping: float, rank: int | None = None
) -> list[Factor]:
    """Return ``(M + damping I)^(-1/2)`` of every moment; of matrices, all those alike in one call.

    moments: ``[n, n]``, or ``[n]`` for a diagonal. rank: as for ``Kfac``.
    """
    found: dict[int, Factor] = {}
    alike: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for index, x in enumerate(moments):
        if x.dim() == 1:
            found[index] = Diagonal((x + damping).rsqrt())
        else:
            # 4 n rank flops for a vector, or 2 n^2.
            low = rank is not None and len(x) > 2 * rank
            alike.setdefault((x.dtype, x.device, low), []).append(index)
    for (_, _, low), indices in alike.items():
        matrices = [moments[index] for index in indices]
        factors: Sequence[Factor]
        if low and rank is not None:
            factors = roots.low_rank_inverse_root(matrices, rank, damping=damping)
        else:
            factors = roots.inverse_root_factors(matrices, damping=damping)
        found.update(zip(indices, factors, strict=True))
    return [found[index] for index in range(len(moments))]


def _scaled(factor: Factor, scale: float) -> Factor:
    if isinstance(factor, Full):
        return Full(factor.matrix * scale)
    if isinstance(factor, Diagonal):
        return Diagonal(factor.values * scale)
    return LowRank(factor.vectors, factor.values * scale, factor.tail * scale)
