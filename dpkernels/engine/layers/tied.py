"""Layers that share a weight: norms with the cross terms between them.

Linear layers that share W ``[V, D]`` are one layer with all their positions. With embeddings that
share it, too, the gradient is L + E, where L = sum_t d_t a_t^T of the linear uses and
E = sum_s e_s at row token_s of the embeddings, so

    |L + E|^2 = |L|^2 + |E|^2 + 2 sum_{s,t} d_t[token_s] (e_s . a_t).

If L and E cancel, what float64 rounded of these terms may be more than what is left. So a bound of
that is added, about 1e-13 of ``(sum_t |d_t| |a_t| + sum_s |e_s|)^2``. The bound of |L|^2 itself
stays what it is of L: where that cancels, norms come out high.

L and E go to one float32 buffer, and round there before they cancel. A bound of that is added, too;
where it is more than a limit, the gradient of the sample is formed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.embedding import EmbeddingBagLayer, EmbeddingLayer
from dpkernels.engine.layers.layer import Layer, Norms, Parts, Rows, Unsupported, WeightAndBias
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.sides import Sides
from dpkernels.ops import ghost
from dpkernels.ops.ghost import EmbeddingNorms, LinearNorms
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.ghost.rounding import (
    rounding_error,
    sum_error,
    sum_limit,
    with_sum_error,
)

# Cross terms of so many elements of samples are formed at a time: 32 MB of float64.
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class TiedNorms:
    """Norms of a weight ``[V, D]`` that linear layers and embeddings share.

    tokens, errors: of the embeddings, ``[B, S]`` and ``[B, S, D]``.
    apart: bool ``[B]``, samples whose two parts cancel.
    """

    linear: WeightAndBias
    embedding: WeightAndBias
    tokens: Tensor
    errors: Tensor
    sq_norms: Tensor
    apart: Tensor

    @property
    def formula(self) -> str:
        """Both formulas."""
        return f"{self.linear.formula} + {self.embedding.formula} + cross terms"

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add both weighted sums to the one buffer, or their sum where they cancel."""
        shared = factors
        if bool(self.apart.any()):
            shared = factors.masked_fill(self.apart, 0.0)
        self.linear.add_to(sums, shared, accumulate)
        self.embedding.add_to(sums, shared, True)
        if shared is not factors:
            for b in (self.apart & (factors != 0)).nonzero().flatten().tolist():
                self._add_sample(b, sums[0], factors[b].double())

    def _add_sample(self, b: int, total: Tensor, factor: Tensor) -> None:
        """Add the gradient of sample b, formed in float64: some rows of the table at a time."""
        norms = self.linear.norms
        assert isinstance(norms, LinearNorms)
        tokens, errors = self.tokens[b], self.errors[b].double()
        rows = max(1, _BLOCK_ELEMENTS // max(1, total.shape[1]))
        for first in range(0, total.shape[0], rows):
            part = total[first : first + rows]
            last = first + part.shape[0]
            if norms.stored:
                gradient = norms.saved[0][b, first:last].double()
            else:
                a, d = (x[b].double() for x in norms.saved)
                gradient = d[:, first:last].mT @ a
            here = (tokens >= first) & (tokens < last)
            gradient = gradient.index_add(0, tokens[here] - first, errors[here])
            part += (factor * gradient).to(total.dtype)


class TiedGroup(Layer):
    """All layers that share one weight, as a layer of its own."""

    rule = "tied"

    def __init__(self, members: Sequence[Layer]) -> None:
        self.members = tuple(members)
        self._linear = [x for x in members if isinstance(x, LinearLayer)]
        self._embeddings = [x for x in members if isinstance(x, EmbeddingLayer)]
        parameters = {"weight": members[0].parameters["weight"]}
        for member in self._linear:
            if member.trains("bias"):
                parameters[f"{member.name}.bias"] = member.parameters["bias"]
        names = " + ".join(member.name for member in members)
        super().__init__(names, members[0].module, parameters)

    @classmethod
    def of(cls, members: Sequence[Layer]) -> TiedGroup:
        """Return the group, or raise Unsupported where there is no formula for it."""
        weights = {id(member.parameters.get("weight")) for member in members}
        biases = [member.parameters.get("bias") for member in members]
        trained = [id(bias) for bias in biases if bias is not None]
        right_kinds = all(
            isinstance(member, LinearLayer | EmbeddingLayer)
            and not isinstance(member, EmbeddingBagLayer)
            for member in members
        )
        if (
            not right_kinds
            or len(weights) > 1
            or None in weights
            or len(set(trained)) < len(trained)
        ):
            names = " and ".join(member.describe() for member in members)
            raise Unsupported(
                f"{names} share a parameter in a way that norms are not known for; weights of "
                "Linear and Embedding can be shared; give the others parameters of their own"
            )
        return cls(members)

    def describe(self) -> str:
        """Return the members for a message."""
        return " and ".join(member.describe() for member in self.members)

    def norms_of(self, uses: Mapping[Layer, list[Captured]]) -> Norms:
        """Return norms of all members' uses together."""
        linear = [use for member in self._linear for use in uses[member]]
        embedding = [
            self._without_padding(member, use)
            for member in self._embeddings
            for use in uses[member]
        ]
        weight = self._weight_norms(linear, embedding)
        biases = [self._bias_norms(member, uses[member], weight) for member in self._linear]
        own = [norms for norms in biases if norms is not None]
        return Parts((weight, *own), (1,) * (1 + len(own))) if own else weight

    def _weight_norms(self, linear: list[Captured], embedding: list[Captured]) -> Norms:
        rows = self.parameters["weight"].shape[0]
        by_position = by_token = None
        if linear:
            a, d = self._linear[0].merged(linear)
            by_position = ghost.linear_norms(a, d, bias=False)
        if embedding:
            tokens, e = self._embeddings[0].merged(embedding)
            by_token = ghost.embedding_norms(tokens, e, num_embeddings=rows)
        if by_position is None or by_token is None:
            found = by_position or by_token
            assert found is not None
            return WeightAndBias(found)
        if by_position.stored:
            total, apart = _sq_norms_from_gradients(by_position, by_token, tokens, e)
        else:
            total, apart = _sq_norms_from_positions(by_position, by_token, a, d, tokens, e)
        linear_part, embedding_part = WeightAndBias(by_position), WeightAndBias(by_token)
        return TiedNorms(linear_part, embedding_part, tokens, e, total, apart)

    @staticmethod
    def _without_padding(member: EmbeddingLayer, use: Captured) -> Captured:
        """Return the use with zero errors at the padding token, which gets no gradient."""
        tokens, errors = use
        padding = member.module.padding_idx
        if padding is None:
            return use
        return tokens, torch.where((tokens != padding).unsqueeze(-1), errors, 0)

    @staticmethod
    def _bias_norms(member: Layer, uses: list[Captured], like: Norms) -> Norms | None:
        if not member.trains("bias"):
            return None
        bias = member.parameters["bias"]
        if not uses:
            batch, dtype = like.sq_norms.shape[0], sum_dtype(bias.dtype)
            return Rows.of([torch.zeros(batch, bias.numel(), dtype=dtype, device=bias.device)])
        _, errors = member.merged(uses)
        return Rows.of([errors.sum(1, dtype=sum_dtype(errors.dtype))])

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raise: the members are called, not the group."""
        raise NotImplementedError

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Raise: ``norms_of`` takes the uses of every member."""
        raise NotImplementedError

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Raise: the members have plans."""
        raise NotImplementedError


def _sq_norms_from_positions(
    linear: LinearNorms, embedding: EmbeddingNorms, a: Tensor, d: Tensor, tokens: Tensor, e: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``|L + E|^2``, ``[B]`` in float64, with the cross terms of all positions and tokens.

    Also which samples' two parts cancel too far to be added up in float32.

    a ``[B, T, D]``, d ``[B, T, V]``, tokens ``[B, S]``, e ``[B, S, D]``. 2 B T S D flops.
    """
    positions, count = a.shape[1], tokens.shape[1]
    cross = a.new_zeros(a.shape[0], dtype=torch.float64)
    reach = torch.zeros_like(cross)
    for at in _blocks(a.shape[0], positions * max(count, d.shape[2])):
        met = d[at].gather(2, tokens[at].unsqueeze(1).expand(-1, positions, -1)).double()
        cross[at] = (met * (a[at].double() @ e[at].double().mT)).sum(2).sum(1)
        reach[at] = (_lengths(a[at]) * _lengths(d[at])).sum(1)
    roundings = positions + count + a.shape[2]
    of_sum = sum_error(sum_dtype(a.dtype), positions) * reach
    reach += _lengths(e).sum(1)
    return _with_cross_terms(linear, embedding, cross, reach, roundings, of_sum, positions)


def _sq_norms_from_gradients(
    linear: LinearNorms, embedding: EmbeddingNorms, tokens: Tensor, e: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same from stored L, ``sum_s L[token_s] . e_s``: the very numbers that are summed.

    The products of positions differ from those by float32 roundings, which cancel with nothing.
    """
    gradients, width = linear.saved[0], e.shape[2]
    cross = e.new_zeros(e.shape[0], dtype=torch.float64)
    for at in _blocks(e.shape[0], tokens.shape[1] * width):
        met = gradients[at].gather(1, tokens[at].unsqueeze(2).expand(-1, -1, width)).double()
        cross[at] = (met * e[at].double()).sum(2).sum(1)
    lengths = linear.sq_norms.sqrt()
    of_sum = sum_error(gradients.dtype, 1) * lengths
    reach, roundings = lengths + _lengths(e).sum(1), tokens.shape[1] + width
    return _with_cross_terms(linear, embedding, cross, reach, roundings, of_sum, 1)


def _with_cross_terms(
    linear: LinearNorms,
    embedding: EmbeddingNorms,
    cross: Tensor,
    reach: Tensor,
    roundings: int,
    of_linear: Tensor,
    positions: int,
) -> tuple[Tensor, Tensor]:
    """Return ``|L|^2 + |E|^2 + 2 cross`` and bounds of its rounding errors; NaN if not sound.

    reach: sum of the lengths of all terms of L and E, whose square is the sum of the magnitudes.
    roundings: of each term of ``cross``, and of the sums for each token; 64 more cover the rest.
    of_linear: what the sum rounds of L, with so many positions.
    """
    squares = linear.sq_norms + embedding.sq_norms
    elements, dtype = linear.inputs * linear.outputs, sum_dtype(linear.saved[0].dtype)
    error = 2 * rounding_error(torch.float64, roundings + 64) * reach.square()
    error += rounding_error(torch.float64, elements) * squares
    total = squares + 2 * cross + error
    total = torch.where(total >= 0, total, torch.nan)
    # E is rounded once; then the two are added up, each as long as its terms at most.
    of_sum = of_linear + rounding_error(dtype, 4) * (
        linear.sq_norms.sqrt() + embedding.sq_norms.sqrt()
    )
    return with_sum_error(total, of_sum, sum_limit(positions), dtype)


def _lengths(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
    return lengths


def _blocks(batch: int, elements: int) -> Iterator[slice]:
    """Yield slices of the batch, a block of elements each."""
    block = max(1, _BLOCK_ELEMENTS // max(1, elements))
    for first in range(0, batch, block):
        yield slice(first, first + block)


def tie(layers: Sequence[Layer]) -> list[TiedGroup]:
    """Return the groups of layers that share parameters; mark their members as shared."""
    owners: dict[nn.Parameter, list[Layer]] = {}
    for layer in layers:
        for parameter in layer.parameters.values():
            owners.setdefault(parameter, []).append(layer)
    groups: list[list[Layer]] = []
    for sharing in owners.values():
        if len(sharing) == 1:
            continue
        joined = [group for group in groups if any(layer in group for layer in sharing)]
        merged = list(dict.fromkeys([*(x for group in joined for x in group), *sharing]))
        groups = [group for group in groups if group not in joined] + [merged]
    for group in groups:
        for layer in group:
            layer.shared = True
    return [TiedGroup.of(group) for group in groups]
