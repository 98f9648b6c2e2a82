"""What the engine asks of a layer's rule, and what norms of any layer look like to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dpkernels.engine.sides import Sides
from dpkernels.ops import clip
from dpkernels.ops.ghost import ConvNorms, EmbeddingNorms, LinearNorms, ScaleShiftNorms
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan

if TYPE_CHECKING:
    from dpkernels.engine.capture import Captured, Site


class Unsupported(ValueError):
    """A model that cannot be trained privately as it is; the message says what to change."""


class Norms(Protocol):
    """Norms of one layer's per-sample gradients, and the way to their weighted sum."""

    @property
    def sq_norms(self) -> Tensor:
        """Float64 ``[B]``. Private: depends on each sample."""
        ...

    @property
    def formula(self) -> str:
        """How they were computed."""
        ...

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """``sums[k] (+)= sum_b factors[b] * gradient_b`` of the layer's k-th parameter."""
        ...


@dataclass(frozen=True)
class WeightAndBias:
    """Norms of a layer whose parameters are a weight and perhaps a bias, by ``ops.ghost``."""

    norms: LinearNorms | ConvNorms | EmbeddingNorms | ScaleShiftNorms

    @property
    def sq_norms(self) -> Tensor:
        """Float64 ``[B]``."""
        return self.norms.sq_norms

    @property
    def formula(self) -> str:
        """The ghost formula."""
        return self.norms.formula

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the weighted sum to the buffers of weight and bias."""
        weight, *bias = sums
        self.norms.add_to(weight, bias[0] if bias else None, factors, accumulate)


@dataclass(frozen=True)
class Rows:
    """Per-sample gradients that are stored: ``[B, n]`` for each parameter."""

    rows: tuple[Tensor, ...]
    sq_norms: Tensor
    formula: str = "stored"

    @classmethod
    def of(cls, gradients: Sequence[Tensor]) -> Rows:
        """Return the norms of gradients ``[B, *shape]``, float32 or wider."""
        rows = tuple(g.to(sum_dtype(g.dtype)).flatten(1) for g in gradients)
        return cls(rows, clip.row_sq_norms(list(rows)))

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the weighted sum to the buffers."""
        out = [total.view(-1) for total in sums]
        clip.add_weighted_rows(out, list(self.rows), factors, accumulate)


def added_up(uses: Iterable[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return the sum over uses of per-sample gradients ``[B, *shape]``, float32 or wider."""
    first, *rest = uses
    sums = [g.to(sum_dtype(g.dtype), copy=True) for g in first]
    for use in rest:
        for total, gradient in zip(sums, use, strict=True):
            total += gradient
    return tuple(sums)


@dataclass(frozen=True)
class OrthogonalParts:
    """Norms of gradients that are put together from parts; part k has ``sizes[k]`` pieces."""

    parts: tuple[Norms, ...]
    sizes: tuple[int, ...]

    @property
    def sq_norms(self) -> Tensor:
        """Float64 ``[B]``: different parts are orthogonal."""
        return torch.stack([part.sq_norms for part in self.parts]).sum(0)

    @property
    def formula(self) -> str:
        """The formulas, each once."""
        return ", ".join(dict.fromkeys(part.formula for part in self.parts))


class Parts(OrthogonalParts):
    """A layer whose parameters have norms of their own: part k is about ``sizes[k]`` of them."""

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the weighted sums of all parts to their buffers."""
        first = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            part.add_to(sums[first : first + size], factors, accumulate)
            first += size


class Layer(ABC):
    """One module with trained parameters of its own, and the rule that serves it.

    name: as in ``model.named_modules()``.
    parameters: the trained ones by attribute name, in the order that ``Norms.add_to`` takes them.
    shared: whether a parameter of it belongs to another layer, too.
    lifted: whether a module around it delivers in its place.
    windows: whether its input is ``[B * W, ...]``: W rows of each sample next to each other.
    sublayers: for a module that is several layers in one (attention, recurrent networks): those
        layers, which have the parameters and take their own deliveries, through
        ``site.of(sublayer)``. The layer itself then only computes the forward pass.
    """

    rule: str
    shared = False
    lifted = False
    windows = False
    sublayers: tuple[Layer, ...] = ()

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.name = name
        # Any: what a rule reads off its module depends on the kind, which the rule knows.
        self.module: Any = module
        # Weight and bias in this order, whatever happened to the module: sums go by it.
        known = {key: parameters[key] for key in ("weight", "bias") if key in parameters}
        self.parameters = known | dict(parameters)

    def by_sample(self, tensors: Captured, batch: int | None) -> Captured:
        """Return what was captured with samples first: windows become a sample's positions."""
        if not self.windows or not batch or any(x.shape[0] % batch for x in tensors):
            return tensors
        return tuple(x.unflatten(0, (batch, -1)) for x in tensors)

    def describe(self) -> str:
        """Return name and type for a message."""
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"

    def trains(self, attribute: str) -> bool:
        """Return whether that parameter of the module is trained."""
        return attribute in self.parameters

    @abstractmethod
    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what ``plain``, the module's own forward pass, does, and deliver to ``site``."""

    @abstractmethod
    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms of the preconditioned per-sample gradients of one use."""

    @abstractmethod
    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return what the norms and the sum of one use cost, and how they are computed."""

    def errors(self, captured: Captured) -> Sequence[Tensor]:
        """Return those of the captured tensors that come from the backward pass, ``[B, ...]``."""
        return captured[1::2]

    def note_input(self, shape: Sequence[int], shared: bool, batch: int) -> None:  # noqa: B027
        """Learn from a call what its first input is; called before the layer is used.

        shape: of the input. shared: whether it provably does not come from the samples. batch: how
        many of them there are.
        """

    def settle_layout(self) -> bool:
        """Take another reading of the inputs, if there is one, because errors refute this one."""
        return False

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return per-sample gradients of all trained parameters, as they are.

        Each has as many elements as samples and parameter together, samples first, float32 or
        wider. The caller sees to it that they fit in memory.
        """
        raise NotImplementedError

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return several uses about the same samples as one, or raise where that cannot be."""
        raise RuntimeError(
            f"{self.describe()} was called {len(uses)} times in one forward pass, which its rule "
            f"({self.rule}) does not cover; use one copy of the module for each call"
        )

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError for factors that this layer cannot take."""
        if sides.left is not None or sides.right is not None:
            raise ValueError(
                f"{self.describe()}: its rule ({self.rule}) takes no preconditioner; leave it out"
            )


def bias_plan(errors: Tensor, bias: Tensor) -> Plan:
    """Return what a bias costs that is trained without its weight."""
    kept = errors.shape[0] * bias.numel() * sum_dtype(errors.dtype).itemsize
    return Plan(
        "stored",
        errors.numel() + 4 * errors.shape[0] * bias.numel(),
        errors.numel() * errors.element_size() + 2 * kept + bias.nbytes,
        kept,
        "the bias alone is trained: its gradients are sums of the errors",
    )
