"""Clipped sums of several float32 tensors ``[B, D_l]`` in plain PyTorch, as an expert would."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from benchmarks.cases.clip.data import BLOCK_BYTES, Factors, block_name, rows_in_block, sums
from benchmarks.registry import Form, Inputs, Outputs, poisoned

# Tensors narrower than this may be packed into one, to save calls; each limit is a form of its own.
_NARROW = (64, 1024)


def _each(factors: Factors, gs: list[Tensor]) -> Outputs:
    norms = torch.stack([vector_norm(g, dim=1) for g in gs])
    c = factors(vector_norm(norms, dim=0))
    return [c @ g for g in gs]


def _each_kept(factors: Factors, gs: list[Tensor], norms: Tensor, outs: list[Tensor]) -> Outputs:
    for g, row in zip(gs, norms, strict=True):
        vector_norm(g, dim=1, out=row)
    c = factors(vector_norm(norms, dim=0))
    for g, out in zip(gs, outs, strict=True):
        torch.mv(g.t(), c, out=out)
    return outs


def _cat(factors: Factors, gs: list[Tensor]) -> Outputs:
    g = torch.cat(gs, dim=1)
    total = factors(vector_norm(g, dim=1)) @ g
    return list(total.split([g.shape[1] for g in gs]))


def _cat_kept(
    factors: Factors, gs: list[Tensor], g: Tensor, flat: Tensor, outs: list[Tensor]
) -> Outputs:
    torch.cat(gs, dim=1, out=g)
    torch.mv(g.t(), factors(vector_norm(g, dim=1)), out=flat)
    return outs


def _narrow_packed_kept(
    factors: Factors,
    gs: list[Tensor],
    packed: Tensor,
    norms: Tensor,
    flat: Tensor,
    outs: list[Tensor],
    narrow: int,
) -> Outputs:
    """Copy the narrow tensors side by side and treat them as one: fewer calls, few bytes."""
    torch.cat([g for g in gs if g.shape[1] < narrow], dim=1, out=packed)
    wide = [(g, out) for g, out in zip(gs, outs, strict=True) if g.shape[1] >= narrow]
    jobs = [*wide, (packed, flat)]
    for (g, _), row in zip(jobs, norms, strict=True):
        vector_norm(g, dim=1, out=row)
    c = factors(vector_norm(norms, dim=0))
    for g, out in jobs:
        torch.mv(g.t(), c, out=out)
    return outs


def _blocks_kept(factors: Factors, gs: list[Tensor], outs: list[Tensor], rows: int) -> Outputs:
    for out in outs:
        out.zero_()
    for blocks in zip(*(g.split(rows) for g in gs), strict=True):
        norms = torch.stack([vector_norm(block, dim=1) for block in blocks])
        c = factors(vector_norm(norms, dim=0))
        for block, out in zip(blocks, outs, strict=True):
            out.addmv_(block.t(), c)
    return outs


def _pointwise_list(factors: Factors, gs: list[Tensor]) -> Outputs:
    sq_norms = torch.stack([g.square().sum(1) for g in gs]).sum(0)
    c = factors(sq_norms.sqrt()).unsqueeze(1)
    return [(c * g).sum(0) for g in gs]


def _packed_buffers(inputs: Inputs, narrow: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    batch = inputs[0].shape[0]
    width = sum(g.shape[1] for g in inputs if g.shape[1] < narrow)
    wide = sum(g.shape[1] >= narrow for g in inputs)
    packed, flat = (poisoned(*shape, like=inputs[0]) for shape in ((batch, width), (width,)))
    parts = iter(flat.split([g.shape[1] for g in inputs if g.shape[1] < narrow]))
    outs = [next(parts) if g.shape[1] < narrow else poisoned(g.shape[1], like=g) for g in inputs]
    return packed, poisoned(wide + 1, batch, like=inputs[0]), flat, outs


def list_forms(factors: Factors, block_bytes: Sequence[int] = BLOCK_BYTES) -> tuple[Form, ...]:
    """Return the forms for several float32 tensors; the first is the usual one."""

    def norms(inputs: Inputs) -> Tensor:
        return poisoned(len(inputs), inputs[0].shape[0], like=inputs[0])

    def side_by_side(inputs: Inputs) -> Tensor:
        return poisoned(inputs[0].shape[0], sum(g.shape[1] for g in inputs), like=inputs[0])

    return (
        Form("each: vector_norm, c @ g", _each, lambda i: (factors, i)),
        Form(
            "each: vector_norm, mv, kept",
            _each_kept,
            lambda i: (factors, i, norms(i), sums(i)[1]),
        ),
        Form("cat, vector_norm, c @ g", _cat, lambda i: (factors, i)),
        Form(
            "cat, vector_norm, mv, kept",
            _cat_kept,
            lambda i: (factors, i, side_by_side(i), *sums(i)),
        ),
        *(
            Form(
                f"those under {narrow} wide packed, mv, kept",
                _narrow_packed_kept,
                functools.partial(
                    lambda narrow, i: (factors, i, *_packed_buffers(i, narrow), narrow), narrow
                ),
            )
            for narrow in _NARROW
        ),
        *(
            Form(
                f"{block_name(size)}, addmv_, kept",
                _blocks_kept,
                functools.partial(
                    lambda size, i: (factors, i, sums(i)[1], rows_in_block(i, size)), size
                ),
            )
            for size in block_bytes
        ),
        Form("pointwise", _pointwise_list, lambda i: (factors, i), eager=False),
    )


def _per_layer(layer_factors: list[Factors], gs: list[Tensor]) -> Outputs:
    pairs = zip(layer_factors, gs, strict=True)
    return [factors(vector_norm(g, dim=1)) @ g for factors, g in pairs]


def _per_layer_kept(
    layer_factors: list[Factors], gs: list[Tensor], norms: Tensor, outs: list[Tensor]
) -> Outputs:
    for factors, g, out in zip(layer_factors, gs, outs, strict=True):
        vector_norm(g, dim=1, out=norms)
        torch.mv(g.t(), factors(norms), out=out)
    return outs


def _per_layer_pointwise(layer_factors: list[Factors], gs: list[Tensor]) -> Outputs:
    weights = [f(g.square().sum(1).sqrt()) for f, g in zip(layer_factors, gs, strict=True)]
    return [(c.unsqueeze(1) * g).sum(0) for c, g in zip(weights, gs, strict=True)]


def _per_layer_blocks(
    layer_factors: list[Factors], gs: list[Tensor], outs: list[Tensor], block_bytes: int
) -> Outputs:
    for factors, g, out in zip(layer_factors, gs, outs, strict=True):
        out.zero_()
        for block in g.split(rows_in_block([g], block_bytes)):
            out.addmv_(block.t(), factors(vector_norm(block, dim=1)))
    return outs


def per_layer_forms(
    layer_factors: list[Factors], block_bytes: Sequence[int] = BLOCK_BYTES
) -> tuple[Form, ...]:
    """Return the forms that clip each tensor by itself; ``layer_factors`` has one for each."""

    def norms(inputs: Inputs) -> Tensor:
        return poisoned(inputs[0].shape[0], like=inputs[0])

    return (
        Form("each: vector_norm, c @ g", _per_layer, lambda i: (layer_factors, i)),
        Form(
            "each: vector_norm, mv, kept",
            _per_layer_kept,
            lambda i: (layer_factors, i, norms(i), sums(i)[1]),
        ),
        *(
            Form(
                f"{block_name(size)}, addmv_, kept",
                _per_layer_blocks,
                functools.partial(lambda size, i: (layer_factors, i, sums(i)[1], size), size),
            )
            for size in block_bytes
        ),
        Form("pointwise", _per_layer_pointwise, lambda i: (layer_factors, i), eager=False),
    )
