"""The step of DP-FedSOFIM in Triton.

A pass of partial dot products, a kernel of one program that adds them up in a fixed order and makes
the coefficients, and a pass that writes: nothing goes through the host.

Dot products are float64: two conversions and four multiply-adds an element, hidden behind the loads
where float64 runs at half of the float32 rate (data-centre GPUs).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import AheadOfTimeCase
from dpkernels.ops.sherman_morrison.triton_kernels import (
    step_coefficients_kernel,
    step_dots_kernel,
    step_write_kernel,
)
from dpkernels.ops.sherman_morrison.triton_launch import (
    BLOCK,
    WARPS,
    launch_arguments,
    programs_that_fill,
    split,
    variants,
    vector_of,
)

# Partial sums that the one program of the second kernel loads at a time: two a thread.
_REDUCE_BLOCK = 256


def sofim_step_(
    params: list[Tensor],
    momentum: list[Tensor],
    grads: list[Tensor],
    beta: float,
    rho: float,
    lr: float,
) -> Tensor:
    """One step over all tensors as one vector; returns float64 ``(M.G, |M|^2, applied)``."""
    flat = [
        tuple(x.contiguous().view(-1) for x in t) for t in zip(params, momentum, grads, strict=True)
    ]
    flat = [triple for triple in flat if triple[0].numel()]
    splits = [split(p.numel(), BLOCK, programs_that_fill(p.device)) for p, _, _ in flat]
    first = params[0]
    count = sum(programs for programs, _ in splits)
    partials = first.new_empty((count, 2), dtype=torch.float64)
    result = first.new_empty(5, dtype=torch.float64)
    with torch.cuda.device_of(first):
        start = 0
        for (p, m, g), (programs, each) in zip(flat, splits, strict=True):
            vector = vector_of(p, m, g)
            step_dots_kernel[(programs,)](
                m,
                g,
                partials[start:],
                p.numel() // vector,
                each,
                beta,
                **launch_arguments(VECTOR=vector, BLOCK=BLOCK),
            )
            start += programs
        step_coefficients_kernel[(1,)](
            partials,
            result,
            count,
            rho,
            lr,
            torch.finfo(first.dtype).max,
            **launch_arguments(BLOCK=_REDUCE_BLOCK),
        )
        for p, m, g in reversed(flat):
            vector = vector_of(p, m, g)
            step_write_kernel[(triton.cdiv(p.numel(), BLOCK),)](
                p,
                m,
                g,
                result,
                p.numel() // vector,
                beta,
                **launch_arguments(VECTOR=vector, BLOCK=BLOCK),
            )
    _copy_back([*params, *momentum], [x for i in (0, 1) for x in _column(flat, i)])
    return result[:3].clone()


def _column(triples: list[tuple[Tensor, ...]], index: int) -> list[Tensor]:
    return [triple[index] for triple in triples]


def _copy_back(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Write what was computed in a contiguous copy to the tensor that it is a copy of."""
    for target, source in zip([t for t in targets if t.numel()], sources, strict=True):
        if not target.is_contiguous():
            target.copy_(source.view(target.shape))


def step_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which ``sofim_step_`` launches its kernels."""
    coefficients = {"partials": "*fp64", "result": "*fp64", "count": "i64"}
    cases = [
        AheadOfTimeCase(
            kernel=step_coefficients_kernel,
            configuration="float64",
            signature={**coefficients, **dict.fromkeys(("rho", "lr", "limit"), "fp64")},
            constexprs={"BLOCK": _REDUCE_BLOCK},
            num_warps=WARPS,
            bytes_per_element=16,
        )
    ]
    sizes = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}
    for theta, grad in (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("fp64", "fp64")):
        cases += _step_cases(f"*{theta}", f"*{grad}", sizes[theta], sizes[grad])
    return cases


def _step_cases(theta: str, grad: str, size: int, grad_size: int) -> list[AheadOfTimeCase]:
    pointers = {"momentum": theta, "grads": grad}
    dots = {**pointers, "partials": "*fp64", "vectors": "i64", "blocks_per_program": "i32"}
    write = {"theta": theta, **pointers, "result": "*fp64", "vectors": "i64"}
    name, vector = f"{theta[1:]} grads {grad[1:]}", 16 // size
    block = {"BLOCK": BLOCK}
    return [
        *variants(
            step_dots_kernel,
            name,
            {**dots, "beta": "fp64"},
            block,
            vector,
            size + grad_size,
            tuple(pointers),
        ),
        *variants(
            step_write_kernel,
            name,
            {**write, "beta": "fp64"},
            block,
            vector,
            4 * size + grad_size,
            ("theta", *pointers),
        ),
    ]
