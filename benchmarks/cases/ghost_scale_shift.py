"""``ghost`` scale and shift: norms and clipped sum of a normalisation layer's weight and bias.

B samples, T positions, N channels: xhat and errors are read once, 8 B T N bytes; 3 B T N flops for
the per-sample gradients. Those, 2 B N elements, are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, poisoned
from dpkernels.ops.ghost import scale_shift_clip_and_sum


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield a LayerNorm over tokens and a GroupNorm over pixels."""
    yield _case("LayerNorm", (4, 16, 32) if quick else (16, 256, 768), -1)
    yield _case("GroupNorm", (4, 16, 49) if quick else (64, 64, 784), 1)


def _case(name: str, shape: tuple[int, int, int], channel_axis: int) -> Case:
    width = shape[channel_axis]
    positions_axis = 1 if channel_axis == -1 else 2
    positions = shape[positions_axis]
    # About the median norm, so that half of the samples are clipped.
    bound = math.sqrt(2 * width * positions)

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return [torch.randn(shape, generator=generator, device=device) for _ in range(2)]

    def with_out(inputs: Inputs) -> tuple[Tensor, ...]:
        return *inputs, poisoned(width, like=inputs[0]), poisoned(width, like=inputs[0])

    def ours(x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
        result = scale_shift_clip_and_sum(
            x, d, bound, channel_axis=channel_axis, out=out, bias_out=bias_out
        )
        return [out, bias_out, result.sq_norms]

    def finish(weight: Tensor, bias: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
        sq_norms = weight.square().sum(1) + bias.square().sum(1)
        factors = (bound / sq_norms.sqrt()).clamp_(max=1.0)
        torch.mv(weight.t(), factors, out=out)
        torch.mv(bias.t(), factors, out=bias_out)
        return [out, bias_out, sq_norms]

    def product(x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
        return finish((x * d).sum(positions_axis), d.sum(positions_axis), out, bias_out)

    def product_kept(
        x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor, products: Tensor
    ) -> Outputs:
        weight = torch.mul(x, d, out=products).sum(positions_axis)
        return finish(weight, d.sum(positions_axis), out, bias_out)

    def einsum(x: Tensor, d: Tensor, out: Tensor, bias_out: Tensor) -> Outputs:
        letters = "btn,btn->bn" if channel_axis == -1 else "bnt,bnt->bn"
        return finish(torch.einsum(letters, x, d), d.sum(positions_axis), out, bias_out)

    def kept(inputs: Inputs) -> tuple[Tensor, ...]:
        return *with_out(inputs), poisoned(*shape, like=inputs[0])

    def truth(inputs: Inputs) -> Outputs:
        x, d = (t.double() for t in inputs)
        return product(x, d, x.new_empty(width), x.new_empty(width))

    sizes = " x ".join(str(size) for size in shape)
    return Case(
        op="ghost_scale_shift_grads",
        name=f"ghost {name} {sizes}",
        dtype=torch.float32,
        parameters={"shape": list(shape), "channel_axis": channel_axis},
        make_inputs=make_inputs,
        bytes_moved=8 * math.prod(shape),
        flops=3 * math.prod(shape),
        bound="read",
        ours=Form("dpkernels", ours, with_out),
        plain=(
            Form("product, sum", product, with_out),
            Form("product, sum, kept", product_kept, kept),
            Form("einsum", einsum, with_out),
        ),
        truth=truth,
    )
