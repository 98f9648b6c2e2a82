"""Embedding tables, and bags of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, WeightAndBias
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

    Tokens that are the same for all samples (positions: one row, or 0, 1, 2, ... in a vector) are
    looked up once for each sample, so that each sample's part of the gradient can be told apart.
    """

    rule = "embedding"
    _positions: bool | None = None

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        (indices,) = (*args, *kwargs.values())
        return captured_embedding(
            self._for_each_sample(indices, site.batch), self.module.weight, site
        )

    def _for_each_sample(self, indices: Tensor, batch: int | None) -> Tensor:
        if indices.dim() == 0:
            return indices
        if batch is None:
            self._check_samples(indices)
            return indices
        if indices.dim() > 1:
            common = indices.shape[0] == 1 and batch != 1
            return indices.expand(batch, *indices.shape[1:]) if common else indices
        if self._holds_positions(indices, batch):
            return indices.expand(batch, *indices.shape)
        return indices

    def _check_samples(self, indices: Tensor) -> None:
        """Raise RuntimeError for positions, ``[T]`` or ``[1, T]``, of who knows how many samples.

        They would be taken for the tokens of T samples, or of one.
        """
        row = indices[0] if indices.dim() == 2 and indices.shape[0] == 1 else indices
        if row.dim() == 1 and row.shape[0] > 1 and _is_range(row):
            raise RuntimeError(
                f"{self.describe()}: its input, 0 to {row.shape[0] - 1}, looks like positions, but "
                "how many samples they are for is not known outside of a call of the model; call "
                "the model itself, with the samples in a tensor among its arguments"
            )

    def _holds_positions(self, indices: Tensor, batch: int) -> bool:
        """Return whether a vector of indices is about positions, not one token a sample.

        As many elements as samples can be either; what earlier calls were decides, and a long
        enough 0, 1, 2, ... is not a coincidence (one in 40,000 permutations of 8).
        """
        if indices.shape[0] != batch:
            self._positions = _is_range(indices)
        elif self._positions is None or not self._positions:
            is_range = _is_range(indices)
            if not is_range:
                self._positions = False
            elif self._positions is None and 1 < batch < 8:
                raise RuntimeError(
                    f"{self.describe()}: {indices.tolist()} may be positions or one token for each "
                    f"of {batch} samples; pass positions as [1, T] and tokens as [samples, 1]"
                )
            elif self._positions is None and batch > 1:
                self._positions = True
        return bool(self._positions)

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


def _is_range(indices: Tensor) -> bool:
    """Return whether a vector is 0, 1, 2, ..., which are positions rather than data."""
    return bool((indices == torch.arange(indices.shape[0], device=indices.device)).all())
