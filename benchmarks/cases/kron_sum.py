"""``kron_sum``: the FedFisher server's gradient for one Adam step, 5 clients.

For each layer of O x I weights and n clients 2 n O I (O + I) flops; the factors are read once,
4 n (O^2 + I^2) bytes, x and the centers too, and the gradient is written. LeNet's factors are 2 MB:
they stay in the cache from step to step, and the products bound the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.kron_sum import KronFisher, kron_sum

CLIENTS = 5
# LeNet for 28 x 28 images: conv 1-6 and 6-16 of 5 x 5, fully connected 256-120-84-10; the bias is
# one more column.
LENET = ((6, 26), (16, 151), (120, 257), (84, 121), (10, 85))
QUICK = ((6, 26), (10, 85))
Shapes = tuple[tuple[int, int], ...]

EINSUM = "einsum"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the step with centers, and the step whose constant part is computed beforehand."""
    shapes = QUICK if quick else LENET
    yield _case("FedFisher step, LeNet", shapes, Target(1.3, EINSUM), cached=False)
    yield _case("FedFisher step, LeNet, constant cached", shapes, Target(1.3, EINSUM), cached=True)


def _layers(inputs: Inputs) -> tuple[Inputs, Inputs, Inputs, Inputs]:
    """Return gs, as_, x and centers."""
    return inputs[0::4], inputs[1::4], inputs[2::4], inputs[3::4]


def _case(name: str, shapes: Shapes, target: Target, *, cached: bool) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        inputs = []
        for rows, cols in shapes:
            for shape in ((rows, rows), (cols, cols)):
                root = torch.randn(CLIENTS, *shape, generator=generator, device=device)
                inputs.append(root @ root.mT / shape[0])
            inputs.append(torch.randn(rows, cols, generator=generator, device=device))
            inputs.append(torch.randn(CLIENTS, rows, cols, generator=generator, device=device))
        return inputs

    def with_outputs(inputs: Inputs) -> tuple[object, ...]:
        gs, as_, xs, centers = _layers(inputs)
        outs = [poisoned(*x.shape, like=x) for x in xs]
        return (KronFisher(gs, as_, centers), xs, outs) if cached else (gs, as_, xs, centers, outs)

    def ours(gs: Inputs, as_: Inputs, xs: Inputs, centers: Inputs, outs: Inputs) -> Outputs:
        kron_sum(gs, as_, xs, centers, out=outs)
        return outs

    def ours_cached(objective: KronFisher, xs: Inputs, outs: Inputs) -> Outputs:
        objective.gradient(xs, out=outs)
        return outs

    elements = sum(CLIENTS * (o * o + i * i) + 2 * o * i for o, i in shapes)
    return Case(
        op="kron_sum_",
        name=name,
        dtype=torch.float32,
        parameters={"clients": CLIENTS, "layers": [list(shape) for shape in shapes]},
        make_inputs=make_inputs,
        bytes_moved=4 * elements,
        flops=sum(2 * CLIENTS * o * i * (o + i) for o, i in shapes),
        bound="gemm",
        ours=Form("dpkernels", ours_cached if cached else ours, with_outputs),
        plain=_cached_forms() if cached else _forms(),
        truth=_truth,
        target=target,
    )


def _truth(inputs: Inputs) -> Outputs:
    layers = zip(*([t.double() for t in ts] for ts in _layers(inputs)), strict=True)
    return [torch.bmm(torch.bmm(g, x - centers), a).sum(0) for g, a, x, centers in layers]


def _einsum(gs: Inputs, as_: Inputs, xs: Inputs, centers: Inputs) -> Outputs:
    layers = zip(gs, as_, xs, centers, strict=True)
    return [torch.einsum("nop,npi,nij->oj", g, x - w, a) for g, a, x, w in layers]


def _bmm(gs: Inputs, as_: Inputs, xs: Inputs, centers: Inputs) -> Outputs:
    layers = zip(gs, as_, xs, centers, strict=True)
    return [torch.bmm(torch.bmm(g, x - w), a).sum(0) for g, a, x, w in layers]


Buffers = tuple[Inputs, Inputs, Inputs, Inputs]


def _buffers(inputs: Inputs) -> Buffers:
    """Return X - W_i, G_i (X - W_i), the same side by side, and the sums, to be kept."""
    xs = _layers(inputs)[2]
    shapes = [x.shape for x in xs]
    differences, halves = (
        [poisoned(CLIENTS, *shape, like=xs[0]) for shape in shapes] for _ in range(2)
    )
    side_by_side = [poisoned(o, CLIENTS, i, like=xs[0]) for o, i in shapes]
    return differences, halves, side_by_side, [poisoned(*shape, like=xs[0]) for shape in shapes]


def _bmm_kept(gs: Inputs, as_: Inputs, xs: Inputs, centers: Inputs, buffers: Buffers) -> Outputs:
    layers = zip(gs, as_, xs, centers, *buffers, strict=True)
    for g, a, x, w, difference, half, _, out in layers:
        torch.sub(x, w, out=difference)
        torch.bmm(g, difference, out=half)
        torch.sum(torch.bmm(half, a, out=difference), 0, out=out)
    return buffers[3]


def _long_kept(gs: Inputs, as_: Inputs, xs: Inputs, centers: Inputs, buffers: Buffers) -> Outputs:
    """One long product adds up the clients: [G_1 X, .., G_n X] [A_1; ..; A_n]."""
    layers = zip(gs, as_, xs, centers, *buffers, strict=True)
    for g, a, x, w, difference, half, row, out in layers:
        torch.sub(x, w, out=difference)
        row.copy_(torch.bmm(g, difference, out=half).transpose(0, 1))
        torch.mm(row.flatten(1), a.flatten(0, 1), out=out)
    return buffers[3]


def _long_cached(
    gs: Inputs, as_: Inputs, xs: Inputs, constants: Inputs, buffers: Buffers
) -> Outputs:
    """All G_i times the one X are one product too, and the constant is the other one's addend."""
    layers = zip(gs, as_, xs, constants, *buffers, strict=True)
    for g, a, x, constant, _, half, row, out in layers:
        torch.mm(g.flatten(0, 1), x, out=half.flatten(0, 1))
        row.copy_(half.transpose(0, 1))
        torch.addmm(constant, row.flatten(1), a.flatten(0, 1), out=out)
    return buffers[3]


def _bmm_cached(
    gs: Inputs, as_: Inputs, xs: Inputs, constants: Inputs, buffers: Buffers
) -> Outputs:
    layers = zip(gs, as_, xs, constants, *buffers, strict=True)
    for g, a, x, constant, product, half, _, out in layers:
        torch.mm(g.flatten(0, 1), x, out=half.flatten(0, 1))
        torch.sum(torch.bmm(half, a, out=product), 0, out=out).add_(constant)
    return buffers[3]


def _einsum_cached(gs: Inputs, as_: Inputs, xs: Inputs, constants: Inputs) -> Outputs:
    layers = zip(gs, as_, xs, constants, strict=True)
    return [torch.einsum("nop,pi,nij->oj", g, x, a) + constant for g, a, x, constant in layers]


def _forms() -> tuple[Form, ...]:
    def kept(inputs: Inputs) -> tuple[object, ...]:
        return (*_layers(inputs), _buffers(inputs))

    return (
        Form(EINSUM, _einsum, _layers),
        Form("bmm, bmm, sum", _bmm, _layers),
        Form("bmm, bmm, sum, kept", _bmm_kept, kept),
        Form("bmm, one long mm, kept", _long_kept, kept),
    )


def _cached_forms() -> tuple[Form, ...]:
    def constant(inputs: Inputs) -> tuple[Inputs, Inputs, Inputs, Inputs]:
        gs, as_, xs, centers = _layers(inputs)
        return gs, as_, xs, _bmm(gs, as_, [torch.zeros_like(x) for x in xs], centers)

    def kept(inputs: Inputs) -> tuple[object, ...]:
        return (*constant(inputs), _buffers(inputs))

    forms: list[tuple[str, Callable[..., Outputs], Callable[[Inputs], tuple[object, ...]]]] = [
        (EINSUM, _einsum_cached, constant),
        ("mm, bmm, sum, kept", _bmm_cached, kept),
        ("mm, one long addmm, kept", _long_cached, kept),
    ]
    return tuple(Form(*form) for form in forms)
