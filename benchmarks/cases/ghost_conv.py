"""``ghost`` convolution: norms and clipped sum from activations and errors.

B samples, C input and O output channels, L output positions, I = C K elements of a patch:

===================  ==================  =============================================
formula              flops               of the flops
===================  ==================  =============================================
``materialised``     2 B L O I + 2 B O I  gradients, then their weighted sum
``gram``             B (P^2 C + L^2 O)    products of P pixels and of L positions, then
                     + 2 B L O I          the gradient of the weighted errors
===================  ==================  =============================================

Bytes: activations and errors read once, 4 B (C P + O L); the bound is the product's rate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import unfold

from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.ghost import conv_clip_and_sum, conv_plan
from dpkernels.ops.ghost.rounding import norm_limit, sum_limit

UNFOLD = "unfold, bmm"


class Layer(NamedTuple):
    """A square 2-D convolution with padding that keeps the size."""

    batch: int
    channels: int
    out_channels: int
    kernel: int
    size: int

    @property
    def padding(self) -> int:
        """Zeros on each side."""
        return self.kernel // 2

    @property
    def positions(self) -> int:
        """Output positions, as many as input pixels."""
        return self.size**2

    @property
    def columns(self) -> int:
        """Elements of a patch."""
        return self.channels * self.kernel**2

    @property
    def bound(self) -> float:
        """About the median norm of the inputs below, so that half of the samples are clipped."""
        return math.sqrt(self.out_channels * (self.columns + 1) * self.positions)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the layer of the claim, one where gradients are too large to keep, and a late layer."""
    if quick:
        yield _case(Layer(8, 4, 8, 3, 7), Target())
        yield _case(Layer(4, 32, 32, 3, 4), Target())
        return
    yield _case(Layer(256, 16, 32, 3, 14), Target(1.5, UNFOLD, memory_fraction=0.25))
    yield _case(Layer(32, 64, 128, 3, 14), Target())
    yield _case(Layer(64, 256, 256, 3, 4), Target())


def _case(layer: Layer, target: Target) -> Case:
    batch, channels, out_channels, kernel, size = layer
    inputs_shape, errors_shape = (batch, channels, size, size), (batch, out_channels, size, size)
    plan = conv_plan(inputs_shape, errors_shape, kernel_size=kernel, padding=layer.padding)

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return [
            torch.randn(shape, generator=generator, device=device)
            for shape in (inputs_shape, errors_shape)
        ]

    def ours(x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
        result = conv_clip_and_sum(
            x,
            d,
            layer.bound,
            kernel_size=kernel,
            padding=layer.padding,
            out=out,
            bias_out=bias_out,
        )
        return [out, bias_out, result.sq_norms]

    return Case(
        op="ghost_conv_norms",
        name=f"ghost conv {channels} -> {out_channels}, {kernel} x {kernel}, {size} x {size}, "
        f"B {batch}",
        dtype=torch.float32,
        parameters={**layer._asdict(), "formula": plan.formula},
        make_inputs=make_inputs,
        bytes_moved=4 * batch * layer.positions * (channels + out_channels),
        flops=plan.flops,
        bound="gemm",
        ours=Form("dpkernels", ours, functools.partial(_with_buffers, layer)),
        plain=_plain_forms(layer),
        truth=functools.partial(_truth, layer),
        # Of squares, twice as much as of norms.
        raised=2 * (norm_limit(torch.float32, layer.positions) + sum_limit(layer.positions)),
        target=target,
    )


def _with_buffers(layer: Layer, inputs: Inputs) -> tuple[Tensor, ...]:
    shape = (layer.out_channels, layer.channels, layer.kernel, layer.kernel)
    x, d = inputs
    return x, d, poisoned(*shape, like=x), poisoned(layer.out_channels, like=x)


def _factors(layer: Layer, sq_norms: Tensor) -> Tensor:
    return (layer.bound / sq_norms.sqrt()).clamp(max=1.0)


def _unfold_bmm(layer: Layer, x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
    """The usual form: patches, per-sample gradients, norms, one product for the sum."""
    patches = unfold(x, layer.kernel, padding=layer.padding)
    errors = d.flatten(2)
    grads = torch.bmm(errors, patches.transpose(1, 2)).flatten(1)
    bias = errors.sum(2)
    sq_norms = grads.square().sum(1) + bias.square().sum(1)
    factors = _factors(layer, sq_norms)
    torch.mv(grads.t(), factors, out=out.view(-1))
    torch.mv(bias.t(), factors, out=bias_out)
    return [out, bias_out, sq_norms]


def _unfold_bmm_kept(
    layer: Layer,
    x: Tensor,
    d: Tensor,
    out: Tensor,
    bias_out: Tensor,
    grads: Tensor,
) -> Outputs:
    """The same with norms that allocate nothing and a kept buffer of gradients."""
    patches = unfold(x, layer.kernel, padding=layer.padding)
    errors = d.flatten(2)
    torch.bmm(errors, patches.transpose(1, 2), out=grads)
    rows, bias = grads.flatten(1), errors.sum(2)
    norms = torch.linalg.vector_norm(rows, dim=1)
    sq_norms = norms.square_() + torch.linalg.vector_norm(bias, dim=1).square_()
    factors = _factors(layer, sq_norms)
    torch.mv(rows.t(), factors, out=out.view(-1))
    torch.mv(bias.t(), factors, out=bias_out)
    return [out, bias_out, sq_norms]


def _in_blocks(
    layer: Layer,
    x: Tensor,
    d: Tensor,
    out: Tensor,
    bias_out: Tensor,
    grads: Tensor,
    samples: int,
) -> Outputs:
    """Patches of a few samples at a time, so that they stay in the cache."""
    for block_x, block_d, block in zip(
        x.split(samples), d.flatten(2).split(samples), grads.split(samples), strict=True
    ):
        patches = unfold(block_x, layer.kernel, padding=layer.padding)
        torch.bmm(block_d, patches.transpose(1, 2), out=block)
    rows, bias = grads.flatten(1), d.flatten(2).sum(2)
    norms = torch.linalg.vector_norm(rows, dim=1)
    sq_norms = norms.square_() + torch.linalg.vector_norm(bias, dim=1).square_()
    factors = _factors(layer, sq_norms)
    torch.mv(rows.t(), factors, out=out.view(-1))
    torch.mv(bias.t(), factors, out=bias_out)
    return [out, bias_out, sq_norms]


def _grouped_backward(layer: Layer, x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
    """Samples as groups of one convolution: its weight gradient is all per-sample gradients."""
    batch, channels, out_channels, kernel, _ = layer
    shape = (batch * out_channels, channels, kernel, kernel)
    _, grads, _ = torch.ops.aten.convolution_backward(
        d.reshape(1, -1, *d.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        x.new_empty(shape),
        None,
        [1, 1],
        [layer.padding] * 2,
        [1, 1],
        False,
        [0, 0],
        batch,
        [False, True, False],
    )
    rows, bias = grads.view(batch, -1), d.flatten(2).sum(2)
    sq_norms = torch.linalg.vector_norm(rows, dim=1).square_() + bias.square().sum(1)
    factors = _factors(layer, sq_norms)
    torch.mv(rows.t(), factors, out=out.view(-1))
    torch.mv(bias.t(), factors, out=bias_out)
    return [out, bias_out, sq_norms]


def _plain_forms(layer: Layer) -> tuple[Form, ...]:
    def kept(inputs: Inputs) -> tuple[Tensor, ...]:
        shape = (layer.batch, layer.out_channels, layer.columns)
        return *_with_buffers(layer, inputs), poisoned(*shape, like=inputs[0])

    buffers = functools.partial(_with_buffers, layer)
    return (
        Form(UNFOLD, functools.partial(_unfold_bmm, layer), buffers),
        Form("unfold, bmm, kept", functools.partial(_unfold_bmm_kept, layer), kept),
        *(
            Form(
                f"{samples} samples at a time, kept",
                functools.partial(_in_blocks, layer, samples=samples),
                kept,
                compilable=False,
            )
            for samples in (4, 16)
        ),
        Form("samples as groups", functools.partial(_grouped_backward, layer), buffers),
    )


def _truth(layer: Layer, inputs: Inputs) -> Outputs:
    x, d = (t.double() for t in inputs)
    grads = torch.bmm(d.flatten(2), unfold(x, layer.kernel, padding=layer.padding).transpose(1, 2))
    bias = d.flatten(2).sum(2)
    sq_norms = grads.square().sum((1, 2)) + bias.square().sum(1)
    factors = _factors(layer, sq_norms)
    total = torch.einsum("b,boi->oi", factors, grads)
    shape = (layer.out_channels, layer.channels, layer.kernel, layer.kernel)
    return [total.view(shape), factors @ bias, sq_norms]
