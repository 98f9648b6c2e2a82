"""Ways to bound what one sample can do to a step.

Each turns the squared norms of the layers, float64 ``[B]``, into factors for every layer and says
how far the sum of the clipped gradients can move when one sample is added or removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dpkernels.engine.distributed import ALONE, Ranks
from dpkernels.ops import clip
from dpkernels.ops.checks import check_finite
from dpkernels.ops.noise import NoiseKey


@dataclass(frozen=True)
class NoisyCount:
    """A second query on the same samples: how many had a norm within the bound, with noise.

    sensitivity: of the count, 1/2, because it is taken around one half.
    std: of its noise.
    """

    sensitivity: float
    std: float


@dataclass(frozen=True)
class SampleNorms:
    """Squared norms of one microbatch.

    layers: names. sq_norms: float64 ``[B]`` of each layer, of gradients that are ``1 / scale`` of
    each sample's own, as those of an averaged loss are.
    """

    layers: tuple[str, ...]
    sq_norms: list[Tensor]
    scale: float

    def own(self) -> Tensor:
        """Return those of each sample's own gradient, ``[L, B]``."""
        return torch.stack(self.sq_norms) * self.scale**2


class Clipping(Protocol):
    """What the engine asks of a way to clip."""

    @property
    def largest_factor(self) -> float:
        """No factor of a sample's own gradient is larger."""
        ...

    def factors(self, norms: SampleNorms, dtype: torch.dtype) -> Tensor:
        """Return factors ``[B]`` for all layers, or ``[L, B]``, rounded towards zero.

        They are for gradients as they are, so ``norms.scale`` times those of samples' own.
        """
        ...

    def sensitivity(self, layers: tuple[str, ...]) -> float:
        """L2 distance that the sum can move when one sample is added or removed."""
        ...

    def end_step(self, key: NoiseKey, expected_batch: float, ranks: Ranks) -> None:
        """Learn from the step that is over, through noise; called once for each logical step.

        ranks: the processes that took the step, which must all learn the same.
        """
        ...

    def discard_step(self) -> None:
        """Forget what was seen in a step that will not be taken."""
        ...

    def extra_query(self) -> NoisyCount | None:
        """Return what is asked of the samples beside the sum, for the accountant."""
        ...


class _Fixed:
    """A bound that does not change."""

    @property
    def largest_factor(self) -> float:
        """1: gradients are made shorter only."""
        return 1.0

    def end_step(self, key: NoiseKey, expected_batch: float, ranks: Ranks = ALONE) -> None:
        """Nothing is learnt."""

    def discard_step(self) -> None:
        """Nothing was kept."""

    def extra_query(self) -> None:
        """Nothing else is asked."""
        return None


@dataclass(frozen=True)
class Flat(_Fixed):
    """``min(1, C / norm)`` over all parameters together. Sensitivity C."""

    max_norm: float

    def __post_init__(self) -> None:
        check_finite("Flat", "max_norm", self.max_norm, above=0.0)

    def factors(self, norms: SampleNorms, dtype: torch.dtype) -> Tensor:
        """Return ``[B]``."""
        return clip.layer_factors(norms.sq_norms, self.max_norm, scale=norms.scale, dtype=dtype)

    def sensitivity(self, layers: tuple[str, ...]) -> float:
        """C."""
        return self.max_norm


@dataclass(frozen=True)
class Automatic(_Fixed):
    """``C / (norm + gamma)``: every sample counts alike (Bu et al. 2023). Sensitivity C.

    Factors are 2^32 at most: with a gamma of almost 0, norms below C / 2^32 count less.
    """

    max_norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        check_finite("Automatic", "max_norm", self.max_norm, above=0.0)
        check_finite("Automatic", "gamma", self.gamma, at_least=0.0)

    @property
    def largest_factor(self) -> float:
        """``C / gamma``, at most 2^32."""
        return self.max_norm / max(self.gamma, self.max_norm * 2.0**-32)

    def factors(self, norms: SampleNorms, dtype: torch.dtype) -> Tensor:
        """Return ``[B]``."""
        factors = clip.layer_factors(
            norms.sq_norms,
            self.max_norm,
            "automatic",
            scale=norms.scale,
            gamma=self.gamma,
            dtype=dtype,
        )
        return factors.clamp_(max=norms.scale * self.largest_factor)

    def sensitivity(self, layers: tuple[str, ...]) -> float:
        """C."""
        return self.max_norm


@dataclass(frozen=True)
class PerLayer(_Fixed):
    """``min(1, C_l / norm_l)`` in every layer on its own. Sensitivity: root of the sum of C_l^2.

    max_norm: a number C, which is split evenly, C_l = C / sqrt(L); or a number for each layer, by
        name.
    """

    max_norm: float | Mapping[str, float]

    def __post_init__(self) -> None:
        bounds = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        for bound in bounds:
            check_finite("PerLayer", "max_norm", bound, above=0.0)

    def bounds(self, layers: tuple[str, ...]) -> list[float]:
        """Return C_l of every layer; raise ValueError where names do not match."""
        if not isinstance(self.max_norm, Mapping):
            return [self.max_norm / math.sqrt(len(layers))] * len(layers)
        unknown, missing = set(self.max_norm) - set(layers), set(layers) - set(self.max_norm)
        if unknown or missing:
            raise ValueError(
                "PerLayer: max_norm must name every trained layer once; "
                f"without a bound: {sorted(missing)}; not trained: {sorted(unknown)}"
            )
        return [self.max_norm[name] for name in layers]

    def factors(self, norms: SampleNorms, dtype: torch.dtype) -> Tensor:
        """Return ``[L, B]``."""
        bounds = self.bounds(norms.layers)
        factors = clip.clip_factors(norms.own(), bounds, "per_layer", dtype=dtype)
        # Rounded towards zero: a norm must not grow by a rounding.
        return torch.nextafter(factors * norms.scale, torch.zeros_like(factors))

    def sensitivity(self, layers: tuple[str, ...]) -> float:
        """The root of the sum of the squares."""
        return clip.sensitivity(self.bounds(layers), "per_layer")


@dataclass
class Adaptive:
    """Flat clipping at a quantile of the norms, followed privately (Andrew et al. 2021).

    After each step ``C <- C exp(-rate (fraction - quantile))`` where fraction is the noisy part of
    the samples with a norm of at most C: (count + N(0, count_std^2)) / expected batch size.

    max_norm: C to begin with. quantile: where C should settle. count_std: noise of the count; it is
    a second query, and the accountant is told (``extra_query``). minimum, maximum: C stays within.
    """

    max_norm: float
    quantile: float = 0.5
    rate: float = 0.2
    count_std: float = 10.0
    minimum: float = 1e-6
    maximum: float = 1e6
    _count: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_norm", "rate", "count_std", "minimum", "maximum"):
            check_finite("Adaptive", name, getattr(self, name), above=0.0)
        if not 0 < self.quantile < 1:
            raise ValueError(f"Adaptive: quantile must be in (0, 1), got {self.quantile}")

    @property
    def largest_factor(self) -> float:
        """1."""
        return 1.0

    def factors(self, norms: SampleNorms, dtype: torch.dtype) -> Tensor:
        """Return ``[B]``, and count the samples that were within the bound."""
        total = norms.own().sum(0)
        # A sample counts +-1/2 (or not at all, if it is not finite), so adding or removing one
        # changes the count by 1/2.
        within = (total <= self.max_norm**2).double() - 0.5
        self._count += float(torch.where(total.isfinite() & (total >= 0), within, 0.0).sum())
        return clip.layer_factors(norms.sq_norms, self.max_norm, scale=norms.scale, dtype=dtype)

    def sensitivity(self, layers: tuple[str, ...]) -> float:
        """C of this step."""
        return self.max_norm

    def end_step(self, key: NoiseKey, expected_batch: float, ranks: Ranks = ALONE) -> None:
        """Move C towards the quantile by the noisy count of all ranks."""
        count = torch.tensor([self._count], dtype=torch.float64, device=ranks.device)
        self.discard_step()
        ranks.noisy_sum_([count], self.count_std, key)
        fraction = float(count) / expected_batch + 0.5
        moved = self.max_norm * math.exp(-self.rate * (fraction - self.quantile))
        self.max_norm = min(max(moved, self.minimum), self.maximum)

    def discard_step(self) -> None:
        """Set the count back."""
        self._count = 0.0

    def extra_query(self) -> NoisyCount:
        """Return sensitivity and noise of the count."""
        return NoisyCount(sensitivity=0.5, std=self.count_std)
