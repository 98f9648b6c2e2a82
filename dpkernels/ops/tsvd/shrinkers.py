"""Shrinkers of singular values: soft, hard, and the optimal one for noise of a known level.

All are members of one family, which is all that the kernels know. A singular value s becomes

    s (1 - subtracted / s) sqrt((1 - (upper / s)^2) (1 - (lower / s)^2))  if s > cut,  else 0:

============  ================  ============  ===================  ====================
shrinker      cut               subtracted    upper                lower
============  ================  ============  ===================  ====================
``Soft``      tau               tau           0                    0
``Hard``      tau               0             0                    0
``Optimal``   upper, or above   0             nu (sqrt d+sqrt h)   nu |sqrt d - sqrt h|
============  ================  ============  ===================  ====================

The last is Gavish and Donoho's shrinker for Frobenius loss (Optimal Shrinkage of Singular Values,
2017, (7)): with ``b = min(d, h) / max(d, h)`` and ``y = s / (nu sqrt(max(d, h)))`` it is
``nu sqrt(max(d, h)) sqrt((y^2 - b - 1)^2 - 4 b) / y``, and ``(y^2 - b - 1)^2 - 4 b`` is ``(y^2 - (1
+ sqrt b)^2) (y^2 - (1 - sqrt b)^2)``. The product has no cancellation near the edge.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dpkernels.ops.checks import check_finite
from dpkernels.ops.tsvd.reference import shrink_factors

# One number for all slices, or one for each frequency 0 ... K // 2.
PerFrequency: TypeAlias = float | Sequence[float] | Tensor


class Curve(NamedTuple):
    """How the singular values of one slice shrink: see the module."""

    cut: float
    subtracted: float = 0.0
    upper: float = 0.0
    lower: float = 0.0


class Shrinker(ABC):
    """A function of singular values, for a ``d x h`` slice of every frequency."""

    @abstractmethod
    def curves(self, d: int, h: int, slices: int) -> list[Curve]:
        """Return one curve for each of ``slices`` frequencies of a tensor ``[d, h, K]``.

        Raises ValueError if the shrinker has numbers for another count of frequencies.
        """

    def __call__(self, values: Tensor, d: int, h: int) -> Tensor:
        """Return the singular values after shrinking, in their dtype.

        values: >= 0, ``[n]`` of one matrix ``d x h``, or ``[K // 2 + 1, n]`` of all slices.
        """
        rows = values if values.dim() == 2 else values.unsqueeze(0)
        curves = torch.tensor(self.curves(d, h, rows.shape[0]), dtype=torch.float64)
        shrunk = rows.double() * shrink_factors(rows, curves.to(values.device))
        return shrunk.to(values.dtype).view_as(values)


@dataclass(frozen=True)
class Soft(Shrinker):
    """``max(0, s - tau)``: FedCEO's proximal step (Theorem 3.1). tau: >= 0; 0 changes nothing."""

    tau: PerFrequency

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", numbers("Soft", "tau", self.tau))

    def curves(self, d: int, h: int, slices: int) -> list[Curve]:
        """Return the curves of all frequencies."""
        return [Curve(tau, subtracted=tau) for tau in _each("Soft", "tau", self.tau, slices)]


@dataclass(frozen=True)
class Hard(Shrinker):
    """``s if s > tau else 0``: a truncated SVD. tau: >= 0; 0 changes nothing."""

    tau: PerFrequency

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", numbers("Hard", "tau", self.tau))

    def curves(self, d: int, h: int, slices: int) -> list[Curve]:
        """Return the curves of all frequencies."""
        return [Curve(tau) for tau in _each("Hard", "tau", self.tau, slices)]


@dataclass(frozen=True)
class Optimal(Shrinker):
    """Least Frobenius loss, as d and h grow, for low rank plus iid noise (Gavish and Donoho).

    noise: standard deviation nu of an element of the *slice*, ``sqrt(E |.|^2)``; that of uploads
        with their own noise comes from ``slice_noise``. 0 changes nothing.
    margin: >= 0; values up to ``nu (sqrt d + sqrt h + margin)`` become 0.

    The largest singular value of noise alone is about the edge ``nu (sqrt d + sqrt h)``, and passes
    it by chance: in one real slice of 6 in the limit of large d and h, in one complex slice of 30
    (the Tracy-Widom laws of order 1 and 2 above 0), less often in small ones. With a margin t it
    does in a part of at most ``exp(-t^2 / 2)`` of real slices (Davidson and Szarek, 2001, II.13).
    """

    noise: PerFrequency
    margin: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", numbers("Optimal", "noise", self.noise))
        check_finite("Optimal", "margin", self.margin, at_least=0.0)

    def curves(self, d: int, h: int, slices: int) -> list[Curve]:
        """Return the curves of all frequencies."""
        larger, smaller = math.sqrt(max(d, h)), math.sqrt(min(d, h))
        edges = (larger + smaller + self.margin, 0.0, larger + smaller, larger - smaller)
        each = _each("Optimal", "noise", self.noise, slices)
        return [Curve(*(noise * edge for edge in edges)) for noise in each]


def slice_noise(noise: float, clients: int) -> float:
    """Return the noise of every Fourier slice, ``sqrt(clients) noise``, for ``Optimal``.

    noise: standard deviation of every element of every client's upload, independent.
    clients: K.

    An element of slice k is ``sum_j x_j w^(jk)``, ``w = exp(-2 pi i / K)``, with ``E |.|^2 = K
    noise^2`` at any k. Its real and imaginary parts have the variances ``noise^2 sum_j cos^2`` and
    ``noise^2 sum_j sin^2`` and the covariance ``-noise^2 sum_j cos sin``. At frequencies 0 and
    K / 2 the sine is 0, and the element real; at the others the sums over full turns are K / 2,
    K / 2 and 0, and the element is circular. Slices of frequencies 0 ... K // 2 are independent.
    The edge of the singular values, ``sqrt(E |.|^2) (sqrt d + sqrt h)``, is the same for real and
    for circular elements (Bai and Yin's law holds for both), so one number serves all frequencies.
    """
    check_finite("slice_noise", "noise", noise, at_least=0.0)
    if clients < 1:
        raise ValueError(f"slice_noise: clients must be >= 1, got {clients}")
    return math.sqrt(clients) * noise


def numbers(op: str, name: str, given: PerFrequency) -> float | tuple[float, ...]:
    """Return one number, or one for each frequency, as floats; raise unless finite and >= 0."""
    if isinstance(given, Tensor):
        if given.dim() > 1:
            raise ValueError(
                f"{op}: {name} must be a number or [K // 2 + 1], got shape {list(given.shape)}"
            )
        given = given.tolist()
    found = tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),)
    for number in found:
        check_finite(op, name, number, at_least=0.0)
    return found if isinstance(given, Sequence) else found[0]


def _each(op: str, name: str, given: PerFrequency, slices: int) -> Sequence[float]:
    if not isinstance(given, Sequence):
        return [float(given)] * slices
    if len(given) != slices:
        raise ValueError(
            f"{op}: {name} has {len(given)} numbers for {slices} frequencies; pass one for all, or "
            "one for each of 0 ... K // 2"
        )
    return given
