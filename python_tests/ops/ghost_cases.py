"""What the tests of the ghost layers share: single-sample autograd, factors, tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from python_tests.tolerance import assert_as_accurate

BOUND_SLACK = 1 + 1e-6


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def autograd_loop(
    module: nn.Module, inputs: Tensor, errors: Tensor, run: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Return ``[B, *shape]`` gradients of each parameter, one sample at a time, in float64.

    run: calls the module; by default with the sample as a batch of one.
    """
    module = module.double()
    if len(inputs) == 0:
        return [torch.zeros(0, *p.shape, dtype=torch.float64) for p in module.parameters()]
    samples = []
    for x, d in zip(inputs.split(1), errors.double().split(1), strict=True):
        y = module(x) if run is None else run(module, x)
        samples.append(torch.autograd.grad((y * d).sum(), list(module.parameters())))
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]


def apply(factor: Factor | None, x: Tensor) -> Tensor:
    """Return ``x`` with ``factor`` on its last axis, in the dtype of ``x``."""
    if factor is None:
        return x
    if isinstance(factor, LowRank):
        vectors, values = factor.vectors.to(x.dtype), factor.values.to(x.dtype)
        return x * factor.tail + ((x @ vectors) * (values - factor.tail)) @ vectors.T
    return x @ factor.dense().to(x.dtype)


def precondition(
    grads: list[Tensor], left: Factor | None, right: Factor | None, homogeneous: bool
) -> list[Tensor]:
    """Return the gradients of weight ``[B, O, ...]`` and bias under factors, in their own dtype."""
    weight = grads[0].flatten(2)
    bias = grads[1] if len(grads) > 1 else None
    if homogeneous:
        assert bias is not None
        weight = torch.cat([weight, bias.unsqueeze(2)], 2)
    weight = apply(right, apply(left, weight.mT).mT)
    if homogeneous:
        weight, bias = weight[..., :-1], weight[..., -1]
    elif bias is not None:
        bias = apply(left, bias)
    return [weight.reshape(grads[0].shape)] + ([] if bias is None else [bias])


def sq_norms(grads: Iterable[Tensor]) -> Tensor:
    return torch.stack([g.double().flatten(1).square().sum(1) for g in grads]).sum(0)


def weighted(grads: Iterable[Tensor], factors: Tensor) -> list[Tensor]:
    return [torch.einsum("b,b...->...", factors.to(g.dtype), g) for g in grads]


def check_norms(
    actual: Tensor, grads: list[Tensor], dtype: torch.dtype, plain: list[Tensor] | None = None
) -> None:
    """Assert that norms are those of the exact ``grads``, as accurate as PyTorch in ``dtype``.

    plain: gradients that PyTorch computed in ``dtype``; by default the exact ones, rounded.
    """
    assert actual.dtype == torch.float64
    rounded = [g.to(dtype) for g in plain or grads]
    squares = torch.stack([g.flatten(1).square().sum(1) for g in rounded]).sum(0)
    assert_as_accurate(actual.to(dtype), squares, sq_norms(grads))


def check_sums(
    actual: Iterable[Tensor | None], grads: list[Tensor], factors: Tensor, plain: list[Tensor]
) -> None:
    """Assert that sums are those of the exact per-sample ``grads``; ``plain``: by PyTorch."""
    exact = weighted(grads, factors)
    mine = [a for a in actual if a is not None]
    for ours, theirs, truth in zip(mine, plain, exact, strict=True):
        assert_as_accurate(ours, theirs, truth)


def factors_of_size(size: int, seed: int = 3) -> dict[str, Factor]:
    """Return one float32 factor of each kind, with eigenvalues between 0.3 and 3."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    values = torch.rand(size, generator=generator, dtype=torch.float64) * 2.7 + 0.3
    rank = max(1, size // 3)
    return {
        "full": Full(((basis * values) @ basis.T).float()),
        "diagonal": Diagonal(values.float()),
        "low_rank": LowRank(basis[:, :rank].float(), values[:rank].float(), 0.7),
    }
