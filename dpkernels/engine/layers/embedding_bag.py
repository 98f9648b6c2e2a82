"""Bags of embeddings whose tokens come in one vector, with an offset for each bag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.embedding import EmbeddingBagLayer, captured_embedding


class OffsetBagLayer(EmbeddingBagLayer):
    """``nn.EmbeddingBag`` with bags ``[B, N]``, or ``[tokens]`` and offsets: one bag a sample.

    Offsets say whose tokens are whose, so tokens are laid out as ``[B, longest]`` and followed as
    bags of that shape are. What fills a row has the weight 0, and so no error.
    """

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output as a weighted sum of embedded tokens."""
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | kwargs
        offsets = given.get("offsets")
        if offsets is None:
            return super().forward(site, plain, *args, **kwargs)
        tokens, weights = given["input"], given.get("per_sample_weights")
        starts, lengths = self._bags(tokens, offsets)
        if site.batch is not None and site.batch != len(starts):
            raise RuntimeError(
                f"{self.describe()}: offsets are for {len(starts)} bags, but the model was called "
                f"with {site.batch} samples: there must be one bag for each; make offsets in "
                "forward(), from lengths [samples], or pass bags as [samples, tokens], padded with "
                "padding_idx"
            )
        module = self.module
        steps = torch.arange(int(lengths.max()) if len(lengths) else 0, device=tokens.device)
        inside = steps < lengths.unsqueeze(1)
        # Filled with a constant, and not with tokens of somebody else.
        places = torch.where(inside, starts.unsqueeze(1) + steps, 0)
        rows = torch.where(inside, tokens[places], 0) if len(tokens) else places
        kept = inside.to(module.weight.dtype)
        if module.padding_idx is not None:
            kept = kept * (rows != module.padding_idx)
        if weights is not None and len(weights):
            kept = torch.where(inside, kept * weights[places], 0.0)
        elif module.mode == "mean":
            kept = kept / kept.sum(1, keepdim=True).clamp(min=1)
        embedded = captured_embedding(rows, module.weight, site)
        return (embedded * kept.unsqueeze(-1)).sum(1)

    def _bags(self, tokens: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each bag starts, and how long it is, ``[B]`` each."""
        if tokens.dim() != 1 or offsets.dim() != 1:
            raise RuntimeError(
                f"{self.describe()}: with offsets, tokens and offsets must be vectors, got "
                f"{list(tokens.shape)} and {list(offsets.shape)}"
            )
        end = offsets.new_full((1,), len(tokens))
        ends = offsets if self.module.include_last_offset else torch.cat([offsets, end])
        starts, lengths = ends[:-1], ends.diff()
        if bool((lengths < 0).any()) or bool((starts[:1] != 0).any()):
            raise RuntimeError(
                f"{self.describe()}: offsets must begin with 0 and not go back, so that each token "
                "is in one bag"
            )
        return starts, lengths
