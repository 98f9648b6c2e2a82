"""Clipped sum of one float32 tensor ``[B, D]`` in plain PyTorch, as an expert would write it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from benchmarks.cases.clip.data import BLOCK_BYTES, Factors, block_name, rows_in_block
from benchmarks.registry import Form, Inputs, Outputs, poisoned


def _norm_product(factors: Factors, g: Tensor) -> Outputs:
    return [factors(vector_norm(g, dim=1)) @ g]


def _norm_mv_kept(factors: Factors, g: Tensor, norms: Tensor, out: Tensor) -> Outputs:
    vector_norm(g, dim=1, out=norms)
    return [torch.mv(g.t(), factors(norms), out=out)]


def _einsum(factors: Factors, g: Tensor) -> Outputs:
    norms = torch.einsum("bd,bd->b", g, g).sqrt()
    return [torch.einsum("b,bd->d", factors(norms), g)]


def _square_sum(factors: Factors, g: Tensor, squares: Tensor, out: Tensor) -> Outputs:
    norms = torch.mul(g, g, out=squares).sum(1).sqrt_()
    return [torch.mv(g.t(), factors(norms), out=out)]


def _bmm(factors: Factors, g: Tensor, out: Tensor) -> Outputs:
    norms = torch.bmm(g.unsqueeze(1), g.unsqueeze(2)).flatten().sqrt_()
    return [torch.mm(factors(norms).unsqueeze(0), g, out=out).squeeze(0)]


def _row_blocks_kept(factors: Factors, g: Tensor, out: Tensor, rows: int) -> Outputs:
    out.zero_()
    for block in g.split(rows):
        out.addmv_(block.t(), factors(vector_norm(block, dim=1)))
    return [out]


def _pointwise(factors: Factors, g: Tensor) -> Outputs:
    """What a compiler can fuse: nothing but pointwise work and sums."""
    norms = g.square().sum(1).sqrt()
    return [(factors(norms).unsqueeze(1) * g).sum(0)]


def single_forms(factors: Factors, block_bytes: Sequence[int] = BLOCK_BYTES) -> tuple[Form, ...]:
    """Return the forms for one float32 tensor; the first is the usual one."""

    def out(inputs: Inputs) -> Tensor:
        return poisoned(inputs[0].shape[1], like=inputs[0])

    def norms(inputs: Inputs) -> Tensor:
        return poisoned(inputs[0].shape[0], like=inputs[0])

    return (
        Form("vector_norm, c @ g", _norm_product, lambda i: (factors, i[0])),
        Form("vector_norm, mv, kept", _norm_mv_kept, lambda i: (factors, i[0], norms(i), out(i))),
        Form("einsum", _einsum, lambda i: (factors, i[0])),
        Form(
            "square, sum, mv, kept",
            _square_sum,
            lambda i: (factors, i[0], torch.zeros_like(i[0]), out(i)),
        ),
        Form("bmm, mm, kept", _bmm, lambda i: (factors, i[0], out(i).unsqueeze(0))),
        *(
            Form(
                f"{block_name(size)}, addmv_, kept",
                _row_blocks_kept,
                functools.partial(
                    lambda size, i: (factors, i[0], out(i), rows_in_block(i, size)), size
                ),
            )
            for size in block_bytes
        ),
        Form("pointwise", _pointwise, lambda i: (factors, i[0]), eager=False),
    )
