"""What the engine asks of a preconditioner: two factors for each layer, or a scale."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dpkernels.ops.factor import Diagonal, Factor, Full, parts_of
from dpkernels.ops.kron import apply_factor

# Of a sketch: two that differ do so in one of them at least.
_BUCKETS = 8


@dataclass(frozen=True, eq=False)
class Scale:
    """A number for every element of a layer's gradient, which is multiplied by it.

    values: for each trained parameter of the layer, by its attribute (``weight``, ``bias``): a
        tensor of its shape, float32 (float64 for float64 parameters), beside it. Its elements are
        2^-64 to 2^64 in size: none is zero.
    """

    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class Sides:
    """The gradient G ``[O, I]`` of a layer becomes ``left G right``; None is the identity.

    left: of size O, on the outputs' side (U_G).
    right: of size I, on the inputs' side (U_A); or of size I + 1 for a layer with a bias, which is
        then the last column of the gradient.
    scale: in place of both, ``scale * G``, element by element. Raises ValueError beside a factor.
    not_private: why training with them has no guarantee, if they were made from private data: it
        goes along to whatever preconditioner they are put into.
    """

    left: Factor | None = None
    right: Factor | None = None
    scale: Scale | None = field(default=None, kw_only=True)
    not_private: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.scale is not None and (self.left is not None or self.right is not None):
            raise ValueError(
                "Sides: scale must be None beside left or right; give a layer either factors or a "
                "scale"
            )
        if self.not_private == "":
            raise ValueError("Sides: not_private must be a reason, or None for no private data")

    def describe(self) -> str:
        """Return what each side is, for a report."""
        if self.scale is not None:
            elements = sum(x.numel() for x in self.scale.values.values())
            return f"scale of {elements} elements"
        if self.left is None and self.right is None:
            return "none"
        return f"G {_describe(self.left)}, A {_describe(self.right)}"


def sketches_of(sides: Sides) -> dict[str, list[float]]:
    """Return a few numbers of each factor, or scale, that are far apart where these are.

    Those of a factor are of what it makes of one vector of signs, so that forms with the same
    product have the same numbers, whatever the signs of their eigenvectors. The length of a sketch
    is about that of what it is of; so is the distance of two. One product for each factor.
    """
    found = {}
    for side, factor in (("left", sides.left), ("right", sides.right)):
        if factor is not None:
            parts, _ = parts_of(factor)
            found[side] = _sketch(apply_factor(_signs(factor.size, 0, parts[0]), factor))
    scales = {} if sides.scale is None else sides.scale.values
    return found | {f"scale of {name}": _sketch(x.flatten()) for name, x in scales.items()}


def _sketch(x: Tensor) -> list[float]:
    """Return sums of the elements of x ``[n]``, each with a sign, in a few buckets."""
    signed = x.double() * _signs(len(x), 1, x)
    buckets = functional.pad(signed, (0, -len(x) % _BUCKETS)).view(-1, _BUCKETS).sum(0)
    numbers: list[float] = buckets.tolist()
    return numbers


def _signs(size: int, seed: int, like: Tensor) -> Tensor:
    """Return as many signs, the same for a seed, in the dtype of ``like`` and beside it."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (size,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    return signs.to(like.device, like.dtype)


def _describe(factor: Factor | None) -> str:
    if factor is None:
        return "identity"
    if isinstance(factor, Full):
        return f"full {factor.size}"
    if isinstance(factor, Diagonal):
        return f"diagonal {factor.size}"
    return f"rank {factor.values.shape[0]} of {factor.size}"


IDENTITY = Sides()


class Preconditioner(Protocol):
    """Says what goes onto the gradient of each layer.

    The engine asks when the first microbatch of a logical step arrives and keeps the answers until
    the step is over: nothing that the step's own samples do can change them.

    If it has a method ``fingerprint()``, several processes compare what it returns: a text that is
    the same where the same was estimated from.

    If it has a method ``after_step()``, that is called after every step of the optimizer: the
    parameters are then those that the step has released, and factors may follow them. If it has an
    attribute ``not_private`` that is not None, this says why there is no guarantee
    (``why_void``).
    """

    def sides(self, layer: str) -> Sides:
        """Return the factors of the layer of that name, as ``model.named_modules()`` has it."""
        ...


class FixedSides:
    """The same factors in every step, by the name of the layer; identity for the others.

    Passing factors declares that they depend on no private data, unless their ``not_private`` says
    that they do.
    """

    def __init__(self, sides: Mapping[str, Sides]) -> None:
        self._sides = dict(sides)

    @property
    def layers(self) -> frozenset[str]:
        """The names that have factors."""
        return frozenset(self._sides)

    def sides(self, layer: str) -> Sides:
        """Return the factors of ``layer``."""
        return self._sides.get(layer, IDENTITY)


def why_void(preconditioner: Preconditioner) -> str | None:
    """Return why a preconditioner leaves no guarantee; None if it says None, or has no say in it.

    One whose ``not_private`` is there but cannot be read counts as not private.
    """
    try:
        said: str | None = preconditioner.not_private  # type: ignore[attr-defined]
    except AttributeError as error:
        # The same error comes of no attribute, and of a property whose own code is broken. What
        # __getattr__ stands in for is not known.
        there = inspect.getattr_static(preconditioner, "not_private", error) is not error
        if not there and not hasattr(type(preconditioner), "__getattr__"):
            return None
        return f"not_private of {type(preconditioner).__name__} cannot be read: {error}"
    return said


def state_of(preconditioner: Preconditioner) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of a preconditioner; None if there is nothing to keep."""
    keeps = getattr(preconditioner, "state_dict", None)
    return None if keeps is None else keeps()


def load_state_of(preconditioner: Preconditioner, state: dict[str, Any] | None) -> None:
    """Put back what ``state_of`` returned; raise ValueError if it is another kind's."""
    loads = getattr(preconditioner, "load_state_dict", None)
    if (loads is None) is not (state is None):
        raise ValueError(
            f"load_state_dict: the state is of another preconditioner than {preconditioner!r}; "
            "make the training as it was saved"
        )
    if loads is not None:
        loads(state)
