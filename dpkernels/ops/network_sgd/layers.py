"""What a sequential network is made of, as ``network_epoch_`` takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["pass", "convolution", "linear"]
Activation = Literal["none", "relu", "tanh"]
_KINDS: tuple[Kind, ...] = ("pass", "convolution", "linear")
_ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "tanh")


@dataclass(frozen=True)
class Window:
    """Size, stride and padding of a kernel or a pool, ``(rows, columns)`` each."""

    size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def over(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many windows an image of this size has; less than 1 if it is too small."""
        rows, columns = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip(size, self.size, self.stride, self.padding, strict=True)
        )
        return rows, columns


@dataclass(frozen=True)
class Layer:
    """outputs = mask * pool(activation(affine(inputs))).

    image: channels, height and width of what it takes; a flat layer has height and width 1.
    outputs: channels of what it makes. kernel: of a convolution.
    weight, bias: where they begin in the vector of all parameters; bias None without one.
    kept, levels: dropout keeps a number whose random level, in ``range(levels)``, is below
        ``kept``; levels 256 or 65536, or 0 without dropout.
    """

    kind: Kind
    image: tuple[int, int, int]
    outputs: int
    kernel: Window = Window()
    weight: int = 0
    bias: int | None = None
    activation: Activation = "none"
    pool: Window = Window()
    kept: int = 0
    levels: int = 0

    @property
    def made(self) -> tuple[int, int, int]:
        """Channels, height and width of what it makes."""
        return (self.outputs, *self.pool.over(self.kernel.over(self.image[1:])))

    @property
    def features(self) -> int:
        """How many numbers it makes of a record."""
        channels, height, width = self.made
        return channels * height * width

    @property
    def scale(self) -> float:
        """What dropout multiplies by what it keeps: the mean stays."""
        return self.levels / self.kept if self.kept else 0.0

    def dropping(self, rate: float) -> Layer:
        """Return the layer with dropout at a rate that is exact in 16 bits, and in 8 if it can."""
        levels = 256 if (256 * rate).is_integer() else 65536
        return replace(self, kept=round(levels * (1.0 - rate)), levels=levels)

    def numbers(self) -> list[int]:
        """Return the 22 numbers that say all this to the operator."""
        kernel, pool = (
            [*window.size, *window.stride, *window.padding] for window in (self.kernel, self.pool)
        )
        return [
            _KINDS.index(self.kind),
            *self.image,
            self.outputs,
            *kernel,
            self.weight,
            -1 if self.bias is None else self.bias,
            _ACTIVATIONS.index(self.activation),
            *pool,
            self.kept,
            self.levels,
        ]

    @staticmethod
    def of(numbers: list[int]) -> Layer:
        """Return the layer of ``numbers()``."""
        pairs = [(numbers[i], numbers[i + 1]) for i in (5, 7, 9, 14, 16, 18)]
        return Layer(
            kind=_KINDS[numbers[0]],
            image=(numbers[1], numbers[2], numbers[3]),
            outputs=numbers[4],
            kernel=Window(*pairs[:3]),
            weight=numbers[11],
            bias=None if numbers[12] < 0 else numbers[12],
            activation=_ACTIVATIONS[numbers[13]],
            pool=Window(*pairs[3:]),
            kept=numbers[20],
            levels=numbers[21],
        )


NUMBERS = 22
