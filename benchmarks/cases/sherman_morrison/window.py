"""Solves with a window of k gradients, part by part.

Ours sum in float64. The plain forms do in float32, which is faster, and in float64, on a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import Bound, Case, Form, Inputs, Outputs, poisoned
from dpkernels.ops.sherman_morrison import reference

RHO = 0.5

operators = torch.ops.dpkernels


def _make_inputs(k: int, d: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """Return the window, a gradient, and weights for the last pass."""
    window = torch.randn(k, d, generator=generator, device=device)
    g = torch.randn(d, generator=generator, device=device)
    weights = torch.randn(k, generator=generator, device=device).div_(k).double()
    return [window, g, weights]


def _case(op: str, k: int, d: int, **fields: Any) -> Case:
    return Case(
        op=op,
        name=f"{op.rstrip('_')} {k} x {d:,}",
        dtype=torch.float32,
        parameters={"k": k, "d": d},
        make_inputs=lambda device, generator: _make_inputs(k, d, device, generator),
        **fields,
    )


def gram_case(k: int, d: int) -> Case:
    """Return the case of all products of a window and with a gradient."""
    bound: Bound = "read" if k <= 16 else "gemm"
    return _case(
        "window_gram",
        k,
        d,
        bytes_moved=4 * k * d,
        flops=d * (k + 1) * (k + 2),
        bound=bound,
        ours=Form("dpkernels", lambda w, g: [operators.window_gram(w, None, g)], _window_and_g),
        plain=(
            Form("float32 mm, mv", _gram_float32, _window_and_g),
            Form("float32 mm of one buffer", _gram_one_product, _with_g_as_row),
            Form("float64 mm", _gram_float64, _window_and_g),
        ),
        truth=lambda inputs: [reference.window_gram(inputs[0], None, inputs[1])],
    )


def _window_and_g(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs[0], inputs[1]


def _with_g_as_row(inputs: Inputs) -> tuple[Tensor]:
    return (torch.cat((inputs[0], inputs[1].unsqueeze(0))),)


def _gram_float32(window: Tensor, g: Tensor) -> Outputs:
    return [torch.cat((window @ window.T, (window @ g).unsqueeze(1)), 1)]


def _gram_one_product(rows: Tensor) -> Outputs:
    return [(rows @ rows.T)[:-1]]


def _gram_float64(window: Tensor, g: Tensor) -> Outputs:
    return [reference.window_gram(window, None, g)]


def project_case(k: int, d: int) -> Case:
    """Return the case of the products of a window with a gradient."""
    return _case(
        "window_project",
        k,
        d,
        bytes_moved=4 * (k + 1) * d,
        flops=2 * k * d,
        bound="read",
        ours=Form("dpkernels", lambda w, g: [operators.window_project(w, g)], _window_and_g),
        plain=(
            Form("float32 mv", lambda w, g: [torch.mv(w, g)], _window_and_g),
            Form("float64 mv", lambda w, g: [reference.window_project(w, g)], _window_and_g),
        ),
        truth=lambda inputs: [reference.window_project(inputs[0], inputs[1])],
    )


def combine_case(k: int, d: int) -> Case:
    """Return the case of the last pass, ``(g - W^T y) / rho``."""
    return _case(
        "window_combine_",
        k,
        d,
        bytes_moved=4 * (k + 2) * d,
        flops=2 * k * d,
        bound="read",
        ours=Form("dpkernels", _combine, _with_out),
        plain=(
            Form("addmv(out=)", _addmv, _with_float_weights),
            Form("addmm(out=)", _addmm, _with_float_weights),
        ),
        truth=_combine_truth,
    )


def _with_out(inputs: Inputs) -> tuple[Tensor, ...]:
    return poisoned(len(inputs[1]), like=inputs[1]), *inputs


def _with_float_weights(inputs: Inputs) -> tuple[Tensor, ...]:
    window, g, weights = inputs
    return poisoned(len(g), like=g), window, g, weights.float()


def _combine(out: Tensor, window: Tensor, g: Tensor, weights: Tensor) -> Outputs:
    operators.window_combine_(out, window, g, weights, 1 / RHO)
    return [out]


def _addmv(out: Tensor, window: Tensor, g: Tensor, weights: Tensor) -> Outputs:
    return [torch.addmv(g, window.T, weights, beta=1 / RHO, alpha=-1 / RHO, out=out)]


def _addmm(out: Tensor, window: Tensor, g: Tensor, weights: Tensor) -> Outputs:
    rows = out.unsqueeze(0)
    torch.addmm(
        g.unsqueeze(0), weights.unsqueeze(0), window, beta=1 / RHO, alpha=-1 / RHO, out=rows
    )
    return [out]


def _combine_truth(inputs: Inputs) -> Outputs:
    window, g, weights = inputs
    out = torch.empty_like(g, dtype=torch.float64)
    reference.window_combine_(out, window, g, weights, 1 / RHO)
    return [out]
