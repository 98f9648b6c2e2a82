"""Clipped sums of bfloat16 or float16 tensors ``[B, D_l]``, accumulated in float32, in PyTorch.

A product in half precision is among them: it is the fast way to write it, and it is refused for its
error (factors and sum are rounded to half precision, so that a sample may count for more than C).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from benchmarks.cases.clip.data import BLOCK_BYTES, Factors, block_name, rows_in_block, sums
from benchmarks.registry import Form, Inputs, Outputs, poisoned


def _total(norms: list[Tensor]) -> Tensor:
    return norms[0] if len(norms) == 1 else vector_norm(torch.stack(norms), dim=0)


def _float_copies(factors: Factors, gs: list[Tensor]) -> Outputs:
    floats = [g.float() for g in gs]
    c = factors(_total([vector_norm(g, dim=1) for g in floats]))
    return [c @ g for g in floats]


def _float_copies_kept(
    factors: Factors, gs: list[Tensor], floats: list[Tensor], outs: list[Tensor]
) -> Outputs:
    for kept, g in zip(floats, gs, strict=True):
        kept.copy_(g)
    c = factors(_total([vector_norm(g, dim=1) for g in floats]))
    for g, out in zip(floats, outs, strict=True):
        torch.mv(g.t(), c, out=out)
    return outs


def _float_blocks_kept(
    factors: Factors, gs: list[Tensor], buffers: list[Tensor], outs: list[Tensor]
) -> Outputs:
    """Convert a few rows at a time into a buffer that stays in the cache."""
    for out in outs:
        out.zero_()
    for blocks in zip(*(g.split(buffers[0].shape[0]) for g in gs), strict=True):
        pairs = zip(buffers, blocks, strict=True)
        floats = [buffer[: block.shape[0]].copy_(block) for buffer, block in pairs]
        c = factors(_total([vector_norm(g, dim=1) for g in floats]))
        for g, out in zip(floats, outs, strict=True):
            out.addmv_(g.t(), c)
    return outs


def _half_product(factors: Factors, gs: list[Tensor]) -> Outputs:
    c = factors(_total([vector_norm(g, dim=1, dtype=torch.float32) for g in gs]))
    return [(c.to(g.dtype) @ g).float() for g in gs]


def _pointwise(factors: Factors, gs: list[Tensor]) -> Outputs:
    """What a compiler can fuse: nothing but pointwise work and sums."""
    sq_norms = torch.stack([g.float().square().sum(1) for g in gs]).sum(0)
    c = factors(sq_norms.sqrt()).unsqueeze(1)
    return [(c * g.float()).sum(0) for g in gs]


def half_forms(factors: Factors, block_bytes: Sequence[int] = BLOCK_BYTES) -> tuple[Form, ...]:
    """Return the forms for one or several half-precision tensors; the first is the usual one."""

    def floats(inputs: Inputs) -> list[Tensor]:
        return [poisoned(*g.shape, like=g) for g in inputs]

    def blocks(inputs: Inputs, size: int) -> list[Tensor]:
        return [poisoned(rows_in_block(inputs, size), g.shape[1], like=g) for g in inputs]

    return (
        Form("float copy, vector_norm, c @ g", _float_copies, lambda i: (factors, i)),
        Form(
            "float copy, vector_norm, mv, kept",
            _float_copies_kept,
            lambda i: (factors, i, floats(i), sums(i)[1]),
        ),
        *(
            Form(
                f"{block_name(size)} in float, addmv_, kept",
                _float_blocks_kept,
                functools.partial(lambda size, i: (factors, i, blocks(i, size), sums(i)[1]), size),
            )
            for size in block_bytes
        ),
        Form("half-precision c @ g", _half_product, lambda i: (factors, i)),
        Form("pointwise", _pointwise, lambda i: (factors, i), eager=False),
    )
