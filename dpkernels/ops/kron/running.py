"""A second moment that is averaged over batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkernels.ops.checks import check_finite


class SecondMoment:
    """The mean of second moments over batches, each weighted by its number of samples.

    ``update`` takes what ``second_moment`` and its kin return. With ``decay`` < 1 the weight of
    all earlier batches is multiplied by it at every update: the exponential moving average without
    the bias towards its first value.

    The mean is kept, not the sum: mean <- mean + (w / W)(batch - mean), with W the weight of all
    batches, this one included, so nothing grows with the number of batches. It is float32 (float64
    for float64), or wider if what it is given is.
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        check_finite("SecondMoment", "decay", decay, above=0.0)
        if decay > 1:
            raise ValueError(f"SecondMoment: decay must be at most 1 (no decay), got {decay}")
        self.decay = decay
        self._mean: Tensor | None = None
        self._weight: float = 0
        self._count = 0

    @property
    def count(self) -> int:
        """How many samples were seen."""
        return self._count

    @property
    def value(self) -> Tensor:
        """The mean; no copy. Raises ValueError before the first update."""
        if self._mean is None:
            raise ValueError("SecondMoment: there is no value before the first update")
        return self._mean

    def update(self, moment: Tensor, samples: int) -> None:
        """Add the second moment of a batch of ``samples`` samples.

        moment: float32 or float64, of the same shape, dtype and device in every call; it is
            copied. What it holds is not looked at when there are no samples: an empty batch
            changes nothing.
        samples: what the mean in ``moment`` is over: B T for ``expand``, B for ``reduce``.

        Two passes over the matrix. Raises ValueError, and changes nothing, for wrong input and for
        a moment that is not finite.
        """
        op = "SecondMoment.update"
        if samples < 0:
            raise ValueError(f"{op}: samples must be >= 0, got {samples}")
        if samples == 0:
            return
        self._check(op, moment)
        self._count += samples
        self._merge(moment, samples, self.decay * self._weight)

    def merge(self, other: SecondMoment) -> None:
        """Add all that ``other`` has seen, with its weight: of another worker, say."""
        if other._mean is None:
            return
        self._check("SecondMoment.merge", other._mean)
        self._count += other._count
        self._merge(other._mean, other._weight, self._weight)

    def _merge(self, moment: Tensor, weight: float, weight_before: float) -> None:
        # Counts stay integers, so they are exact, for as long as nothing decays.
        self._weight = weight_before + weight if weight_before else weight
        if self._mean is None:
            self._mean = moment.detach().clone(memory_format=torch.contiguous_format)
        else:
            self._mean.lerp_(moment.detach(), weight / self._weight)

    def _check(self, op: str, moment: Tensor) -> None:
        if moment.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{op}: moment must be float32 or float64, got {moment.dtype}")
        mean = self._mean
        if mean is not None and (
            moment.shape != mean.shape or moment.dtype != mean.dtype or moment.device != mean.device
        ):
            raise ValueError(
                f"{op}: moment must be {list(mean.shape)} {mean.dtype} on {mean.device} as before, "
                f"got {list(moment.shape)} {moment.dtype} on {moment.device}"
            )
        if not bool(moment.isfinite().all()):
            raise ValueError(f"{op}: moment holds NaN or infinity; look at where it came from")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the tensor is not copied."""
        return {
            "mean": self._mean,
            "weight": self._weight,
            "count": self._count,
            "decay": self.decay,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; the tensor is copied."""
        missing = {"mean", "weight", "count", "decay"} - state.keys()
        if missing:
            raise ValueError(
                f"SecondMoment.load_state_dict: state lacks {', '.join(sorted(missing))}; pass "
                "what state_dict() returned"
            )
        mean = state["mean"]
        self._mean = None if mean is None else mean.detach().clone()
        self._weight, self._count = state["weight"], state["count"]
        self.decay = state["decay"]
