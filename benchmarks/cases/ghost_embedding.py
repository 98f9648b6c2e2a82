"""``ghost`` embedding: norms, and norms with the clipped sum into the table.

B samples of T tokens, rows of D elements, V rows in the table:

=================================  ====================  ======================================
operation                          bytes                 of the bytes
=================================  ====================  ======================================
``ghost_embedding_sq_norms``       4 B T D               errors read once
``ghost_embedding_weighted_sum_``  12 B T D + 4 V D      errors read; as many rows of the table
                                                         read and written, and all of it zeroed
=================================  ====================  ======================================

3 B T D flops for the norms, 2 B T D for the sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, poisoned
from dpkernels.ops.ghost import embedding_clip_and_sum, embedding_norms


class Table(NamedTuple):
    """Sizes of a batch and of the table that it looks up."""

    batch: int
    tokens: int
    width: int
    vocabulary: int

    @property
    def bound(self) -> float:
        """About the median norm, so that half of the samples are clipped."""
        return math.sqrt(self.tokens * self.width)

    @property
    def elements(self) -> int:
        """Elements of the errors."""
        return self.batch * self.tokens * self.width


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield a sentence-sized batch: norms alone, and with the sum."""
    table = Table(8, 16, 32, 100) if quick else Table(64, 128, 256, 10_000)
    yield _norms(table)
    yield _clipped(table)


def _make_inputs(table: Table, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = (table.batch, table.tokens)
    # A few tokens come often, most hardly ever: squares of uniforms crowd at the low end.
    uniform = torch.rand(shape, generator=generator, device=device)
    indices = (uniform.square() * table.vocabulary).long().clamp_(max=table.vocabulary - 1)
    return [indices, torch.randn(*shape, table.width, generator=generator, device=device)]


def _names(table: Table) -> str:
    return f"B {table.batch}, T {table.tokens}, D {table.width}, V {table.vocabulary:,}"


def _norms(table: Table) -> Case:
    def ours(indices: Tensor, errors: Tensor) -> Outputs:
        norms = embedding_norms(indices, errors, num_embeddings=table.vocabulary)
        return [norms.sq_norms]

    return Case(
        op="ghost_embedding_sq_norms",
        name=f"ghost embedding norms, {_names(table)}",
        dtype=torch.float32,
        parameters=table._asdict(),
        make_inputs=functools.partial(_make_inputs, table),
        bytes_moved=4 * table.elements,
        flops=3 * table.elements,
        bound="read",
        ours=Form("dpkernels", ours, tuple),
        plain=(
            Form("bmm, equal tokens", lambda i, d: [_pairs(i, d)], tuple),
            Form("sort, index_add", lambda i, d: [_segments(i, d)], tuple),
        ),
        truth=lambda inputs: [_pairs(inputs[0], inputs[1].double())],
    )


def _clipped(table: Table) -> Case:
    def ours(indices: Tensor, errors: Tensor, out: Tensor) -> Outputs:
        result = embedding_clip_and_sum(
            indices, errors, table.bound, num_embeddings=table.vocabulary, out=out
        )
        return [out, result.sq_norms]

    def plain(norms: str, indices: Tensor, errors: Tensor, out: Tensor) -> Outputs:
        sq_norms = _pairs(indices, errors) if norms == "bmm" else _segments(indices, errors)
        factors = (table.bound / sq_norms.sqrt()).clamp_(max=1.0)
        weighted = errors * factors.view(-1, 1, 1)
        out.zero_().index_add_(0, indices.flatten(), weighted.flatten(0, 1))
        return [out, sq_norms]

    def backward(indices: Tensor, errors: Tensor) -> Outputs:
        sq_norms = _pairs(indices, errors)
        factors = (table.bound / sq_norms.sqrt()).clamp_(max=1.0)
        weighted = errors * factors.view(-1, 1, 1)
        total = torch.ops.aten.embedding_dense_backward(
            weighted, indices, table.vocabulary, -1, False
        )
        return [total, sq_norms]

    def with_out(inputs: Inputs) -> tuple[Tensor, ...]:
        return *inputs, poisoned(table.vocabulary, table.width, like=inputs[1])

    def truth(inputs: Inputs) -> Outputs:
        shape = (table.vocabulary, table.width)
        out = torch.zeros(shape, dtype=torch.float64, device=inputs[1].device)
        return plain("bmm", inputs[0], inputs[1].double(), out)

    return Case(
        op="ghost_embedding_weighted_sum_",
        name=f"ghost embedding clipped sum, {_names(table)}",
        dtype=torch.float32,
        parameters=table._asdict(),
        make_inputs=functools.partial(_make_inputs, table),
        bytes_moved=16 * table.elements + 4 * table.vocabulary * table.width,
        flops=5 * table.elements,
        bound="update",
        ours=Form("dpkernels", ours, with_out),
        plain=(
            Form("bmm, index_add_", functools.partial(plain, "bmm"), with_out),
            Form("sort, index_add_", functools.partial(plain, "sort"), with_out),
            Form("bmm, embedding_dense_backward", backward, tuple),
        ),
        truth=truth,
    )


def _pairs(indices: Tensor, errors: Tensor) -> Tensor:
    """Products of all pairs of positions, where they hold the same token."""
    products = torch.bmm(errors, errors.transpose(1, 2))
    same = indices.unsqueeze(1) == indices.unsqueeze(2)
    return products.mul_(same).sum((1, 2))


def _segments(indices: Tensor, errors: Tensor) -> Tensor:
    """Sums of the errors of one token of one sample, by a number for each such pair."""
    batch = indices.shape[0]
    keys = indices + torch.arange(batch, device=indices.device).unsqueeze(1) * (1 << 32)
    distinct, number = keys.flatten().unique(return_inverse=True)
    sums = errors.new_zeros(distinct.numel(), errors.shape[2])
    sums.index_add_(0, number, errors.flatten(0, 1))
    squares = sums.square().sum(1)
    return squares.new_zeros(batch).index_add_(0, distinct >> 32, squares)
