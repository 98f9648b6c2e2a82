"""Convolutions, and transposed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, Parts, Rows, WeightAndBias
from dpkernels.engine.layers.linear import check_sizes, computing_dtype
from dpkernels.ops import ghost
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan
from dpkernels.precondition import Sides


class CapturedConvolution(torch.autograd.Function):
    """A convolution whose backward pass delivers activations and errors to a site."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site, geometry: Any
    ) -> Tensor:
        """Return the output; geometry: what ``torch.convolution`` takes after the bias."""
        ctx.site, ctx.geometry, ctx.dtype = site, geometry, x.dtype
        dtype = computing_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return torch.convolution(x, weight, None if bias is None else bias.to(dtype), *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Deliver, and return the input's gradient only."""
        x, weight = ctx.saved_tensors
        ctx.site.deliver(x, errors)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        inputs, _, _ = torch.ops.aten.convolution_backward(
            errors, x, weight, None, *ctx.geometry, [True, False, False]
        )
        return inputs.to(ctx.dtype), None, None, None, None


captured_convolution: Callable[..., Tensor] = CapturedConvolution.apply


class ConvLayer(Layer):
    """``nn.Conv1d``, ``Conv2d``, ``Conv3d``: ghost norms. Padding that is not zeros goes first."""

    rule = "convolution"

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        (x,) = (*args, *kwargs.values())
        module = self.module
        rank = len(module.kernel_size)
        check_batched(self, x, rank)
        before, padding = self._padding()
        if any(before):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = functional.pad(x, before, mode=mode)
        geometry = (
            list(module.stride),
            padding,
            list(module.dilation),
            False,
            [0] * rank,
            module.groups,
        )
        return captured_convolution(x, module.weight, module.bias, site, geometry)

    def _padding(self) -> tuple[list[int], list[int]]:
        """Return what to pad beforehand (as ``functional.pad`` takes it), and the layer's own."""
        module = self.module
        around = list(module._reversed_padding_repeated_twice)
        pairs = list(zip(around[::2], around[1::2], strict=True))[::-1]
        if module.padding_mode == "zeros" and all(low == high for low, high in pairs):
            return [0], [low for low, _ in pairs]
        return around, [0] * len(pairs)

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms from inputs ``[B, C, *spatial]`` and errors ``[B, O, *output]``."""
        activations, errors = captured
        if not self.trains("weight"):
            return Rows.of([errors.flatten(2).sum(2, dtype=sum_dtype(errors.dtype))])
        norms = ghost.conv_norms(
            activations,
            errors,
            bias=self.trains("bias"),
            left=sides.left,
            right=sides.right,
            **self._geometry(),
        )
        return WeightAndBias(norms)

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost``."""
        activations, errors = captured
        return ghost.conv_plan(
            tuple(activations.shape),
            tuple(errors.shape),
            bias=self.trains("bias"),
            left=sides.left,
            right=sides.right,
            element_bytes=errors.element_size(),
            **self._geometry(),
        )

    def _geometry(self) -> dict[str, Any]:
        module = self.module
        return {
            "kernel_size": module.kernel_size,
            "stride": module.stride,
            "padding": self._padding()[1],
            "dilation": module.dilation,
            "groups": module.groups,
        }

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError for factors of the wrong size, and for any with groups."""
        module = self.module
        if module.groups > 1 and (sides.left is not None or sides.right is not None):
            raise ValueError(
                f"{self.describe()}: a convolution with groups takes no preconditioner, which "
                "would mix groups that the layer keeps apart; leave it out"
            )
        check_sizes(self, sides, module.out_channels, module.weight[0].numel())


class TransposedConvLayer(Layer):
    """``nn.ConvTranspose1d`` to ``3d``: a convolution with inputs and errors swapped."""

    rule = "transposed convolution"

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        x, *rest = (*args, *kwargs.values())
        module = self.module
        rank = len(module.kernel_size)
        check_batched(self, x, rank)
        output_padding = module._output_padding(
            x,
            rest[0] if rest else None,
            module.stride,
            module.padding,
            module.kernel_size,
            rank,
            module.dilation,
        )
        geometry = (
            list(module.stride),
            list(module.padding),
            list(module.dilation),
            True,
            list(output_padding),
            module.groups,
        )
        return captured_convolution(x, module.weight, module.bias, site, geometry)

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms from inputs ``[B, C, *spatial]`` and errors ``[B, O, *output]``."""
        activations, errors = captured
        parts: list[Norms] = []
        if self.trains("weight"):
            module = self.module
            norms = ghost.conv_norms(
                errors,
                activations,
                kernel_size=module.kernel_size,
                stride=module.stride,
                padding=module.padding,
                dilation=module.dilation,
                groups=module.groups,
                bias=False,
            )
            parts.append(WeightAndBias(norms))
        if self.trains("bias"):
            parts.append(Rows.of([errors.flatten(2).sum(2, dtype=sum_dtype(errors.dtype))]))
        return Parts(tuple(parts), (1,) * len(parts))

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of the convolution that the weight's gradient is."""
        activations, errors = captured
        module = self.module
        return ghost.conv_plan(
            tuple(errors.shape),
            tuple(activations.shape),
            kernel_size=module.kernel_size,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            bias=False,
            element_bytes=errors.element_size(),
        )


def check_batched(layer: Layer, x: Tensor, rank: int) -> None:
    """Raise RuntimeError unless ``x`` is ``[B, C, *spatial]`` with ``rank`` spatial axes."""
    if x.dim() != rank + 2:
        raise RuntimeError(
            f"{layer.describe()}: its input must be [samples, channels] and {rank} spatial axes, "
            f"got {list(x.shape)}"
        )


def merge_rows(uses: Sequence[Norms]) -> Rows:
    """Return stored gradients of several uses, added up."""
    rows = [use.rows for use in uses if isinstance(use, Rows)]
    return Rows.of([torch.stack(parts).sum(0) for parts in zip(*rows, strict=True)])
