"""How much noise there is on each element of a private gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dpkernels.ops.checks import check_finite

# A number, or what returns the one of the gradient that is there now.
NoiseStd = float | Callable[[], float]


class NoisyTraining(Protocol):
    """What ``PrivateTraining`` says of its noise: std = sigma * sensitivity / batch size."""

    @property
    def noise_multiplier(self) -> float:
        """Sigma of the next step."""
        ...

    @property
    def sensitivity(self) -> float:
        """How far one sample moves the sum of the next step."""
        ...

    @property
    def expected_batch_size(self) -> float:
        """What the noisy sum is divided by."""
        ...

    def before_release(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` in every step before noise is drawn; return what ends that."""
        ...


class NoiseOf:
    """The noise of a training's last gradient, whatever schedules do to it.

    It is read before the gradient is released: adaptive clipping moves the bound right afterwards.
    """

    def __init__(self, training: NoisyTraining) -> None:
        self._training = training
        self._std = _std_of(training)
        training.before_release(self._read)

    def __call__(self) -> float:
        """Return the standard deviation of the noise on every element."""
        return self._std

    def _read(self) -> None:
        self._std = _std_of(self._training)


def _std_of(training: NoisyTraining) -> float:
    return training.noise_multiplier * training.sensitivity / training.expected_batch_size


def current(op: str, noise_std: NoiseStd) -> float:
    """Return the present standard deviation; raise ValueError unless it is finite and >= 0."""
    value = float(noise_std() if callable(noise_std) else noise_std)
    check_finite(op, "noise_std", value, at_least=0.0)
    return value
