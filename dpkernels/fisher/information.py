"""What is known of a model's Fisher information: diagonal or Kronecker-factored, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Kronecker:
    """F of one layer as G (x) A: F applied to a weight X ``[O, I]`` is G X A.

    weight, bias: the names of the parameters in the state dict; None for one that is not there.
        A bias is the last column of X, and of A.
    a: ``[I, I]``, or ``[I + 1, I + 1]`` with a bias: mean over records of the sum over positions of
        a a^T. g: ``[O, O]``: mean over records and positions of E_y[d d^T]. Both float32 or
        float64, symmetric and positive semidefinite. A convolution's weight is ``[O, C kh kw]``.
    """

    weight: str | None
    bias: str | None
    a: Tensor
    g: Tensor

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)


@dataclass(frozen=True)
class Diagonal:
    """The diagonal of F for one parameter; values: of the parameter's shape, >= 0."""

    parameter: str
    values: Tensor

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        return (self.parameter,)


@dataclass(frozen=True)
class Fisher:
    """F = mean over records of E_{y ~ model}[score score^T], as far as it is kept.

    layers: by the layer's name; blocks between layers are zero.
    without: trained parameters that have no F, and why.
    records: how many there were.
    """

    layers: Mapping[str, Kronecker | Diagonal]
    without: Mapping[str, str]
    records: int

    def covered(self) -> Iterator[str]:
        """Yield the names of the parameters that have an F."""
        for layer in self.layers.values():
            yield from layer.parameters
