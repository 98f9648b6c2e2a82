"""Embedding tables, and bags of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, Unsupported, WeightAndBias
from dpkernels.engine.sides import Sides
from dpkernels.ops import ghost
from dpkernels.ops.factor import Diagonal
from dpkernels.ops.ghost.plan import Plan


class CapturedEmbedding(torch.autograd.Function):
    """A table look-up whose backward pass delivers tokens and errors to a site."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, site: Site) -> Tensor:
        """Return ``weight[indices]``."""
        ctx.site = site
        ctx.save_for_backward(indices)
        return functional.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[None, None, None]:
        """Deliver; there is nothing to go on with."""
        (indices,) = ctx.saved_tensors
        ctx.site.deliver(indices, errors)
        return None, None, None


captured_embedding: Callable[..., Tensor] = CapturedEmbedding.apply


class EmbeddingLayer(Layer):
    """``nn.Embedding``: errors of one token are added up within each sample.

    Indices are the samples' own, ``[B, *]``, or shared by all of them: positions ``[T]`` or
    ``[1, T]`` that provably do not come from the samples. Shared ones are looked up once for each
    sample, so that each sample's part of the gradient can be told apart. Which of the two holds is
    found out before the first step, and never again.
    """

    rule = "embedding"
    _shared: bool | None = None
    _unsure = False

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        (indices,) = (*args, *kwargs.values())
        return captured_embedding(
            self._for_each_sample(indices, site.batch), self.module.weight, site
        )

    def note_input(self, shape: Sequence[int], shared: bool, batch: int) -> None:
        """Learn whether indices are the samples' own; raise Unsupported where nothing fits."""
        if not shared:
            self._decide(False)
        elif len(shape) == 0 or (len(shape) > 1 and shape[0] not in (1, batch)):
            raise Unsupported(
                f"{self.describe()}: its indices, {list(shape)}, are shared by all samples, so "
                "that the samples' parts of its gradient cannot be told apart; pass them as "
                "[1, T] or [samples, T], or freeze it with requires_grad_(False)"
            )
        elif shape[0] != batch:
            self._decide(True)
        elif self._shared is None and batch > 1:
            # As many as samples: [samples, *] made of constants, or positions by chance.
            self._shared, self._unsure = False, len(shape) == 1

    def _decide(self, shared: bool) -> None:
        if self._shared not in (None, shared):
            raise Unsupported(
                f"{self.describe()}: it looks up the samples' own indices in one call and shared "
                "positions in another; use one embedding for each"
            )
        self._shared, self._unsure = shared, False

    def settle_layout(self) -> bool:
        """Take as many indices as samples for positions, if they may be."""
        if not self._unsure:
            return False
        self._shared, self._unsure = True, False
        return True

    def _for_each_sample(self, indices: Tensor, batch: int | None) -> Tensor:
        if batch is None and (indices.dim() < 2 or indices.shape[0] == 1):
            raise RuntimeError(
                f"{self.describe()}: its indices, {list(indices.shape)}, may be shared by all "
                "samples, whose number is not known outside of a call of the model; call the "
                "model itself, with the samples in a tensor among its arguments"
            )
        # An empty batch has no indices of its own: what comes before the first sample is shared.
        shared = self._shared or (self._shared is None and batch == 0 and indices.shape[0] > 0)
        if not shared or batch is None:
            return indices
        if indices.dim() > 1 and indices.shape[0] != 1:
            raise RuntimeError(
                f"{self.describe()}: its indices were shared by all samples, [T] or [1, T], and "
                f"now are {list(indices.shape)}; use one embedding for each"
            )
        row = indices if indices.dim() == 1 else indices[0]
        return row.expand(batch, *row.shape)

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms from tokens ``[B, *]`` and errors ``[B, *, D]``."""
        indices, errors = captured
        norms = ghost.embedding_norms(
            indices,
            errors,
            num_embeddings=self.module.num_embeddings,
            padding_idx=self.module.padding_idx,
            left=sides.left,
            right=sides.right,
        )
        return WeightAndBias(norms)

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost``."""
        indices, errors = captured
        return ghost.embedding_plan(
            tuple(indices.shape),
            tuple(errors.shape),
            num_embeddings=self.module.num_embeddings,
            left=sides.left,
            right=sides.right,
            element_bytes=errors.element_size(),
        )

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses' tokens side by side."""
        indices, errors = zip(*uses, strict=True)
        return (
            torch.cat([tokens.unsqueeze(-1).flatten(1) for tokens in indices], 1),
            torch.cat([d.unsqueeze(1).flatten(1, -2) for d in errors], 1),
        )

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError unless left is of size D and right a diagonal over the vocabulary."""
        rows, width = self.module.weight.shape
        if sides.left is not None and sides.left.size != width:
            raise ValueError(
                f"{self.describe()}: left must be of size {width}, got {sides.left.size}"
            )
        right = sides.right
        if right is not None and (not isinstance(right, Diagonal) or right.size != rows):
            raise ValueError(
                f"{self.describe()}: right must be a Diagonal of size {rows}, got "
                f"{type(right).__name__} of size {right.size}"
            )


class EmbeddingBagLayer(EmbeddingLayer):
    """``nn.EmbeddingBag`` with bags ``[B, N]``, summed or averaged: a weighted embedding."""

    rule = "embedding bag"

    def note_input(self, shape: Sequence[int], shared: bool, batch: int) -> None:
        """Learn nothing: a bag is one sample's."""

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output as a weighted sum of embedded tokens."""
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | kwargs
        indices, weights = given["input"], given.get("per_sample_weights")
        module = self.module
        if indices.dim() != 2 or given.get("offsets") is not None:
            raise RuntimeError(
                f"{self.describe()}: bags must be given as [samples, tokens], padded with "
                "padding_idx, not as a vector with offsets, which hides whose tokens are whose"
            )
        embedded = captured_embedding(indices, module.weight, site)
        kept = torch.ones_like(indices, dtype=embedded.dtype)
        if module.padding_idx is not None:
            kept = (indices != module.padding_idx).to(embedded.dtype)
        if weights is not None:
            kept = kept * weights
        elif module.mode == "mean":
            kept = kept / kept.sum(1, keepdim=True).clamp(min=1)
        return (embedded * kept.unsqueeze(-1)).sum(1)
