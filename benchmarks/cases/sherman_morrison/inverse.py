"""The inverse of a matrix after a rank-one change, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs
from dpkernels.ops.sherman_morrison import rank_one_inverse_update_


def inverse_case(n: int, symmetric: bool) -> Case:
    """Return the case of one update of an n x n inverse."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        noise = torch.randn(n, n, generator=generator, device=device).mul_(0.5 / n**0.5)
        inverse = torch.eye(n, device=device).add_((noise + noise.T).triu_() / 2)
        if symmetric:
            inverse += inverse.triu(1).T
        # Of norm .1, so that thousands of rounds on one matrix leave it regular.
        vectors = torch.randn(2, n, generator=generator, device=device).mul_(0.1 / n**0.5)
        return [inverse, vectors[0], *([] if symmetric else [vectors[1]])]

    def arguments(inputs: Inputs) -> tuple[Tensor, ...]:
        return inputs[0].clone(), *inputs[1:]

    passes = 2.5 if symmetric else 3
    return Case(
        op="rank_one_inverse_update_",
        name=f"rank_one_inverse_update {n:,}{' symmetric' if symmetric else ''}",
        dtype=torch.float32,
        parameters={"n": n, "symmetric": symmetric},
        make_inputs=make_inputs,
        bytes_moved=int(passes * 4 * n * n),
        flops=(5 if symmetric else 6) * n * n,
        bound="update",
        ours=Form("dpkernels", _ours, arguments),
        plain=(
            Form("mv, addr_", _addr, arguments),
            Form("mv, addmm_", _addmm, arguments),
            Form("expression", _expression, arguments),
        ),
        truth=_truth,
    )


def _ours(inverse: Tensor, u: Tensor, v: Tensor | None = None) -> Outputs:
    rank_one_inverse_update_(inverse, u, v)
    return [inverse]


def _products(inverse: Tensor, u: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return H u, H^T v and the denominator."""
    p = torch.mv(inverse, u)
    if v is None:
        return p, p, 1 + torch.dot(u, p)
    return p, torch.mv(inverse.T, v), 1 + torch.dot(v, p)


def _addr(inverse: Tensor, u: Tensor, v: Tensor | None = None) -> Outputs:
    p, q, denominator = _products(inverse, u, v)
    return [inverse.addr_(p / denominator, q, alpha=-1)]


def _addmm(inverse: Tensor, u: Tensor, v: Tensor | None = None) -> Outputs:
    p, q, denominator = _products(inverse, u, v)
    return [inverse.addmm_((p / denominator).unsqueeze(1), q.unsqueeze(0), alpha=-1)]


def _expression(inverse: Tensor, u: Tensor, v: Tensor | None = None) -> Outputs:
    p, q, denominator = _products(inverse, u, v)
    return [inverse - torch.outer(p, q) / denominator]


def _truth(inputs: Inputs) -> Outputs:
    return _expression(*(x.double() for x in inputs))
