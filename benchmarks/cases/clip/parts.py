"""The steps of ``clip_and_sum`` by themselves: squared norms, factors, weighted sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import vector_norm

from benchmarks.cases.clip.data import gradients, row_squares, weighted_rows
from benchmarks.registry import Case, Form, Inputs, Outputs, poisoned
from dpkernels.ops.clip import clip_factors, layer_factors, row_sq_norms, weighted_row_sum

FACTORS_BATCH = 4096
MAX_NORM = 1.0


def part_cases(batch: int, width: int) -> Iterator[Case]:
    """Yield one case for each step, the two large ones on ``[batch, width]`` float32."""
    yield _norms(batch, width)
    yield _weighted_sum(batch, width)
    yield _factors()
    yield _layer_factors()


def _norms(batch: int, width: int) -> Case:
    def dot(g: Tensor) -> Outputs:
        return [torch.einsum("bd,bd->b", g, g)]

    def norm(g: Tensor, norms: Tensor) -> Outputs:
        return [vector_norm(g, dim=1, out=norms).square()]

    return Case(
        op="row_sq_norms",
        name=f"row_sq_norms {batch} x {width:,}",
        dtype=torch.float32,
        parameters={"batch": batch, "sizes": [width]},
        make_inputs=lambda device, generator: gradients(
            batch, [width], torch.float32, device, generator
        ),
        bytes_moved=4 * batch * width,
        flops=2 * batch * width,
        bound="read",
        ours=Form("dpkernels", lambda g: [row_sq_norms(g)], tuple),
        plain=(
            Form("vector_norm, square", lambda g: [vector_norm(g, dim=1).square()], tuple),
            Form("vector_norm, square, kept", norm, lambda i: (i[0], poisoned(batch, like=i[0]))),
            Form("square, sum", lambda g: [g.square().sum(1)], tuple),
            Form("einsum", dot, tuple),
        ),
        truth=lambda inputs: [row_squares(inputs[0])],
    )


def _weighted_sum(batch: int, width: int) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        factors = torch.rand(batch, generator=generator, device=device)
        return [*gradients(batch, [width], torch.float32, device, generator), factors]

    def with_out(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        return inputs[0], inputs[1], poisoned(width, like=inputs[0])

    def ours(g: Tensor, factors: Tensor, out: Tensor) -> Outputs:
        weighted_row_sum(g, factors, out=out)
        return [out]

    return Case(
        op="weighted_row_sum_",
        name=f"weighted_row_sum {batch} x {width:,}",
        dtype=torch.float32,
        parameters={"batch": batch, "sizes": [width]},
        make_inputs=make_inputs,
        bytes_moved=4 * batch * width,
        flops=2 * batch * width,
        bound="read",
        ours=Form("dpkernels", ours, with_out),
        plain=(
            Form("c @ g", lambda g, c: [c @ g], tuple),
            Form("mv, kept", lambda g, c, out: [torch.mv(g.t(), c, out=out)], with_out),
            Form("einsum", lambda g, c: [torch.einsum("b,bd->d", c, g)], tuple),
            Form("pointwise", lambda g, c: [(c.unsqueeze(1) * g).sum(0)], tuple, eager=False),
        ),
        truth=lambda inputs: [weighted_rows(*inputs)],
    )


def _factors() -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        normals = torch.randn(FACTORS_BATCH, generator=generator, device=device)
        return [normals.double().exp()]

    def clamped(sq_norms: Tensor) -> Outputs:
        return [(MAX_NORM / sq_norms.sqrt()).clamp_(max=1.0).float()]

    def rsqrt(sq_norms: Tensor) -> Outputs:
        return [sq_norms.rsqrt().mul_(MAX_NORM).clamp_(max=1.0).float()]

    return Case(
        op="clip_factors",
        name=f"clip_factors {FACTORS_BATCH}",
        dtype=torch.float32,
        parameters={"batch": FACTORS_BATCH, "max_norm": MAX_NORM},
        make_inputs=make_inputs,
        bytes_moved=(8 + 4) * FACTORS_BATCH,
        flops=4 * FACTORS_BATCH,
        bound="update",
        ours=Form("dpkernels", lambda sq_norms: [clip_factors(sq_norms, MAX_NORM)], tuple),
        plain=(Form("sqrt, divide, clamp", clamped, tuple), Form("rsqrt, clamp", rsqrt, tuple)),
        truth=lambda inputs: [(MAX_NORM / inputs[0].sqrt()).clamp(max=1.0)],
    )


def _layer_factors() -> Case:
    """The factors of a model of 12 layers, for a loss that is averaged over the samples."""
    layers, batch = 12, 256

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        normals = torch.randn(layers, batch, generator=generator, device=device)
        return list(normals.double().exp().div_(batch**2))

    def stacked(*sq_norms: Tensor) -> Outputs:
        norms = torch.stack(sq_norms).sum(0).sqrt_()
        return [(MAX_NORM / norms).clamp_(max=batch).float()]

    def by_rsqrt(*sq_norms: Tensor) -> Outputs:
        return [torch.stack(sq_norms).sum(0).rsqrt_().mul_(MAX_NORM).clamp_(max=batch).float()]

    def ours(*sq_norms: Tensor) -> Outputs:
        return [layer_factors(sq_norms, MAX_NORM, scale=batch)]

    return Case(
        op="layer_factors",
        name=f"layer_factors {layers} x {batch}",
        dtype=torch.float32,
        parameters={"layers": layers, "batch": batch, "max_norm": MAX_NORM},
        make_inputs=make_inputs,
        bytes_moved=(8 * layers + 4) * batch,
        flops=(layers + 4) * batch,
        bound="update",
        ours=Form("dpkernels", ours, tuple),
        plain=(Form("stack, sqrt, divide, clamp", stacked, tuple), Form("rsqrt", by_rsqrt, tuple)),
        truth=lambda inputs: [
            (MAX_NORM / torch.stack(list(inputs)).sum(0).sqrt()).clamp(max=batch)
        ],
    )
