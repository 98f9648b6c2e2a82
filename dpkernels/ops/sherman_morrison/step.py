"""DP-FedSOFIM's server step: a rank-one natural gradient in two passes over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite, check_writable
from dpkernels.ops.sherman_morrison import reference

DTYPES = frozenset({torch.float32, torch.float64})
_HALF = (torch.bfloat16, torch.float16)
_OP = "sofim_step_"


class SofimStep(NamedTuple):
    """What ``sofim_step_`` saw: ``values`` are the three below, float64 on the parameters' device.

    Reading a property of a tensor on a GPU waits for it; ``values`` does not.
    """

    values: Tensor

    @property
    def momentum_dot_grad(self) -> float:
        """M.G over all parameters, with the momentum as it is after the step."""
        return self.values[0].item()

    @property
    def momentum_sq_norm(self) -> float:
        """|M|^2 over all parameters, after the step."""
        return self.values[1].item()

    @property
    def applied(self) -> bool:
        """False where one of them is not finite: then nothing was written."""
        return self.values[2].item() != 0


def sofim_step_(
    params: Tensor | Sequence[Tensor],
    momentum: Tensor | Sequence[Tensor],
    grads: Tensor | Sequence[Tensor],
    *,
    beta: float,
    rho: float,
    lr: float,
    check: bool = True,
) -> SofimStep:
    """One in-place step of DP-FedSOFIM, on the gradient after clipping and noise.

    M <- beta M + (1 - beta) G;  theta <- theta - lr H G  with  H = (rho I + M M^T)^-1
    = I / rho - M M^T / (rho^2 + rho |M|^2)  (Sherman-Morrison). A list of parameters is one vector:
    there is one M.G and one |M|^2 over all of it.

    params: theta, float32 or float64 of any shape and strides, or a list of such.
    momentum: M, of the shapes and dtype of params; zeros before the first step.
    grads: G, of the shapes of params; their dtype, or bfloat16 or float16 beside float32.
    beta: in [0, 1).
    rho: > 0, the damping of the Fisher matrix M M^T.
    lr: the step size, >= 0.
    check: raise if a gradient or momentum is not finite. On a GPU that waits for it; without the
        check, and under torch.compile, ``applied`` of the result tells.

    About 12 flops an element. The first pass reads M and G for the two dot products, the second
    reads M, G and theta and writes M and theta: 7 d elements. Because nothing is written before the
    dot products are known, a step that is refused leaves parameters and momentum as they were.
    Raises ValueError for bad input, non-finite elements of grads or momentum (float64: past 1e154)
    included, before anything is written.
    """
    thetas = [params] if isinstance(params, Tensor) else list(params)
    ms = [momentum] if isinstance(momentum, Tensor) else list(momentum)
    gs = [grads] if isinstance(grads, Tensor) else list(grads)
    if not thetas or not len(thetas) == len(ms) == len(gs):
        raise ValueError(
            f"{_OP}: params, momentum and grads must be lists of one length, at least 1, got "
            f"{len(thetas)}, {len(ms)} and {len(gs)} tensors"
        )
    first = thetas[0]
    if first.dtype not in DTYPES:
        raise ValueError(
            f"{_OP}: params must be float32 or float64, got {first.dtype}; keep a float32 copy of "
            "half-precision parameters and step that"
        )
    run = backend.select(_sofim_step, first.device, first.dtype)
    compiling = torch.compiler.is_compiling()
    # The compiled operator makes the same checks before it writes. Made here, with a cold cache,
    # they take about 0.1 ms, beside 0.7 ms for 1 M parameters. The words of a refusal come from
    # here.
    checks_itself = run is _sofim_step.overload and not compiling
    if not checks_itself or not all(x.is_cpu for x in (*thetas, *ms, *gs)):
        _check(thetas, ms, gs, beta, rho, lr)
    try:
        result = SofimStep(run(thetas, ms, gs, beta, rho, lr))
    except (RuntimeError, ValueError):
        _check(thetas, ms, gs, beta, rho, lr)
        raise
    if check and not compiling:
        _check_applied(result)
    return result


def _check(
    thetas: list[Tensor], ms: list[Tensor], gs: list[Tensor], beta: float, rho: float, lr: float
) -> None:
    first = thetas[0]
    _check_numbers(beta, rho, lr, first.dtype)
    grad_dtypes = (first.dtype, *(_HALF if first.dtype == torch.float32 else ()))
    if gs[0].dtype not in grad_dtypes:
        raise ValueError(
            f"{_OP}: grads must be {' or '.join(map(str, grad_dtypes))} beside {first.dtype} "
            f"params, got {gs[0].dtype}; convert them"
        )
    wanted = {"params": first.dtype, "momentum": first.dtype, "grads": gs[0].dtype}
    for index, triple in enumerate(zip(thetas, ms, gs, strict=True)):
        for (name, dtype), x in zip(wanted.items(), triple, strict=True):
            if x.shape != triple[0].shape or x.dtype != dtype or x.device != first.device:
                raise ValueError(
                    f"{_OP}: {name}[{index}] must be {list(triple[0].shape)} {dtype} on "
                    f"{first.device}, got {list(x.shape)} {x.dtype} on {x.device}"
                )
    check_writable(_OP, "params", thetas, gs)
    check_writable(_OP, "momentum", ms, gs)
    check_writable(_OP, "params and momentum", [*thetas, *ms], [])


def _check_numbers(beta: float, rho: float, lr: float, dtype: torch.dtype) -> None:
    if not 0 <= beta < 1:
        raise ValueError(f"{_OP}: beta must be in [0, 1), got {beta}")
    check_finite(_OP, "rho", rho, above=0.0)
    check_finite(_OP, "lr", lr, at_least=0.0)
    if not lr / rho <= torch.finfo(dtype).max:
        raise ValueError(
            f"{_OP}: lr / rho must be a finite number of {dtype}, got {lr:g} / {rho:g}; rho is the "
            "damping: .1 to 10 is usual"
        )


def _check_applied(result: SofimStep) -> None:
    dot, sq_norm, applied = result.values.tolist()
    if not applied:
        raise ValueError(
            f"{_OP}: grads or momentum are not finite (M.G = {dot:g}, |M|^2 = {sq_norm:g}); "
            "nothing was written: look for the overflow before the noise, or skip this step"
        )


def _fake_sofim_step(
    params: list[Tensor],
    momentum: list[Tensor],
    grads: list[Tensor],
    beta: float,
    rho: float,
    lr: float,
) -> Tensor:
    return params[0].new_empty(3, dtype=torch.float64)


_sofim_step = backend.register(
    "sofim_step_(Tensor(a!)[] params, Tensor(b!)[] momentum, Tensor[] grads, float beta, float "
    "rho, float lr) -> Tensor",
    reference=reference.sofim_step_,
    fake=_fake_sofim_step,
    dtypes=DTYPES,
    triton="dpkernels.ops.sherman_morrison.triton_impl:sofim_step_",
)
