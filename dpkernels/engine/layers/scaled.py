"""Gradients of which every element has a scale of its own, before the clip.

Such a scale does not factor into two sides, so that it goes onto gradients, not onto activations
and errors. A form for each kind of layer keeps that affordable:

``OuterProducts``  linear, one position: ``|s * d a^T|^2 = (d^2)^T (s^2) (a^2)``, and the sum is
                   ``s * sum_b c_b d_b a_b^T``: two products, no per-sample gradient.
``TokenRows``      embeddings: the rows of the tokens that a sample has.
``Explicit``       all others: per-sample gradients, kept if they are small, else formed twice, for
                   the norms and for the sum, some samples at a time.

Squared norms are float64. ``TokenRows`` and ``Explicit`` measure the very numbers that they sum.
``OuterProducts`` adds up float64 terms that are not negative, so nothing cancels: a norm of I
inputs is low by I 2^-53 of itself at most, and the sum's elements round three times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpkernels.engine.capture import Captured
from dpkernels.engine.layers.embedding import EmbeddingLayer
from dpkernels.engine.layers.layer import Layer, Norms, Rows, WeightAndBias
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.layers.tied import TiedGroup
from dpkernels.engine.sides import IDENTITY, Scale, Sides
from dpkernels.ops import clip
from dpkernels.ops.factor import parts_of
from dpkernels.ops.ghost import LinearNorms
from dpkernels.ops.ghost.layer import describe, drop_samples, sum_dtype
from dpkernels.ops.ghost.plan import Plan

# What per-sample gradients take at a time that are formed twice, and the float64 squares of a
# scale. Gradients are kept up to this size, or up to that of what the layer's capture holds anyway.
_BLOCK_BYTES = 32 << 20
# Of a scale's elements. ``OuterProducts`` adds up c d a before the scale, at most B C / s where one
# sample is clipped to C: B C up to 2^63 stays within float32, and nothing becomes inf * 0, as no c
# is above 1 (``Step``). Above, c d would lose digits below float32's normal numbers. A root of a
# float32 is within, too.
_LEAST, _LARGEST = 2.0**-64, 2.0**64


def norms_of(layer: Layer, captured: Captured, sides: Sides) -> Norms:
    """Return norms of one use under factors or a scale, which ``check_sides`` has passed."""
    if sides.scale is None:
        return layer.norms(captured, sides)
    return gradients_of(layer, captured).scaled(_values(layer, sides.scale))


def plan_of(layer: Layer, captured: Captured, sides: Sides) -> Plan:
    """Return what norms and sum of one use cost, and how they are computed."""
    if sides.scale is None:
        return layer.plan(captured, sides)
    return gradients_of(layer, captured).plan()


def check_sides(layer: Layer, sides: Sides) -> None:
    """Raise ValueError for factors, or a scale, that the layer cannot take."""
    if sides.scale is None:
        layer.check_sides(sides)
        _check_factors(layer, sides)
        return
    if isinstance(layer, TiedGroup):
        raise ValueError(f"{layer.describe()}: layers that share a weight take no scale")
    given = sides.scale.values
    if given.keys() != layer.parameters.keys():
        raise ValueError(
            f"{layer.describe()}: scale must be for {sorted(layer.parameters)}, the trained "
            f"parameters, got {sorted(given)}"
        )
    for name, parameter in layer.parameters.items():
        scale, dtype = given[name], sum_dtype(parameter.dtype)
        if (scale.shape, scale.dtype, scale.device) != (parameter.shape, dtype, parameter.device):
            wanted = describe(torch.empty(parameter.shape, dtype=dtype, device="meta"))
            raise ValueError(
                f"{layer.describe()}: scale of {name} must be "
                f"{wanted.removesuffix('meta')}{parameter.device}, got {describe(scale)}"
            )
        size = scale.abs()
        if outside := int((~((size >= _LEAST) & (size <= _LARGEST))).sum()):
            raise ValueError(
                f"{layer.describe()}: scale of {name} must be finite and of a size from 2^-64 to "
                f"2^64, got {outside} elements that are not; damp it, and freeze parameters that "
                "are not to be trained"
            )


def _check_factors(layer: Layer, sides: Sides) -> None:
    """Raise ValueError for factors of another dtype than the layer's sums, or elsewhere."""
    like = next(iter(layer.parameters.values()))
    wanted = sum_dtype(like.dtype), like.device
    for name, factor in (("left", sides.left), ("right", sides.right)):
        for part in parts_of(factor)[0]:
            if (part.dtype, part.device) != wanted:
                raise ValueError(
                    f"{layer.describe()}: {name} must be {wanted[0]} on {wanted[1]}, got "
                    f"{part.dtype} on {part.device}; move it with .to()"
                )


class Gradients(Protocol):
    """Per-sample gradients g_b of a layer, in the form that is the cheapest for it."""

    def scaled(self, scales: Sequence[Tensor]) -> Norms:
        """Return norms of ``scale * g_b``; scales: of every trained parameter."""
        ...

    def square_sums(self) -> list[Tensor]:
        """Return ``sum_b g_b^2``, element by element, of every trained parameter in its shape."""
        ...

    def plan(self) -> Plan:
        """Return what ``scaled`` and its sum cost."""
        ...


def gradients_of(layer: Layer, captured: Captured) -> Gradients:
    """Return the gradients of one use."""
    if isinstance(layer, EmbeddingLayer):
        tokens, errors = layer.merged([captured])
        return TokenRows.of(tokens.long(), errors, layer)
    if isinstance(layer, LinearLayer) and layer.trains("weight") and len(captured) == 2:
        a, d = captured
        if a.shape[1:-1].numel() == 1:
            a, d = (x.reshape(x.shape[0], x.shape[-1]) for x in captured)
            return OuterProducts(a, d, layer.trains("bias"))
    return Explicit(layer, captured)


@dataclass(frozen=True)
class OuterProducts:
    """``d_b a_b^T`` and, with a bias, ``d_b``; activations ``[B, I]``, errors ``[B, O]``."""

    activations: Tensor
    errors: Tensor
    bias: bool

    def scaled(self, scales: Sequence[Tensor]) -> Norms:
        """Return norms of 2 B I O float64 flops; the sum takes as many in its own dtype."""
        a, d = self.activations, self.errors
        outputs, inputs = scales[0].shape
        squares, total = a.double().square(), a.new_zeros(a.shape[0], dtype=torch.float64)
        rows = max(1, _BLOCK_BYTES // (8 * max(1, inputs)))
        for first in range(0, outputs, rows):
            at = slice(first, first + rows)
            gains = squares @ scales[0][at].double().square().mT
            if self.bias:
                gains += scales[1][at].double().square()
            total += (d[:, at].double().square() * gains).sum(1)
        saved = a.unsqueeze(1), d.unsqueeze(1)
        sums = LinearNorms(total, "rank_one", inputs, outputs, self.bias, saved)
        return ScaledSum(WeightAndBias(sums), tuple(scales))

    def square_sums(self) -> list[Tensor]:
        """Return ``sum_b d_b^2 (a_b^2)^T`` and ``sum_b d_b^2``."""
        a, d = (x.to(sum_dtype(x.dtype)).square() for x in (self.activations, self.errors))
        return [d.mT @ a, d.sum(0)] if self.bias else [d.mT @ a]

    def plan(self) -> Plan:
        """Return two products, one of squares."""
        (batch, inputs), outputs = self.activations.shape, self.errors.shape[1]
        elements, size = inputs * outputs, self.activations.element_size()
        return Plan(
            "rank_one",
            4 * batch * elements + 3 * elements,
            2 * batch * (inputs + outputs) * size + 5 * elements * max(4, size),
            0,
            "one position: squares of the scale meet squares of activations and errors",
        )


@dataclass(frozen=True)
class ScaledSum:
    """Norms of scaled gradients whose sum is the scale times the sum of the plain ones."""

    plain: WeightAndBias
    scales: tuple[Tensor, ...]

    @property
    def sq_norms(self) -> Tensor:
        """Float64 ``[B]``, of the scaled gradients."""
        return self.plain.sq_norms

    @property
    def formula(self) -> str:
        """The plain sum's."""
        return self.plain.formula

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the scaled sum; what the buffers hold is scaled already."""
        own = [torch.empty_like(total) for total in sums] if accumulate else sums
        self.plain.add_to(own, factors, False)
        for total, part, scale in zip(sums, own, self.scales, strict=True):
            if accumulate:
                total.addcmul_(part, scale)
            else:
                total.mul_(scale)


@dataclass(frozen=True)
class TokenRows:
    """Rows of a table ``[V, D]``: ``rows[b, k]`` belongs to ``tokens[b, k]``, no token twice.

    A sample of T positions has T rows ``[B, T, D]``, those past its distinct tokens zero.
    """

    rows: Tensor
    tokens: Tensor
    vocabulary: int

    @classmethod
    def of(cls, tokens: Tensor, errors: Tensor, layer: EmbeddingLayer) -> TokenRows:
        """Return tokens' errors added up within each sample; tokens ``[B, T]``, ``[B, T, D]``."""
        module, width = layer.module, errors.shape[2]
        errors = errors.to(sum_dtype(errors.dtype))
        if module.padding_idx is not None:
            errors = torch.where((tokens != module.padding_idx).unsqueeze(2), errors, 0)
        ordered, order = tokens.sort(dim=1, stable=True)
        new = torch.ones_like(ordered, dtype=torch.bool)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        number = new.cumsum(1) - 1
        wide = errors.gather(1, order.unsqueeze(2).expand(-1, -1, width))
        places = number.unsqueeze(2).expand(-1, -1, width)
        rows = torch.zeros_like(wide).scatter_add_(1, places, wide)
        distinct = torch.zeros_like(ordered).scatter_(1, number, ordered)
        return cls(rows, distinct, module.num_embeddings)

    def scaled(self, scales: Sequence[Tensor]) -> Norms:
        """Return norms of the rows times those of the scale that their tokens have."""
        rows = self.rows * scales[0][self.tokens]
        return TableNorms(rows, self.tokens, clip.row_sq_norms(rows.flatten(1)))

    def square_sums(self) -> list[Tensor]:
        """Return the squared rows, added up at their tokens."""
        total = self.rows.new_zeros(self.vocabulary, self.rows.shape[2])
        return [total.index_add_(0, self.tokens.flatten(), self.rows.square().flatten(0, 1))]

    def plan(self) -> Plan:
        """Return what forming, scaling and adding up the rows costs."""
        kept = self.rows.numel() * self.rows.element_size()
        table = self.vocabulary * self.rows.shape[2] * self.rows.element_size()
        reason = "errors of one token are added up within a sample, and scaled"
        return Plan("stored", 6 * self.rows.numel(), 8 * kept + table, kept, reason)


@dataclass(frozen=True)
class TableNorms:
    """Norms of rows ``[B, T, D]`` that belong to tokens ``[B, T]`` of a table."""

    rows: Tensor
    tokens: Tensor
    sq_norms: Tensor
    formula: str = "stored"

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the weighted rows at their tokens."""
        (total,) = sums
        if not accumulate:
            total.zero_()
        (rows,) = drop_samples(factors, self.rows)
        weighted = rows * factors.view(-1, 1, 1)
        total.index_add_(0, self.tokens.flatten(), weighted.flatten(0, 1))


@dataclass(frozen=True)
class Explicit:
    """Per-sample gradients as the layer's rule forms them from what was captured."""

    layer: Layer
    captured: Captured

    def scaled(self, scales: Sequence[Tensor]) -> Norms:
        """Return norms of gradients that are kept if small, and formed again for the sum if not."""
        blocks = self._blocks()

        def rows(at: slice) -> list[Tensor]:
            pairs = zip(self._rows(at), scales, strict=True)
            return [g * scale.reshape(1, -1) for g, scale in pairs]

        if len(blocks) == 1:
            own = rows(blocks[0])
            return Rows(tuple(own), clip.row_sq_norms(own))
        sq_norms = torch.cat([clip.row_sq_norms(rows(at)) for at in blocks])
        return FormedAgain(rows, tuple(blocks), sq_norms)

    def square_sums(self) -> list[Tensor]:
        """Return squares of gradients, some samples' at a time."""
        totals: list[Tensor] = []
        for at in self._blocks():
            squares = [g.square().sum(0) for g in self._rows(at)]
            totals = [x + y for x, y in zip(totals, squares, strict=True)] if totals else squares
        parameters = self.layer.parameters.values()
        return [x.view(p.shape) for x, p in zip(totals, parameters, strict=True)]

    def plan(self) -> Plan:
        """Return what forming the gradients costs, once or twice, and reading them."""
        plain = self.layer.plan(self.captured, IDENTITY)
        forming = plain.alternatives.get("materialised", plain.flops)
        size = sum_dtype(self.captured[0].dtype).itemsize
        kept = self.captured[0].shape[0] * self._elements() * size
        once = len(self._blocks()) == 1
        reason = "kept" if once else "too large to keep, so formed again for the sum"
        return Plan(
            "stored" if once else "formed twice",
            forming * (1 if once else 2) + 5 * kept // size,
            plain.bytes + 4 * kept,
            kept if once else 0,
            f"a scale for each element goes onto gradients of single samples, {reason}",
        )

    def _rows(self, at: slice) -> list[Tensor]:
        """Return gradients of some samples, ``[b, n]`` for each parameter."""
        gradients = self.layer.gradients(tuple(x[at] for x in self.captured))
        sizes = [p.numel() for p in self.layer.parameters.values()]
        return [g.reshape(g.shape[0], n) for g, n in zip(gradients, sizes, strict=True)]

    def _blocks(self) -> list[slice]:
        """Return all samples in one slice if their gradients may be kept, else some in each."""
        batch = self.captured[0].shape[0]
        sample = self._elements() * sum_dtype(self.captured[0].dtype).itemsize
        held = sum(x.numel() * x.element_size() for x in self.captured)
        if batch * sample <= max(held, _BLOCK_BYTES):
            return [slice(0, batch)]
        samples = max(1, _BLOCK_BYTES // sample)
        return [slice(first, first + samples) for first in range(0, batch, samples)]

    def _elements(self) -> int:
        return sum(p.numel() for p in self.layer.parameters.values())


@dataclass(frozen=True)
class FormedAgain:
    """Norms of gradients that are too large to keep.

    rows: returns the gradients of some samples, ``[b, n]`` for each parameter.
    """

    rows: Callable[[slice], list[Tensor]]
    blocks: tuple[slice, ...]
    sq_norms: Tensor
    formula: str = "formed twice"

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the weighted sum of gradients that are no longer than those that were measured.

        A GPU may add up in another order the second time; where terms cancel that shows, and where
        they overflow only then, nothing is left of the sample.
        """
        out = [total.view(-1) for total in sums]
        for at in self.blocks:
            rows, before = self.rows(at), self.sq_norms[at]
            now = clip.row_sq_norms(rows)
            shrink = torch.where(now > before, (before / now).sqrt(), 1.0)
            shrink = torch.where(now.isfinite(), shrink, 0.0).to(factors.dtype)
            clip.add_weighted_rows(out, rows, factors[at] * shrink, accumulate)
            accumulate = True


def _values(layer: Layer, scale: Scale) -> list[Tensor]:
    return [scale.values[name] for name in layer.parameters]
