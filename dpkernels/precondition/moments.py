"""Kronecker factors A = E[a a^T] and G = E[d d^T] of one layer, from what a pass captures of it.

The layer's gradient is sum_t d_t a_t^T over positions. Convolutions are linear layers over patches
(DP-KFC, formula 43), attention and recurrent networks are the products that they are made of, and
an embedding is a linear layer over one-hot vectors, whose A is diagonal: the tokens' frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dpkernels.engine.capture import Captured
from dpkernels.engine.layers.conv import ConvLayer, pairs
from dpkernels.engine.layers.embedding import EmbeddingLayer
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.layers.transposed_linear import TransposedLinearLayer
from dpkernels.ops import kron
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.kron import SecondMoment

Sharing = Literal["expand", "reduce"]
WhichSides = Literal["AG", "A", "G"]
Role = Literal["activations", "errors"]


@dataclass(frozen=True)
class Estimation:
    """How factors are estimated.

    sides: which of them.
    sharing: what becomes of positions (``dpkernels.ops.kron.second_moment``): ``expand`` takes each
        as a sample (formulas 43 and 44), ``reduce`` merges those of a sample first.
    diagonal: keep only the diagonals.
    max_size: sides that are larger keep only their diagonal, too: a matrix and its root would take
        n^2 elements and 10/3 n^3 flops.
    """

    sides: WhichSides = "AG"
    sharing: Sharing = "expand"
    diagonal: bool = False
    max_size: int = 2048

    def keeps_diagonal(self, size: int) -> bool:
        """Return whether of a side of that size only the diagonal is kept."""
        return self.diagonal or size > self.max_size


def why_not(layer: Layer) -> str | None:
    """Return why a layer's gradient gets no Kronecker factors; None if it does."""
    if layer.shared:
        return "its weight is shared with another layer"
    if isinstance(layer, ConvLayer):
        return "groups of channels must not be mixed" if layer.module.groups > 1 else None
    if isinstance(layer, LinearLayer | TransposedLinearLayer | EmbeddingLayer):
        return None
    return f"its rule ({layer.rule}) takes no factors"


class LayerMoments:
    """Running A and G of a layer; the engine's sides for it are made from them.

    A has the bias as its last column where the layer trains one; a layer that trains its bias
    alone has G only. Values are matrices, or vectors where only the diagonal is kept.
    """

    def __init__(self, layer: Layer, estimation: Estimation) -> None:
        self.layer = layer
        self._how = estimation
        self._a, self._g = SecondMoment(), SecondMoment()
        # Vectors that are fewer than they have elements are multiplied together with later ones: a
        # matrix is then not read and written for each batch: for 8 x 256 vectors of 1568 elements
        # 110 ms of one core instead of 195.
        self._waiting: dict[Role, list[Tensor]] = {"activations": [], "errors": []}

    @property
    def activations(self) -> Tensor | None:
        """A, ``[n, n]`` or its diagonal; None if there is none."""
        self.settle()
        return self._a.value if self._a.count else None

    @property
    def errors(self) -> Tensor | None:
        """G, ``[m, m]`` or its diagonal; None if there is none."""
        self.settle()
        return self._g.value if self._g.count else None

    def settle(self) -> None:
        """Add vectors that wait for more. Raises ValueError for what is not finite."""
        for role in self._waiting:
            self._multiply(role)

    def why(self) -> str:
        """Return what the layer has no factors for, or only a diagonal, and why; "" if nothing."""
        a, g, limit = self.activations, self.errors, self._how.max_size
        if reason := why_not(self.layer):
            return reason
        if a is None and g is None:
            alone = self._how.sides == "A" and not self.layer.trains("weight")
            return "a bias alone has no A" if alone else "no probe reached it"
        if isinstance(self.layer, EmbeddingLayer):
            a = None  # is diagonal by nature
        large = [len(x) for x in (a, g) if x is not None and len(x) > limit]
        if not large or self._how.diagonal:
            return ""
        return f"diagonal: {' and '.join(map(str, large))} is larger than {limit}"

    def update(self, captured: Captured) -> None:
        """Add what one pass has captured. Raises as ``settle`` does, there at the latest."""
        layer = self.layer
        if isinstance(layer, EmbeddingLayer):
            self._add_tokens(*captured)
        elif isinstance(layer, ConvLayer):
            for inputs, errors in pairs(captured):
                self._add_patches(layer, inputs, errors)
                self._add_rows(errors, "errors", channel_dim=1)
        else:
            # Several products of one weight: positions side by side, as for their norms.
            inputs, errors = captured if len(captured) == 2 else layer.merged([captured])
            if layer.trains("weight"):
                self._add_rows(inputs, "activations")
            self._add_rows(errors, "errors")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; tensors are not copied."""
        self.settle()
        return {"A": self._a.state_dict(), "G": self._g.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; tensors are copied, to the layer's device."""
        own = next(iter(self.layer.parameters.values()))
        like = own.device, sum_dtype(own.dtype)
        for running, one in ((self._a, state["A"]), (self._g, state["G"])):
            mean = one["mean"]
            running.load_state_dict(one | {"mean": None if mean is None else mean.to(*like)})

    def _add_rows(self, x: Tensor, role: Role, channel_dim: int = -1) -> None:
        """Add vectors ``[B, *, n]``, or with n elsewhere."""
        if not self._wants(role) or x.numel() == 0:
            return
        bias, size, sharing = self._has_bias(role), x.shape[channel_dim], self._how.sharing
        samples = x.shape[0] if sharing == "reduce" else x.numel() // size
        if self._how.keeps_diagonal(size + bias):
            rows = x.movedim(channel_dim, -1).reshape(x.shape[0], -1, size).to(sum_dtype(x.dtype))
            if sharing == "reduce":
                rows = (rows.sum(1) if role == "errors" else rows.mean(1)).unsqueeze(1)
            moment = _with_one(rows.square().mean((0, 1)), bias)
        elif x.dim() == 2:
            waiting = self._waiting[role]
            waiting.append(x.detach().clone())  # who knows what a model does with its own
            if sum(map(len, waiting)) >= size:
                self._multiply(role)
            return
        else:
            moment = kron.second_moment(
                x, bias=bias, sharing=sharing, role=role, channel_dim=channel_dim
            )
        self._running(role).update(moment, samples)

    def _multiply(self, role: Role) -> None:
        """Add the vectors ``[B, n]`` that wait."""
        waiting, self._waiting[role] = self._waiting[role], []
        if waiting:
            x = torch.cat(waiting)
            moment = kron.second_moment(x, bias=self._has_bias(role))
            self._running(role).update(moment, len(x))

    def _add_patches(self, layer: ConvLayer, inputs: Tensor, errors: Tensor) -> None:
        """Add the patches of inputs ``[B, C, *spatial]``."""
        if not self._wants("activations") or not layer.trains("weight") or errors.numel() == 0:
            return
        bias, sharing, geometry = layer.trains("bias"), self._how.sharing, layer.geometry()
        samples = inputs.shape[0] * (1 if sharing == "reduce" else errors[0, 0].numel())
        if not self._how.keeps_diagonal(layer.module.weight.shape[1:].numel() + bias):
            moment = kron.conv_second_moment(inputs, bias=bias, sharing=sharing, **geometry)
        else:
            x = inputs.to(sum_dtype(inputs.dtype))
            if sharing == "reduce":
                squares = kron.mean_patches(x, **geometry).square()
            else:
                squares = kron.mean_patches(x.square(), **geometry)
            moment = _with_one(squares.mean((0, 1)), bias)
        self._a.update(moment, samples)

    def _add_tokens(self, tokens: Tensor, errors: Tensor) -> None:
        """Add tokens ``[B, *]`` and their errors ``[B, *, D]``; positions are always expanded."""
        module = self.layer.module
        kept = torch.ones_like(tokens, dtype=torch.bool)
        if module.padding_idx is not None:
            kept = tokens != module.padding_idx
        tokens, errors = tokens[kept], errors[kept]
        if tokens.numel() == 0:
            return
        if self._wants("activations"):
            frequencies = kron.token_frequencies(tokens, module.num_embeddings).values
            self._a.update(frequencies.to(sum_dtype(errors.dtype)), tokens.numel())
        self._add_rows(errors, "errors")

    def _running(self, role: Role) -> SecondMoment:
        return self._a if role == "activations" else self._g

    def _has_bias(self, role: Role) -> bool:
        """Return whether rows have a 1 behind them. In x W + b the bias is no column of W."""
        layer = self.layer
        return role == "activations" and layer.trains("bias") and isinstance(layer, LinearLayer)

    def _wants(self, role: Role) -> bool:
        return ("A" if role == "activations" else "G") in self._how.sides


def _with_one(diagonal: Tensor, bias: bool) -> Tensor:
    """Return the diagonal with that of a bias behind it, whose activation is always 1."""
    return torch.cat([diagonal, diagonal.new_ones(1)]) if bias else diagonal
