"""One logical step of private training, in the order in which it happens.

    capture -> norms -> factors -> sum      for each microbatch, in its backward pass
    noise -> sum over ranks -> optimizer    once, in ``optimizer.step()``

DP-SGD is this flow with the identity as preconditioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpkernels.engine.capture import Captured, Pass
from dpkernels.engine.clipping import Clipping, SampleNorms
from dpkernels.engine.distributed import ALONE, Ranks
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.scaled import check_sides, norms_of, plan_of
from dpkernels.engine.layers.tied import TiedGroup
from dpkernels.engine.sharding import gradient_of
from dpkernels.engine.sides import Preconditioner, Sides, why_void
from dpkernels.engine.sums import Sums
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.noise import NoiseKey

Reduction = Literal["mean", "sum"]
_AS_IT_IS = nullcontext()
# Factors of so many microbatches are kept until they are counted: 64 KB of them at 256 samples.
_UNCOUNTED = 64


@dataclass(frozen=True)
class Mechanism:
    """What a step releases: a sum of clipped gradients with noise, divided by a public number.

    noise_multiplier: sigma: the noise is N(0, (sigma * sensitivity)^2) on every element of the sum.
    expected_batch_size: what the sum is divided by, over all ranks; never the realised number.
    loss_reduction: how the loss adds up over the samples of one backward pass.
    loss_scale: what the loss is multiplied by before backward(), against underflow in float16.
    """

    noise_multiplier: float
    expected_batch_size: float
    loss_reduction: Reduction
    loss_scale: float = 1.0


@dataclass
class Seen:
    """What the engine counts. Private: it depends on the samples.

    microbatches, samples: of the logical step that is being collected.
    sq_norms: ``[L, B]`` of the last microbatch, if they are kept.
    dropped: as not finite, since the beginning, as far as they have been counted.
    """

    microbatches: int = 0
    samples: int = 0
    sq_norms: Tensor | None = field(default=None, repr=False)
    dropped: int = 0
    _uncounted: list[Tensor] = field(default_factory=list, repr=False)

    def note(self, factors: Tensor) -> None:
        """Count a microbatch by its factors, ``[B]`` or ``[L, B]``."""
        self.microbatches += 1
        self.samples += factors.shape[-1]
        # A sample that is not finite has the factor 0 in every layer. How many there are is counted
        # when somebody asks: it takes time, and a GPU would have to be waited for.
        self._uncounted.append(factors if factors.dim() == 1 else factors[0])
        if len(self._uncounted) == _UNCOUNTED:
            self.nonfinite()

    def nonfinite(self) -> int:
        """Return how many samples were dropped, since the beginning, as not finite."""
        uncounted, self._uncounted = self._uncounted, []
        self.dropped += sum(int((factors == 0).sum()) for factors in uncounted)
        return self.dropped


class Step:
    """Collects microbatches into clipped sums, and makes one noisy gradient of them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        tied: Sequence[TiedGroup],
        parameters: Sequence[nn.Parameter],
        mechanism: Mechanism,
        clipping: Clipping,
        preconditioner: Preconditioner,
        key: NoiseKey,
        ranks: Ranks = ALONE,
    ) -> None:
        self.layers: tuple[Layer, ...] = (*(x for x in layers if not x.shared), *tied)
        self.names = tuple(layer.name for layer in self.layers)
        self.mechanism, self.clipping, self.key = mechanism, clipping, key
        self.preconditioner, self.ranks = preconditioner, ranks
        self.seen = Seen()
        self.keep_norms = False
        self.taken = 0
        self.before_release: list[Callable[[], None]] = []
        self._tied = tied
        self._parameters = list(parameters)
        self._sums = Sums(self.layers)
        self._sides: dict[Layer, Sides] = {}
        self._checked: dict[Layer, Sides] = {}
        self._bound = 0.0  # the sensitivity of the microbatches that are being collected
        self._void: str | None = None  # of all factors that were ever applied
        self.shapes: dict[Layer, Captured] = {}

    def check_preconditioner(self) -> None:
        """Raise ValueError for factors that do not fit, or are for layers that do not exist."""
        self._asked()
        known: frozenset[str] = getattr(self.preconditioner, "layers", frozenset())
        if strangers := known - set(self.names):
            raise ValueError(
                f"preconditioner: it has factors for {sorted(strangers)}, but the trained layers "
                f"are {list(self.names)}"
            )

    def replace(self, replaced: Mapping[Layer, Layer]) -> None:
        """Let others deliver in place of some layers, under their names.

        Raises ValueError if the preconditioner has factors that they cannot take.
        """
        self.layers = tuple(replaced.get(layer, layer) for layer in self.layers)
        self._sums.replace(replaced)
        self._sides, self._checked = {}, {}
        self._asked()

    def remember_void(self, reason: str | None) -> None:
        """Keep why there is no guarantee, if a reason is given and there is none yet."""
        if self._void is None:
            self._void = reason

    @property
    def void(self) -> str | None:
        """Why there is no guarantee whatever the noise: the preconditioner, or factors, say so."""
        return self._void if self._void is not None else why_void(self.preconditioner)

    def layer_complete(self, current: Pass, layer: Layer, captured: Captured) -> None:
        """Norms of one layer: as soon as its errors are there, while they are in the cache."""
        sides = self._sides_of(layer)
        with _without_autocast(captured[0].device):
            current.norms[layer] = norms_of(layer, captured, sides)
        if layer not in self.shapes:
            self.shapes[layer] = tuple(x.to("meta") for x in captured)

    @torch.no_grad()  # backward(create_graph=True) leaves it on
    def pass_complete(self, current: Pass) -> None:
        """Factors from the norms of all layers, and the clipped sum of one microbatch."""
        try:
            with _without_autocast(self._parameters[0].device):
                self._join(current)
                self._add(current)
        except BaseException:
            self.discard()
            raise
        current.norms = {}

    def _join(self, current: Pass) -> None:
        """Norms of layers that share a weight, or were called several times."""
        for group in self._tied:
            members = {layer: current.uses.pop(layer, []) for layer in group.members}
            if any(members.values()):
                current.norms[group] = group.norms_of(members)
        for layer, uses in current.uses.items():
            self.layer_complete(current, layer, layer.merged(uses))
        current.uses = {}

    def _add(self, current: Pass) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._check_bound()
        norms_of_samples = self._sample_norms(current)
        self._sums.begin_microbatch()
        self._sums.raise_unit(_power_of_two(norms_of_samples.scale * self.clipping.largest_factor))
        factors = self.clipping.factors(norms_of_samples, self._sums.widest)
        factors = _in_units(factors, self._sums.unit)
        self.seen.note(factors)
        if self.keep_norms:
            self.seen.sq_norms = norms_of_samples.own()
        rounded: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for index, layer in enumerate(self.layers):
            # Taken out, so that what it holds is free before the next buffers are needed.
            norms = current.norms.pop(layer, None)
            if norms is None:
                continue
            sums, accumulate = self._sums.of(layer)
            like = sums[0]
            key = like.device, like.dtype
            if key not in rounded:
                rounded[key] = _rounded_down(factors, like)
            own = rounded[key]
            norms.add_to(sums, own if own.dim() == 1 else own[index], accumulate)

    def _check_bound(self) -> float:
        """Return the sensitivity; raise RuntimeError if it is not that of earlier microbatches."""
        bound = self.clipping.sensitivity(self.names)
        if self.seen.microbatches == 0:
            self._bound = bound
        if bound != self._bound:
            raise RuntimeError(
                "max_norm was changed between backward() and step(): gradients clipped at one "
                "bound would get noise for another; set it after step() or zero_grad()"
            )
        return bound

    def _sample_norms(self, current: Pass) -> SampleNorms:
        """Return the norms of all layers, and by what gradients of samples' own are larger."""
        assert current.batch is not None
        unit = max(1, current.batch) if self.mechanism.loss_reduction == "mean" else 1
        found = [current.norms.get(layer) for layer in self.layers]
        device = next(norms.sq_norms.device for norms in found if norms is not None)
        rows = [
            torch.zeros(current.batch, dtype=torch.float64, device=device)
            if norms is None
            else norms.sq_norms.to(device)
            for norms in found
        ]
        return SampleNorms(self.names, rows, unit / self.mechanism.loss_scale)

    def noisy_gradient(self, check: Callable[[], None] = lambda: None) -> None:
        """Noise, once for the logical step, and the result as ``grad`` of every parameter.

        check: raises if this step must not be; on every rank nothing is released then.

        What listens to releases is told before there is noise: it may refuse, and what was released
        has been accounted for even if something fails afterwards.
        """
        try:
            sensitivity = self._announced(check)
            sigma, expected = self.mechanism.noise_multiplier, self.mechanism.expected_batch_size
            self.ranks.confirm(sigma, sensitivity, expected, self.taken)
            unit = self._sums.unit
            flat, views = self._sums.release()
            self.ranks.noisy_sum_(flat, sigma * sensitivity, self.key, 1.0 / expected, unit)
            self.clipping.end_step(self.key, expected, self.ranks)
            self.ranks.complete()
        except BaseException:
            self.discard()
            raise
        self.taken += 1
        self._sides = {}
        self.seen.microbatches = self.seen.samples = 0
        for parameter, view in views.items():
            parameter.grad = gradient_of(parameter, view)

    def _announced(self, check: Callable[[], None]) -> float:
        """Tell what listens; return the sensitivity. A refusal is this step's on all ranks."""
        try:
            check()
            for listener in self.before_release:
                listener()
            return self._check_bound()
        except Exception:
            self.ranks.withdraw()
            raise

    def discard(self) -> None:
        """Forget the microbatches that have not been released."""
        self._sums.discard()
        self.clipping.discard_step()
        self._sides = {}
        self.seen.microbatches = self.seen.samples = 0

    def plan_of(self, layer: Layer) -> Plan | None:
        """Return what ``layer`` costs at the shapes seen first; None before that, or if tied."""
        if layer not in self.shapes:
            return None
        return plan_of(layer, self.shapes[layer], self.preconditioner.sides(layer.name))

    def _sides_of(self, layer: Layer) -> Sides:
        """Return the layer's factors, the same in all microbatches of a step.

        Those of all layers are asked for at once: a layer that only a later microbatch reaches has
        factors of the same time as the others.
        """
        if not self._sides:
            self._sides = self._asked()
        return self._sides[layer]

    def _asked(self) -> dict[Layer, Sides]:
        """Return the present factors of all layers; raise ValueError for some that do not fit."""
        found = {layer: self.preconditioner.sides(layer.name) for layer in self.layers}
        for layer, sides in found.items():
            if sides is not self._checked.get(layer):
                check_sides(layer, sides)
                self._checked[layer] = sides
                self.remember_void(sides.not_private)
        return found


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products are not rounded to half precision.

    ``backward()`` may be called inside of the user's autocast, too.
    """
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def _power_of_two(bound: float) -> float:
    """Return the least power of two that is not below ``bound``, at least 1."""
    fraction, exponent = math.frexp(max(1.0, bound))
    return math.ldexp(1.0, exponent - (fraction == 0.5))


def _in_units(factors: Tensor, unit: float) -> Tensor:
    """Return factors for sums that are divided by ``unit``, none above 1.

    Kernels multiply errors by factors before activations come in. With a factor above 1, of an
    averaged loss say, an error that float32 just holds would become infinite, and infinite times an
    activation of 0 is not a number: one sample whose norm is 0 would be all that is left of a sum.
    """
    if unit == 1:
        return factors
    divided = factors / unit
    # What is below the normal numbers may have been rounded up.
    return divided.masked_fill_(divided < torch.finfo(divided.dtype).tiny, 0.0)


def _rounded_down(factors: Tensor, like: Tensor) -> Tensor:
    """Return factors in the dtype of ``like`` and beside it, rounded towards zero."""
    rounded = factors.to(like.device, like.dtype)
    if rounded.dtype == factors.dtype:
        return rounded
    return torch.nextafter(rounded, torch.zeros_like(rounded))
