"""Convolutions, and transposed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, Parts, Rows, WeightAndBias, added_up
from dpkernels.engine.layers.linear import check_sizes, computing_dtype
from dpkernels.engine.sides import IDENTITY, Sides
from dpkernels.ops import ghost
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.kron import apply_factor, apply_kron


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
        return captured_convolution(x, module.weight, module.bias, site, self._options(padding))

    def _options(self, padding: list[int]) -> tuple[Any, ...]:
        """Return what ``torch.convolution`` takes after the bias."""
        module = self.module
        still = [0] * len(padding)
        return (list(module.stride), padding, list(module.dilation), False, still, module.groups)

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
        if len(captured) > 2 or not self.trains("weight"):
            return Rows.of(added_up(self.stored(use, sides) for use in pairs(captured)))
        activations, errors = captured
        norms = ghost.conv_norms(
            activations,
            errors,
            bias=self.trains("bias"),
            left=sides.left,
            right=sides.right,
            **self.geometry(),
        )
        return WeightAndBias(norms)

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return ``[B, O, I]`` of the weight and ``[B, O]`` of the bias, of all uses together."""
        return added_up(self.stored(use, IDENTITY) for use in pairs(captured))

    def stored(self, captured: Captured, sides: Sides) -> tuple[Tensor, ...]:
        """Return per-sample gradients of one use, preconditioned: ``[B, *shape]``, ``[B, O]``."""
        activations, errors = captured
        shifts = apply_factor(position_sums(errors), sides.left)
        if not self.trains("weight"):
            return (shifts,)
        shape, options = self.module.weight.shape, self._options(self._padding()[1])
        weights = sample_gradients(activations, errors, shape, options).flatten(2)
        weights = apply_kron(weights, sides.left, None)
        columns = weights.shape[2]
        if sides.right is not None and sides.right.size > columns:
            weights = torch.cat([weights, shifts.unsqueeze(2)], 2)
        weights = apply_factor(weights, sides.right)
        if weights.shape[2] > columns:
            weights, shifts = weights[:, :, :columns], weights[:, :, columns]
        return (weights, shifts) if self.trains("bias") else (weights,)

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses one after the other: images of different sizes cannot be joined."""
        return tuple(x for use in uses for x in use)

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost``."""
        if len(captured) > 2 or not self.trains("weight"):
            return stored_plan(self, captured)
        activations, errors = captured
        return ghost.conv_plan(
            tuple(activations.shape),
            tuple(errors.shape),
            bias=self.trains("bias"),
            left=sides.left,
            right=sides.right,
            element_bytes=errors.element_size(),
            **self.geometry(),
        )

    def geometry(self) -> dict[str, Any]:
        """Return kernel, stride, padding of what is captured, dilation and groups."""
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
        check_sizes(self, sides, module.out_channels, module.weight.shape[1:].numel())


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
        if len(captured) > 2:
            return Rows.of(self.gradients(captured))
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
            parts.append(Rows.of([position_sums(errors)]))
        return Parts(tuple(parts), (1,) * len(parts))

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return ``[B, *shape]`` of the weight and ``[B, O]`` of the bias, of all uses."""
        return added_up(self.stored(use) for use in pairs(captured))

    def stored(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return per-sample gradients of one use: ``[B, *shape]``, ``[B, O]``."""
        activations, errors = captured
        module, gradients = self.module, []
        if self.trains("weight"):
            # A convolution from errors to activations, so that output padding is not needed.
            still = [0] * len(module.stride)
            options = (module.stride, module.padding, module.dilation, False, still, module.groups)
            gradients = [sample_gradients(errors, activations, module.weight.shape, options)]
        return (*gradients, position_sums(errors)) if self.trains("bias") else tuple(gradients)

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses one after the other: images of different sizes cannot be joined."""
        return tuple(x for use in uses for x in use)

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of the convolution that the weight's gradient is."""
        if len(captured) > 2 or not self.trains("weight"):
            return stored_plan(self, captured)
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


def sample_gradients(
    inputs: Tensor, errors: Tensor, shape: Sequence[int], geometry: Sequence[Any]
) -> Tensor:
    """Return per-sample gradients of a convolution's weight, ``[B, *shape]``, float32 or wider.

    geometry: what ``torch.convolution`` takes after the bias. Samples become groups of one large
    convolution, of which this is the weight gradient.
    """
    *options, groups = geometry
    batch, dtype = inputs.shape[0], sum_dtype(inputs.dtype)
    if batch == 0:
        return inputs.new_zeros(0, *shape, dtype=dtype)
    x, d = (t.to(dtype).reshape(1, -1, *t.shape[2:]) for t in (inputs, errors))
    # Only its shape is looked at.
    weight = x.new_empty(batch * shape[0], *shape[1:])
    gradients: Tensor = torch.ops.aten.convolution_backward(
        d, x, weight, None, *options, batch * groups, [False, True, False]
    )[1]
    return gradients.reshape(batch, *shape)


def position_sums(errors: Tensor) -> Tensor:
    """Return errors ``[B, O, *output]`` added up over positions: the bias's gradients."""
    return errors.flatten(2).sum(2, dtype=sum_dtype(errors.dtype))


def pairs(captured: Captured) -> list[Captured]:
    """Return the uses that were put one after the other by ``merged``."""
    return [captured[k : k + 2] for k in range(0, len(captured), 2)]


def stored_plan(layer: Layer, captured: Captured) -> Plan:
    """Return what several uses cost, whose per-sample gradients are stored and added up."""
    batch, uses = captured[0].shape[0], pairs(captured)
    elements = sum(p.numel() for p in layer.parameters.values())
    size = sum_dtype(captured[0].dtype).itemsize
    flops = 4 * batch * elements
    if layer.trains("weight"):
        weight = layer.parameters["weight"]
        # Each weight of a convolution meets an input at every output; of a transposed one, every
        # input meets it.
        side = 0 if layer.module.transposed else 1
        flops += sum(2 * weight.numel() * batch * use[side][0, 0].numel() for use in uses)
    read = sum(x.numel() * x.element_size() for x in captured)
    kept = batch * elements * size
    return Plan(
        "stored",
        flops,
        read + (len(uses) + 1) * kept + elements * size,
        kept,
        f"{len(uses)} uses in one forward pass: their gradients are stored and added up",
    )
