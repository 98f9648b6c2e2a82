"""What is known of a model's Fisher information: diagonal or Kronecker-factored, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kronecker:
    """F of one layer as G (x) A: F applied to a weight X ``[O, I]`` is G X A.

    weight, bias: the names of the parameters in the state dict; None for one that is not there.
        A bias is the last column of X, and of A. A weight of more axes has O first.
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

    def matvec(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return G X A by parameter, in the shapes that ``x`` has them in.

        2 O I (O + I) flops. Raises KeyError for a parameter that x lacks, ValueError for a shape.
        """
        parts = [_of(x, name) for name in self.parameters]
        columns = [part.to(self.a).reshape(len(part), -1) for part in self._rows(parts)]
        whole = torch.cat(columns, 1)
        if whole.shape != (len(self.g), len(self.a)):
            raise ValueError(
                f"Kronecker: {' and '.join(self.parameters)} must make a matrix "
                f"{[len(self.g), len(self.a)]}, got {list(whole.shape)}"
            )
        split = (self.g @ whole @ self.a).split([part.shape[1] for part in columns], 1)
        found = zip(self.parameters, split, parts, strict=True)
        return {name: part.reshape(like.shape) for name, part, like in found}

    def _rows(self, parts: list[Tensor]) -> list[Tensor]:
        """Return parts with O first: the bias of attention's keys is ``[1, 1, O]``."""
        return [*parts[:-1], parts[-1].flatten()] if self.bias is not None else parts

    def dense(self) -> Tensor:
        """Return F ``[n, n]`` over all elements of the weight, then those of the bias."""
        both = torch.kron(self.g, self.a)
        if self.weight is None or self.bias is None:
            return both
        order = torch.arange(len(both), device=both.device).view(len(self.g), len(self.a))
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
        return both[order][:, order]

    def scaled(self, c: float) -> Kronecker:
        """Return c F."""
        return replace(self, g=self.g * c)

    def to(self, *args: Any, **kwargs: Any) -> Kronecker:
        """Return it on another device, or in another dtype, as ``Tensor.to`` takes them."""
        return replace(self, a=self.a.to(*args, **kwargs), g=self.g.to(*args, **kwargs))


@dataclass(frozen=True)
class Diagonal:
    """The diagonal of F for one parameter; values: of the parameter's shape, >= 0."""

    parameter: str
    values: Tensor

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it covers."""
        return (self.parameter,)

    def matvec(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values * x; raises KeyError for a missing parameter, ValueError for a shape."""
        part = _of(x, self.parameter)
        if part.shape != self.values.shape:
            raise ValueError(
                f"Diagonal: {self.parameter} must be {list(self.values.shape)}, got "
                f"{list(part.shape)}"
            )
        return {self.parameter: part.to(self.values) * self.values}

    def dense(self) -> Tensor:
        """Return F ``[n, n]`` over all elements."""
        return self.values.flatten().diag()

    def scaled(self, c: float) -> Diagonal:
        """Return c F."""
        return replace(self, values=self.values * c)

    def to(self, *args: Any, **kwargs: Any) -> Diagonal:
        """Return it on another device, or in another dtype, as ``Tensor.to`` takes them."""
        return replace(self, values=self.values.to(*args, **kwargs))


@dataclass(frozen=True)
class Fisher:
    """F = mean over records of E_{y ~ model}[score score^T], as far as it is kept.

    layers: by the layer's name, or by the parameter's where one has an F of its own; blocks between
        them are zero.
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

    def matvec(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return F x by parameter, of those that have an F; x: a state dict, or a change of one.

        In the dtype and on the device of F. Raises KeyError for a parameter that x lacks,
        ValueError for one of another shape.
        """
        return {name: part for one in self.layers.values() for name, part in one.matvec(x).items()}

    def quadratic(self, x: Mapping[str, Tensor]) -> float:
        """Return x^T F x; raises as ``matvec``."""
        products = self.matvec(x)
        return sum(float((_of(x, name).to(y).double() * y).sum()) for name, y in products.items())

    def dense(self, name: str) -> Tensor:
        """Return the block of one of ``layers`` ``[n, n]``, weight before bias: for small ones."""
        return self.layers[name].dense()

    def scaled(self, c: float) -> Fisher:
        """Return c F, of as many records. Raises ValueError unless c is finite and >= 0."""
        if not 0 <= c < float("inf"):
            raise ValueError(
                f"Fisher.scaled: c must be finite and >= 0, or F would not be positive, got {c}"
            )
        return replace(self, layers={name: one.scaled(c) for name, one in self.layers.items()})

    def to(self, *args: Any, **kwargs: Any) -> Fisher:
        """Return it on another device, or in another dtype, as ``Tensor.to`` takes them."""
        moved = {name: one.to(*args, **kwargs) for name, one in self.layers.items()}
        return replace(self, layers=moved)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.save`` keeps and ``torch.load(weights_only=True)`` reads back."""
        return {
            "layers": {name: dict(vars(one)) for name, one in self.layers.items()},
            "without": dict(self.without),
            "records": self.records,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Fisher:
        """Return what ``state_dict`` was called on. Raises ValueError for anything else."""
        if missing := {"layers", "without", "records"} - state.keys():
            raise ValueError(
                f"Fisher.from_state_dict: state lacks {', '.join(sorted(missing))}; pass what "
                "state_dict() returned"
            )
        layers: dict[str, Kronecker | Diagonal] = {}
        for name, fields in state["layers"].items():
            kind = Diagonal if "values" in fields else Kronecker
            if fields.keys() != kind.__dataclass_fields__.keys():
                raise ValueError(
                    f"Fisher.from_state_dict: {name} must have "
                    f"{', '.join(kind.__dataclass_fields__)}, got {', '.join(fields)}"
                )
            layers[name] = kind(**fields)
        return cls(layers, dict(state["without"]), int(state["records"]))


def _of(x: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in x:
        raise KeyError(f"x lacks {name}, which has an F; pass all parameters of Fisher.covered()")
    return x[name].detach()
