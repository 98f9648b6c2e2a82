"""What passes add up of one layer: Kronecker factors, or squares of single records' gradients.

Means over batches are kept in float64: what they round does not grow with the number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dpkernels.engine.capture import Captured
from dpkernels.engine.layers.conv import ConvLayer, pairs
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.linear import AffineLayer, LinearLayer
from dpkernels.engine.layers.scaled import gradients_of
from dpkernels.fisher.conv_moments import channel_moment, patch_moment
from dpkernels.fisher.conv_squares import conv_square_sums
from dpkernels.fisher.information import Diagonal, Kronecker
from dpkernels.ops import kron
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.kron import SecondMoment


class LayerSums(Protocol):
    """What is added up of one layer."""

    def update(self, captured: Captured, again: bool) -> None:
        """Add one pass; again: it has other errors of the same records as the one before."""
        ...

    def blocks(self, records: int, passes: int) -> dict[str, Kronecker | Diagonal]:
        """Return F, by the name of its layer or parameter; empty if no pass reached it.

        records: of the model. passes: backward passes for each of them.
        """
        ...


def sums_of(layer: Layer, kind: str, names: Mapping[str, str]) -> LayerSums:
    """Return what to add up: squares also where ``kronecker`` has no factors for the layer.

    names: of the layer's parameters in the state dict, by attribute.
    """
    if kind == "kronecker" and has_factors(layer):
        return FactorSums(layer, names)
    return SquareSums(layer, names)


def has_factors(layer: Layer) -> bool:
    """Return whether the layer's gradient is a product of two matrices of moderate size."""
    if isinstance(layer, ConvLayer):
        return bool(layer.module.groups == 1)
    return isinstance(layer, AffineLayer)


class FactorSums:
    """A and G of a linear layer, of a convolution over its patches, or of a bias alone."""

    def __init__(self, layer: Layer, names: Mapping[str, str]) -> None:
        self._layer, self._names = layer, names
        self._a, self._g, self._positions = SecondMoment(), SecondMoment(), 0

    def update(self, captured: Captured, again: bool) -> None:
        """Add one pass: B T (n^2 + m^2) flops for sides of n and m, half of them if ``again``."""
        layer = self._layer
        moment: Callable[[Tensor], Tensor]
        if isinstance(layer, ConvLayer):
            axis, moment = 1, channel_moment
            uses = [(d, partial(patch_moment, x, **layer.geometry())) for x, d in pairs(captured)]
        else:
            axis, moment = -1, kron.second_moment
            x, d = captured if len(captured) == 2 else layer.merged([captured])
            uses = [(d, partial(kron.second_moment, x))]
        for errors, activations in uses:
            if errors.numel() == 0:
                continue
            positions = errors.numel() // errors.shape[axis]
            self._g.update(moment(errors).double(), positions)
            if not again:
                self._positions += positions
                if layer.trains("weight"):
                    self._a.update(activations(bias=self._joined()).double(), positions)

    def blocks(self, records: int, passes: int) -> dict[str, Kronecker | Diagonal]:
        """Return one block, or two where the bias is no column of the weight."""
        layer = self._layer
        if self._g.count == 0:
            return {}
        dtype = sum_dtype(next(iter(layer.parameters.values())).dtype)
        share = self._positions / records
        g, ones = self._g.value.to(dtype), torch.full((1, 1), share, dtype=dtype)
        weight, bias = self._names.get("weight"), self._names.get("bias")
        alone = Kronecker(None, bias, ones.to(g.device), g)
        if not layer.trains("weight"):
            return {layer.name: alone}
        a = (self._a.value * share).to(dtype)
        if isinstance(layer, LinearLayer | ConvLayer):
            return {layer.name: Kronecker(weight, bias, a, g)}
        # ``x W + b``: the weight is [I, O], so that activations are its rows.
        a, g = self._g.value * share, self._a.value
        found: dict[str, Kronecker | Diagonal] = {
            layer.name: Kronecker(weight, None, a.to(dtype), g.to(dtype))
        }
        return found | {bias: alone} if bias is not None else found

    def _joined(self) -> bool:
        """Return whether a bias is the last column of the weight."""
        return self._layer.trains("bias") and isinstance(self._layer, LinearLayer | ConvLayer)


class SquareSums:
    """Squares of single records' gradients, of every element of the layer's parameters."""

    def __init__(self, layer: Layer, names: Mapping[str, str]) -> None:
        self._layer, self._names = layer, names
        self._means = {attribute: SecondMoment() for attribute in layer.parameters}

    def update(self, captured: Captured, again: bool) -> None:
        """Add one pass; what that costs: ``dpkernels.engine.layers.scaled`` and conv_squares."""
        layer, batch = self._layer, captured[0].shape[0]
        if batch == 0:
            return
        if isinstance(layer, ConvLayer) and layer.trains("weight") and len(captured) == 2:
            squares = conv_square_sums(*captured, bias=layer.trains("bias"), **layer.geometry())
            parameters = layer.parameters.values()
            squares = [s.view(p.shape) for s, p in zip(squares, parameters, strict=True)]
        else:
            squares = gradients_of(layer, captured).square_sums()
        for mean, total in zip(self._means.values(), squares, strict=True):
            mean.update(total.double() / batch, batch)

    def blocks(self, records: int, passes: int) -> dict[str, Kronecker | Diagonal]:
        """Return a block for each parameter. Records that do not reach the layer count as 0."""
        found: dict[str, Kronecker | Diagonal] = {}
        for attribute, mean in self._means.items():
            name = self._names[attribute]
            if mean.count:
                dtype = sum_dtype(self._layer.parameters[attribute].dtype)
                values: Tensor = mean.value * (mean.count / (records * passes))
                found[name] = Diagonal(name, values.to(dtype))
        return found
