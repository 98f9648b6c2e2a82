"""The noise that clients add: each from its own key, each release once, and nothing without it."""

from __future__ import annotations

from torch import Tensor

from dpkernels.federated.contract import Stage
from dpkernels.federated.received import all_finite
from dpkernels.ops.noise import add_row_noise_


class ClientNoise:
    """What an algorithm's ``client`` gets as ``noisy``, for the clients of one round.

    std: of each client's noise; 0 where it is added to the sum. keys, counters: int64 ``[k]``.
    """

    def __init__(self, stage: Stage, std: float, keys: Tensor, counters: Tensor) -> None:
        self._stage, self._std, self._keys, self._counters = stage, std, keys, counters
        self._used = 0
        self._released: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Add the noise of the next release to ``values``, ``[k, *shape]``, in place."""
        wanted = (len(self._keys), *self._stage.query.shape)
        if tuple(values.shape) != wanted:
            raise ValueError(
                f"noisy: a release of stage {self._stage.name!r} must be {list(wanted)}, got "
                f"{list(values.shape)}"
            )
        if self._used == self._stage.releases:
            raise RuntimeError(
                f"noisy: stage {self._stage.name!r} has {self._stage.releases} releases a round, "
                "and this is one more: it would not be accounted"
            )
        # A client that cannot compute uploads noise alone.
        if not all_finite(values):
            values[~values.flatten(1).isfinite().all(1)] = 0.0
        if self._std:
            add_row_noise_(values, self._std, self._keys, self._counters + self._used)
        self._used += 1
        self._released = values
        return values

    def check_used(self, name: str, upload: Tensor) -> None:
        """Raise RuntimeError unless every release got its noise, and ``upload`` is what it says."""
        if self._used != self._stage.releases:
            raise RuntimeError(
                f"{name}: stage {self._stage.name!r} must call noisy {self._stage.releases} times "
                f"a round, got {self._used}; nothing was released"
            )
        if self._stage.uploaded and upload is not self._released:
            raise RuntimeError(
                f"{name}: stage {self._stage.name!r} must upload what noisy returned, got another "
                "tensor; say uploaded=False if it is made of it; nothing was released"
            )
