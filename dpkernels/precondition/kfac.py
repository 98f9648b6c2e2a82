"""K-FAC from probes: the preconditioner of DP-KFC (Algorithm 1)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dpkernels.engine.sides import IDENTITY, Sides
from dpkernels.ops import roots
from dpkernels.ops.checks import check_finite
from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from dpkernels.precondition.estimate import Loss, estimate_moments, no_moments
from dpkernels.precondition.moments import Estimation, LayerMoments, Sharing, WhichSides
from dpkernels.precondition.probes import Probe
from dpkernels.precondition.report import KfacReport, LayerFactors, mean_eigenvalue

Normalise = Literal["none", "damping", "factors"]
_STATE = {"steps", "refreshes", "generator", "estimation", "not_private", "moments"}


class Kfac:
    """U_G g U_A for every layer, with U_A = (A + damping I)^(-1/2) and U_G likewise, from probes.

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
    normalise: what the damping is measured by. ``none``: as it is, as in the paper. The G of a
        convolution is a mean over all positions, and may be a thousandth of 1e-3: its factor is
        then a multiple of the identity, which ``report()`` shows. ``damping``: the damping of each
        side is multiplied by its mean eigenvalue. ``factors``: A and G are divided by their mean
        eigenvalues first, so that factors turn and stretch the gradient of a layer, but leave its
        scale beside other layers, and the loss's units, alone.
    sides: ``A``, ``G`` or both.
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
    factors together: that is the same as another clip norm.

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
        damping: float = 1e-3,
        normalise: Normalise = "none",
        sides: WhichSides = "AG",
        rank: int | None = None,
        diagonal: bool = False,
        sharing: Sharing = "expand",
        refresh_every: int | None = None,
        max_size: int = 2048,
        seed: int = 0,
    ) -> None:
        for name, count in (
            ("batches", batches),
            ("batch_size", batch_size),
            ("rank", rank),
            ("refresh_every", refresh_every),
            ("max_size", max_size),
        ):
            if count is not None and count < 1:
                raise ValueError(f"Kfac: {name} must be at least 1, got {count}")
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
        _check_says(probe)
        self.damping, self.normalise, self.rank = damping, normalise, rank
        self.refresh_every = refresh_every
        self.refreshes = 0
        self._model, self._probe, self._loss = model, probe, loss
        self._batches, self._batch_size = batches, batch_size
        self._how = Estimation(sides, sharing, diagonal, max_size)
        # Beside the CPU, so that probes do not depend on the device; they go on from one refresh to
        # the next.
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._void: str | None = None  # of all probes that factors have come from
        self._moments: dict[str, LayerMoments] = {}
        self._sides: dict[str, Sides] = {}
        self._seconds = self._root_seconds = 0.0

    @property
    def not_private(self) -> str | None:
        """Why there is no guarantee; None unless probes hold private data, now or ever before.

        It stays, and goes through checkpoints: whatever was trained with such factors depends on
        them. A probe that has ceased to say counts as private, not as silent.
        """
        silent = "the probe does not say whether it draws from private data"
        return self._void or getattr(self._probe, "not_private", silent)

    @property
    def layers(self) -> frozenset[str]:
        """The names of the layers that have factors."""
        self._ensure()
        return frozenset(self._sides)

    def sides(self, layer: str) -> Sides:
        """Return the factors of the layer of that name; identity for those that have none."""
        self._ensure()
        return self._sides.get(layer, IDENTITY)

    def moments(self) -> Mapping[str, LayerMoments]:
        """Return A and G, as of the last refresh, by the layer's name."""
        self._ensure()
        return self._moments

    def after_step(self) -> None:
        """Count a step of the optimizer, and refresh if it is time."""
        self._steps += 1
        if self.refresh_every is not None and self._steps % self.refresh_every == 0:
            self.refresh()

    def refresh(self) -> None:
        """Estimate all factors at the present parameters, from new probes.

        A logical step that has begun keeps the factors that it began with.
        """
        start = time.perf_counter()
        batches = (
            self._probe.batch(self._batch_size, self._generator) for _ in range(self._batches)
        )
        moments = estimate_moments(self._model, batches, self._loss, self._how)
        estimated = time.perf_counter()
        sides = self._sides_of(moments)
        self._moments, self._sides, self._void = moments, sides, self.not_private
        self.refreshes += 1
        end = time.perf_counter()
        self._seconds, self._root_seconds = end - start, end - estimated

    def report(self) -> KfacReport:
        """Return which layers have which factors, why others have none, and what they cost."""
        self._ensure()
        return KfacReport(
            tuple(LayerFactors.of(x, self.sides(name)) for name, x in self._moments.items()),
            f"{self._batches} x {self._batch_size} of {self._probe.describe()}",
            self.damping,
            self.refreshes,
            1e3 * self._seconds,
            1e3 * self._root_seconds,
            self.not_private,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: A and G, and where probes and schedule are."""
        self._ensure()
        return {
            "steps": self._steps,
            "refreshes": self.refreshes,
            "generator": self._generator.get_state(),
            "estimation": dataclasses.asdict(self._how),
            "not_private": self.not_private,
            "moments": {name: x.state_dict() for name, x in self._moments.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint with the factors that it was made with.

        Factors of private probes make this not private, whatever its own probe is. Raises
        ValueError for a state of other layers, or of moments of another kind.
        """
        op = "Kfac.load_state_dict"
        if missing := _STATE - state.keys():
            raise ValueError(
                f"{op}: state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
            )
        wanted = dataclasses.asdict(self._how)
        if state["estimation"] != wanted:
            raise ValueError(
                f"{op}: state must be of moments with {wanted}, got {state['estimation']}; make "
                "the preconditioner as it was saved"
            )
        moments = no_moments(self._model, self._how)
        if moments.keys() != state["moments"].keys():
            raise ValueError(
                f"{op}: state must be of the layers {list(moments)}, got "
                f"{list(state['moments'])}; load it for the model that it was saved with"
            )
        for name, x in moments.items():
            x.load_state_dict(state["moments"][name])
        self._void = self._void or state["not_private"]
        self._moments, self._sides = moments, self._sides_of(moments)
        self._steps, self.refreshes = state["steps"], state["refreshes"]
        self._generator.set_state(state["generator"])

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

    def _ensure(self) -> None:
        if self.refreshes == 0:
            self.refresh()


def _check_says(probe: Probe) -> None:
    """Raise ValueError unless the probe says whether it draws from private data."""
    said = getattr(probe, "not_private", False)
    if said is not None and not (isinstance(said, str) and said):
        raise ValueError(
            f"Kfac: probe must say in not_private why there is no guarantee, or None if it draws "
            f"from no private data, got {said!r} from {type(probe).__name__}"
        )


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
