"""``ghost``, linear layers: norms and clipped sums from activations and errors.

B samples, T positions, I inputs, O outputs, float32:

==========================  ==========================  ========================================
operation                   bytes                       flops
==========================  ==========================  ========================================
Gram norms                  4 B T (I + O)               B T^2 (I + O): half of two symmetric
                                                        products
norms and sum               8 B T (I + O) + 4 I O       B T^2 (I + O) + 2 B T I O
weighted sum                4 B T (I + O) + 4 I O       2 B T I O
norms and sum, T = 1, with  4 B (I + O) + 4 I O         2 B (I^2 + O^2) + 2 B I O
full-rank factors           + 4 (I^2 + O^2)
norms alone, T = 1, with    8 B (I + O)                 2 B (I^2 + O^2)
full-rank factors           + 4 (I^2 + O^2)
==========================  ==========================  ========================================
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.factor import Full
from dpkernels.ops.ghost import linear_clip_and_sum, linear_norms
from dpkernels.ops.ghost.rounding import norm_limit, sum_limit

TWO_BMM = "two bmm and a product"
PLAIN_RANK_ONE = "transform, norms, product"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the sizes of the claim, a small transformer's layer, and the weighted sum alone."""
    if quick:
        yield _norms(4, 64, 96, 64)
        yield _rank_one(64, 96, 64)
        yield _rank_one_norms(64, 96, 64)
        yield _norms_and_sum(4, 32, 64, 64)
        yield _weighted_sum(4, 32, 64, 96)
        return
    yield _norms(16, 256, 768, 768, Target(1.3, TWO_BMM, memory_fraction=1 / 8))
    yield _rank_one(256, 784, 512, Target(1.15, PLAIN_RANK_ONE, percent_of_bound=83.0))
    yield _rank_one_norms(256, 784, 512)
    yield _norms_and_sum(16, 64, 256, 256)
    yield _weighted_sum(16, 256, 768, 768)


def _inputs(
    batch: int, positions: int, inputs: int, outputs: int, device: torch.device, g: torch.Generator
) -> Inputs:
    """Return normal activations and errors; samples have log-normal scales (median 1)."""
    scales = torch.randn(batch, 1, 1, generator=g, device=device).mul_(0.5).exp_()
    a = torch.randn(batch, positions, inputs, generator=g, device=device)
    d = torch.randn(batch, positions, outputs, generator=g, device=device).mul_(scales)
    return [a, d]


def _exact_gradients(a: Tensor, d: Tensor) -> Iterator[Tensor]:
    """Yield each sample's gradient in float64."""
    for activations, errors in zip(a, d, strict=True):
        yield errors.double().T @ activations.double()


def _exact_sum(a: Tensor, d: Tensor, factors: Tensor) -> Tensor:
    total = torch.zeros(d.shape[2], a.shape[2], dtype=torch.float64, device=a.device)
    for gradient, factor in zip(_exact_gradients(a, d), factors.double(), strict=True):
        total += factor * gradient
    return total


def _exact_sq_norms(a: Tensor, d: Tensor) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in _exact_gradients(a, d)])


def _two_bmm(a: Tensor, d: Tensor) -> Outputs:
    return [((a @ a.mT) * (d @ d.mT)).sum((1, 2))]


def _two_bmm_kept(a: Tensor, d: Tensor, aa: Tensor, dd: Tensor) -> Outputs:
    torch.bmm(a, a.mT, out=aa)
    torch.bmm(d, d.mT, out=dd)
    return [aa.mul_(dd).sum((1, 2))]


def _sample_by_sample(a: Tensor, d: Tensor, aa: Tensor, dd: Tensor, out: Tensor) -> Outputs:
    """Two buffers of one sample: they stay in the cache."""
    for index in range(a.shape[0]):
        torch.mm(a[index], a[index].T, out=aa)
        torch.mm(d[index], d[index].T, out=dd)
        out[index] = torch.dot(aa.view(-1), dd.view(-1))
    return [out]


def _gradients(a: Tensor, d: Tensor) -> Outputs:
    return [torch.bmm(d.mT, a).square_().sum((1, 2))]


def _norm_forms() -> tuple[Form, ...]:
    def kept(inputs: Inputs, *batch: int) -> tuple[Tensor, ...]:
        a, d = inputs
        shape = (*batch, a.shape[1], a.shape[1])
        return a, d, poisoned(*shape, like=a), poisoned(*shape, like=a)

    def one_sample(inputs: Inputs) -> tuple[Tensor, ...]:
        return *kept(inputs), poisoned(inputs[0].shape[0], like=inputs[0])

    return (
        Form(TWO_BMM, _two_bmm, tuple),
        Form(
            "two bmm into kept buffers, mul_",
            _two_bmm_kept,
            lambda inputs: kept(inputs, inputs[0].shape[0]),
        ),
        Form("mm, mm, dot, sample by sample", _sample_by_sample, one_sample, compilable=False),
        Form("bmm of gradients, squares", _gradients, tuple),
    )


def _norms(
    batch: int, positions: int, inputs: int, outputs: int, target: Target | None = None
) -> Case:
    def ours(a: Tensor, d: Tensor) -> Outputs:
        return [linear_norms(a, d, bias=False, formula="gram").sq_norms]

    vectors = batch * positions * (inputs + outputs)
    return Case(
        op="ghost_linear_sq_norms",
        name=f"ghost norms {batch} x {positions} x {inputs} -> {outputs}",
        dtype=torch.float32,
        parameters={"B": batch, "T": positions, "I": inputs, "O": outputs},
        make_inputs=lambda device, g: _inputs(batch, positions, inputs, outputs, device, g),
        bytes_moved=4 * vectors,
        flops=vectors * positions,
        bound="gemm",
        ours=Form("dpkernels", ours, tuple),
        plain=_norm_forms(),
        truth=lambda inputs: [_exact_sq_norms(*inputs)],
        # Of squares, twice as much as of norms.
        raised=2 * (norm_limit(torch.float32, positions) + sum_limit(positions)),
        target=target or Target(),
    )


def _clip(sq_norms: Tensor, bound: float) -> Tensor:
    return sq_norms.rsqrt().mul_(bound).clamp_(max=1.0)


def _scaled_product(a: Tensor, d: Tensor, c: Tensor, scaled: Tensor, out: Tensor) -> Outputs:
    torch.mul(d, c[:, None, None], out=scaled)
    return [torch.mm(scaled.flatten(0, 1).T, a.flatten(0, 1), out=out)]


def _scaled_product_new(a: Tensor, d: Tensor, c: Tensor) -> Outputs:
    return [(d * c[:, None, None]).flatten(0, 1).T @ a.flatten(0, 1)]


def _norms_and_sum(batch: int, positions: int, inputs: int, outputs: int) -> Case:
    bound = float((positions * inputs * outputs) ** 0.5)

    def ours(a: Tensor, d: Tensor, out: Tensor) -> Outputs:
        return [linear_clip_and_sum(a, d, bound, bias=False, out=out).weight]

    def gram(a: Tensor, d: Tensor, aa: Tensor, dd: Tensor, scaled: Tensor, out: Tensor) -> Outputs:
        (sq_norms,) = _two_bmm_kept(a, d, aa, dd)
        return _scaled_product(a, d, _clip(sq_norms, bound), scaled, out)

    def gram_new(a: Tensor, d: Tensor) -> Outputs:
        (sq_norms,) = _two_bmm(a, d)
        return _scaled_product_new(a, d, _clip(sq_norms, bound))

    def gradients(a: Tensor, d: Tensor, g: Tensor, out: Tensor) -> Outputs:
        torch.bmm(d.mT, a, out=g)
        norms = torch.linalg.vector_norm(g, dim=(1, 2))
        factors = (bound / norms).clamp_(max=1.0)
        torch.mv(g.flatten(1).T, factors, out=out.view(-1))
        return [out]

    def out_of(inputs_: Inputs) -> Tensor:
        return poisoned(outputs, inputs, like=inputs_[0])

    def kept(tensors: Inputs) -> tuple[Tensor, ...]:
        shape = (batch, positions, positions)
        a, d = tensors
        grams = poisoned(*shape, like=a), poisoned(*shape, like=a)
        return a, d, *grams, torch.empty_like(d), out_of(tensors)

    def truth(tensors: Inputs) -> Outputs:
        factors = (bound / _exact_sq_norms(*tensors).sqrt()).clamp(max=1.0)
        a, d = tensors
        return [_exact_sum(a, d, factors)]

    vectors = batch * positions * (inputs + outputs)
    return Case(
        op="ghost_linear_sq_norms",
        name=f"ghost norms and sum {batch} x {positions} x {inputs} -> {outputs}",
        dtype=torch.float32,
        parameters={"B": batch, "T": positions, "I": inputs, "O": outputs},
        make_inputs=lambda device, g: _inputs(batch, positions, inputs, outputs, device, g),
        bytes_moved=8 * vectors + 4 * inputs * outputs,
        flops=vectors * positions + 2 * batch * positions * inputs * outputs,
        bound="gemm",
        ours=Form("dpkernels", ours, lambda tensors: (*tensors, out_of(tensors))),
        plain=(
            Form(f"{TWO_BMM}, product of scaled errors", gram_new, tuple),
            Form("the same into kept buffers", gram, kept),
            Form(
                "bmm of gradients, norms, c @ g, kept",
                gradients,
                lambda tensors: (
                    *tensors,
                    poisoned(batch, outputs, inputs, like=tensors[0]),
                    out_of(tensors),
                ),
            ),
        ),
        truth=truth,
        raised=norm_limit(torch.float32, positions) + sum_limit(positions),
    )


def _weighted_sum(batch: int, positions: int, inputs: int, outputs: int) -> Case:
    def make_inputs(device: torch.device, g: torch.Generator) -> Inputs:
        tensors = _inputs(batch, positions, inputs, outputs, device, g)
        return [*tensors, torch.rand(batch, generator=g, device=device)]

    def ours(a: Tensor, d: Tensor, c: Tensor, out: Tensor) -> Outputs:
        run = torch.ops.dpkernels.ghost_linear_weighted_sum_
        run(out, None, a, d, c, None, False)
        return [out]

    def with_out(tensors: Inputs) -> tuple[Tensor, ...]:
        return *tensors, poisoned(outputs, inputs, like=tensors[0])

    def kept(tensors: Inputs) -> tuple[Tensor, ...]:
        return *tensors, torch.empty_like(tensors[1]), poisoned(outputs, inputs, like=tensors[0])

    vectors = batch * positions * (inputs + outputs)
    return Case(
        op="ghost_linear_weighted_sum_",
        name=f"ghost weighted sum {batch} x {positions} x {inputs} -> {outputs}",
        dtype=torch.float32,
        parameters={"B": batch, "T": positions, "I": inputs, "O": outputs},
        make_inputs=make_inputs,
        bytes_moved=4 * vectors + 4 * inputs * outputs,
        flops=2 * batch * positions * inputs * outputs,
        bound="gemm",
        ours=Form("dpkernels", ours, with_out),
        plain=(
            Form("product of scaled errors", _scaled_product_new, tuple),
            Form("the same into kept buffers", _scaled_product, kept),
        ),
        truth=lambda tensors: [_exact_sum(*tensors)],
    )


def _rank_one_inputs(
    batch: int, inputs: int, outputs: int, device: torch.device, g: torch.Generator
) -> Inputs:
    """Return activations and errors without positions, and symmetric factors of both sides."""
    a, d = (x.squeeze(1) for x in _inputs(batch, 1, inputs, outputs, device, g))
    roots = [torch.randn(n, n, generator=g, device=device) / n**0.5 for n in (inputs, outputs)]
    return [a, d, *((root + root.T) / 2 for root in roots)]


def _rank_one(batch: int, inputs: int, outputs: int, target: Target | None = None) -> Case:
    bound = float((inputs * outputs) ** 0.5)

    def ours(
        a: Tensor, d: Tensor, right: Tensor, left: Tensor, out: Tensor, bias_out: Tensor
    ) -> Outputs:
        sides = {"left": Full(left), "right": Full(right)}
        linear_clip_and_sum(a, d, bound, **sides, out=out, bias_out=bias_out)  # type: ignore[arg-type]
        return [out, bias_out]

    def with_out(tensors: Inputs) -> tuple[Tensor, ...]:
        outs = poisoned(outputs, inputs, like=tensors[0]), poisoned(outputs, like=tensors[0])
        return *tensors, *outs

    def kept(tensors: Inputs) -> tuple[Tensor, ...]:
        a, d, right, left, *outs = with_out(tensors)
        return a, d, right, left, torch.empty_like(a), torch.empty_like(d), *outs

    return Case(
        op="ghost_linear_rank_one_clip_",
        name=f"ghost linear {batch} x {inputs} -> {outputs}, full-rank factors",
        dtype=torch.float32,
        parameters={"B": batch, "T": 1, "I": inputs, "O": outputs},
        make_inputs=lambda device, g: _rank_one_inputs(batch, inputs, outputs, device, g),
        bytes_moved=4 * (batch * (inputs + outputs) + inputs**2 + outputs**2 + inputs * outputs),
        flops=2 * batch * (inputs**2 + outputs**2 + inputs * outputs),
        bound="gemm",
        ours=Form("dpkernels", ours, with_out),
        plain=(
            Form(PLAIN_RANK_ONE, lambda *tensors: _plain_rank_one(bound, *tensors), tuple),
            Form(
                "the same into kept buffers",
                lambda *tensors: _plain_rank_one_kept(bound, *tensors),
                kept,
            ),
        ),
        truth=lambda tensors: _plain_rank_one(bound, *(x.double() for x in tensors)),
        target=target or Target(),
    )


def _plain_sq_norms(a: Tensor, d: Tensor) -> Outputs:
    norms = torch.linalg.vector_norm(a, dim=1).square_().add_(1.0)
    return [norms.mul_(torch.linalg.vector_norm(d, dim=1).square_())]


def _rank_one_norms(batch: int, inputs: int, outputs: int) -> Case:
    """Norms alone, as for clipping over all layers: the vectors are kept for the sum."""

    def ours(a: Tensor, d: Tensor, right: Tensor, left: Tensor) -> Outputs:
        return [linear_norms(a, d, left=Full(left), right=Full(right)).sq_norms]

    def plain(a: Tensor, d: Tensor, right: Tensor, left: Tensor) -> Outputs:
        return _plain_sq_norms(a @ right, d @ left)

    def plain_kept(
        a: Tensor, d: Tensor, right: Tensor, left: Tensor, new_a: Tensor, new_d: Tensor
    ) -> Outputs:
        return _plain_sq_norms(torch.mm(a, right, out=new_a), torch.mm(d, left, out=new_d))

    vectors = batch * (inputs + outputs)
    return Case(
        op="ghost_linear_rank_one",
        name=f"ghost norms {batch} x {inputs} -> {outputs}, full-rank factors",
        dtype=torch.float32,
        parameters={"B": batch, "T": 1, "I": inputs, "O": outputs},
        make_inputs=lambda device, g: _rank_one_inputs(batch, inputs, outputs, device, g),
        bytes_moved=8 * vectors + 4 * (inputs**2 + outputs**2),
        flops=2 * batch * (inputs**2 + outputs**2),
        bound="gemm",
        ours=Form("dpkernels", ours, tuple),
        plain=(
            Form("transform, norms", plain, tuple),
            Form(
                "the same into kept buffers",
                plain_kept,
                lambda t: (*t, torch.empty_like(t[0]), torch.empty_like(t[1])),
            ),
        ),
        truth=lambda tensors: plain(*(x.double() for x in tensors)),
    )


def _rank_one_factors(bound: float, a: Tensor, d: Tensor) -> Tensor:
    """Clip factors from norms ``|d| sqrt(|a|^2 + 1)``: weight and bias together."""
    norms: Tensor = torch.linalg.vector_norm(a, dim=1).square_().add_(1.0).sqrt_()
    norms.mul_(torch.linalg.vector_norm(d, dim=1))
    return (bound / norms).clamp_(max=1.0)


def _plain_rank_one(bound: float, a: Tensor, d: Tensor, right: Tensor, left: Tensor) -> Outputs:
    a, d = a @ right, d @ left
    c = _rank_one_factors(bound, a, d)
    return [(d * c[:, None]).T @ a, c @ d]


def _plain_rank_one_kept(
    bound: float,
    a: Tensor,
    d: Tensor,
    right: Tensor,
    left: Tensor,
    transformed_a: Tensor,
    transformed_d: Tensor,
    out: Tensor,
    bias_out: Tensor,
) -> Outputs:
    torch.mm(a, right, out=transformed_a)
    torch.mm(d, left, out=transformed_d)
    c = _rank_one_factors(bound, transformed_a, transformed_d)
    transformed_d.mul_(c[:, None])
    torch.mm(transformed_d.T, transformed_a, out=out)
    torch.sum(transformed_d, 0, out=bias_out)
    return [out, bias_out]
