"""Data, exact results and plain PyTorch results of the tests of linear layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from dpkernels.ops.ghost import LinearNorms, linear_norms
from python_tests.tolerance import assert_as_accurate, assert_never_low

OPERATIONS = (
    "ghost_linear_sq_norms",
    "ghost_linear_weighted_sum_",
    "ghost_linear_rank_one",
    "apply_factor_",
    "row_sq_norms",
    "clip_factors",
    "weighted_row_sum_",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMULAS = ("gram", "materialised")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inputs(
    shape: tuple[int, ...], features: int, outputs: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return activations ``[*shape, features]`` and errors; sums of them do not cancel."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(*shape, features, generator=generator, dtype=torch.float64) + 0.5
    d = torch.randn(*shape, outputs, generator=generator, dtype=torch.float64) - 0.25
    return a.to(dtype), d.to(dtype)


def factor(kind: str | None, size: int, dtype: torch.dtype) -> Factor | None:
    """Return a well-conditioned factor of a kind: ``full``, ``diagonal`` or ``low_rank``."""
    generator = torch.Generator().manual_seed(size)
    if kind is None:
        return None
    values = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
    if kind == "diagonal":
        return Diagonal(values.to(dtype))
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    if kind == "full":
        return Full(((basis * values) @ basis.T).to(dtype))
    rank = min(3, size)
    return LowRank(basis[:, :rank].contiguous().to(dtype), values[:rank].to(dtype), 0.75)


class Exact(NamedTuple):
    """Per-sample gradients of weight ``[B, O, I]`` and bias ``[B, O]``."""

    weight: np.ndarray
    bias: np.ndarray

    def sq_norms(self, bias: bool) -> Tensor:
        """Return the squared norms, float64."""
        total = (self.weight**2).sum((1, 2)) + ((self.bias**2).sum(1) if bias else 0)
        return torch.from_numpy(np.asarray(total, np.float64))

    def sums(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sums of weight and bias, float64."""
        c = factors.double().numpy().astype(np.longdouble)
        weight, bias = np.tensordot(c, self.weight, 1), np.tensordot(c, self.bias, 1)
        return torch.from_numpy(weight.astype(np.float64)), torch.from_numpy(
            bias.astype(np.float64)
        )


def _wide(x: Tensor) -> np.ndarray:
    return x.double().numpy().astype(np.longdouble)


def exact(a: Tensor, d: Tensor, left: Factor | None = None, right: Factor | None = None) -> Exact:
    """Return the preconditioned gradients in extended precision."""
    batch = a.shape[0]
    wide_a = _wide(a).reshape(batch, int(np.prod(a.shape[1:-1])), a.shape[-1])
    wide_d = _wide(d).reshape(batch, wide_a.shape[1], d.shape[-1])
    homogeneous = right is not None and right.size == a.shape[-1] + 1
    if homogeneous:
        wide_a = np.concatenate([wide_a, np.ones_like(wide_a[:, :, :1])], 2)
    if right is not None:
        wide_a = wide_a @ _wide(dense(right))
    if left is not None:
        wide_d = wide_d @ _wide(dense(left))
    weight = wide_d.transpose(0, 2, 1) @ wide_a
    if homogeneous:
        return Exact(weight[:, :, :-1], weight[:, :, -1])
    return Exact(weight, wide_d.sum(1))


def dense(side: Factor) -> Tensor:
    """Return a factor as a float64 matrix, exactly what its numbers say."""
    if isinstance(side, LowRank):
        return LowRank(side.vectors.double(), side.values.double(), side.tail).dense()
    return side.dense().double()


def plain_vectors(
    a: Tensor, d: Tensor, left: Factor | None, right: Factor | None
) -> tuple[Tensor, Tensor]:
    """Return the transformed activations and errors ``[B, T, .]`` as PyTorch code has them."""
    dtype = sum_dtype(a.dtype)
    if a.dim() == 2:
        a, d = a.unsqueeze(1), d.unsqueeze(1)
    a, d = a.to(dtype).flatten(1, -2), d.to(dtype).flatten(1, -2)
    if right is not None and right.size == a.shape[-1] + 1:
        a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)
    return _plain_transform(a, right), _plain_transform(d, left)


def _plain_transform(x: Tensor, side: Factor | None) -> Tensor:
    if side is None:
        return x
    if isinstance(side, LowRank):
        inner = (x @ side.vectors) * (side.values - side.tail)
        return side.tail * x + inner @ side.vectors.T
    return x @ side.dense()


def plain_sq_norms(a: Tensor, d: Tensor, formula: str, bias: bool) -> Tensor:
    """Return the squared norms by a formula, as PyTorch code has them; a and d as transformed."""
    if formula == "rank_one":
        squares = a.square().sum((1, 2)) * d.square().sum((1, 2))
    elif formula == "gram":
        squares = ((a @ a.mT) * (d @ d.mT)).sum((1, 2))
    else:
        squares = (d.mT @ a).square().sum((1, 2))
    return (squares + d.sum(1).square().sum(1) if bias else squares).double()


def check(
    a: Tensor,
    d: Tensor,
    *,
    formula: str = "auto",
    bias: bool = True,
    left: Factor | None = None,
    right: Factor | None = None,
) -> LinearNorms:
    """Assert that norms and weighted sums of a layer are right; return the norms."""
    norms = linear_norms(a, d, bias=bias, left=left, right=right, formula=formula)
    truth = exact(a, d, left, right)
    x, y = plain_vectors(a, d, left, right)
    homogeneous = right is not None and right.size == a.shape[-1] + 1
    apart = bias and not homogeneous
    if norms.stored or norms.formula == "rank_one":
        plain = plain_sq_norms(x, y, norms.formula, apart)
        assert_as_accurate(norms.sq_norms, plain, truth.sq_norms(bias))
    else:
        check_never_low(norms, apart)
    check_sum(norms, truth, x, y, homogeneous)
    return norms


def check_never_low(norms: LinearNorms, apart: bool) -> None:
    """Assert the contract of norms for the vectors that are summed, transformed if they are.

    apart: whether the bias is not a column of the gradient.
    """
    a, d = norms.saved
    terms = (a.double().norm(dim=2) * d.double().norm(dim=2)).sum(1)
    terms = terms + d.double().norm(dim=2).sum(1) * apart
    assert_never_low(norms.sq_norms, exact(a, d).sq_norms(apart), a.shape[1], terms, a.dtype)


def check_sum(norms: LinearNorms, truth: Exact, x: Tensor, y: Tensor, homogeneous: bool) -> None:
    """Assert that a weighted sum, written and then accumulated, is right."""
    batch = x.shape[0]
    factors = torch.linspace(0.5, 2, batch, dtype=x.dtype)
    wanted = truth.sums(factors)
    scaled = (y * factors[:, None, None]).flatten(0, 1)
    product = scaled.T @ x.flatten(0, 1)
    plain = [product[:, : norms.inputs], product[:, -1] if homogeneous else scaled.sum(0)]
    weight, total = norms.weighted_sum(factors)
    assert (total is not None) == norms.bias
    assert_as_accurate(weight, plain[0], wanted[0])
    out, bias_out = torch.full_like(weight, 3.0), None if total is None else total.clone()
    again, again_bias = norms.weighted_sum(factors, out=out, bias_out=bias_out, accumulate=True)
    assert again is out and again_bias is bias_out
    assert_as_accurate(out, plain[0] + 3.0, wanted[0] + 3.0)
    if total is not None and bias_out is not None:
        assert_as_accurate(total, plain[1], wanted[1])
        assert_as_accurate(bias_out, plain[1] + plain[1], 2 * wanted[1])


def magnitude(a: Tensor, d: Tensor, factors: Tensor) -> Tensor:
    """Return sums ``[O, I + 1]`` of the absolute terms of the weighted sum, the bias's last."""
    a, d = (x.double().abs().reshape(len(x), -1, x.shape[-1]) for x in (a, d))
    ones = torch.ones_like(a[..., :1])
    weighted = d * factors.double().abs()[:, None, None]
    return (weighted.mT @ torch.cat([a, ones], 2)).sum(0)


def absolute(factor: Factor) -> Tensor:
    """Return a matrix whose products bound the sums of absolute terms of the factor's."""
    if isinstance(factor, LowRank):
        vectors = factor.vectors.abs()
        gains = (factor.values - factor.tail).abs()
        return (vectors * gains) @ vectors.T + abs(factor.tail) * torch.eye(
            factor.size, dtype=vectors.dtype
        )
    return factor.dense().abs()
