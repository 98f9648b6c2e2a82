"""The step of DP-FedSOFIM, over one vector and over a model's list of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, Target
from dpkernels.ops.sherman_morrison import sofim_step_

# The paper's beta and rho; eta from the middle of its grid.
BETA, RHO, LR = 0.9, 0.5, 0.1

AGAINST = "lerp_, two dot, two add_"

State = tuple[list[Tensor], list[Tensor], list[Tensor]]


def step_case(sizes: tuple[int, ...], target: Target | None = None) -> Case:
    """Return the case of one step over tensors of these sizes."""
    d, several = sum(sizes), len(sizes) > 1
    tensors = f" in {len(sizes)} tensors" if several else ""
    forms = _list_forms() if several else _vector_forms()
    return Case(
        op="sofim_step_",
        name=f"sofim_step {d:,}{tensors}",
        dtype=torch.float32,
        parameters={"sizes": list(sizes), "beta": BETA, "rho": RHO, "lr": LR},
        make_inputs=lambda device, generator: [
            torch.randn(size, generator=generator, device=device)
            for _ in range(3)
            for size in sizes
        ],
        bytes_moved=7 * 4 * d,
        flops=12 * d,
        bound="update",
        ours=Form("dpkernels", _ours, _state),
        plain=forms,
        truth=_truth,
        target=target or Target(),
    )


def _state(inputs: Inputs) -> State:
    """Return parameters, momentum and gradients; what is written is a copy."""
    n = len(inputs) // 3
    written = [x.clone() for x in inputs[: 2 * n]]
    return written[:n], written[n:], inputs[2 * n :]


def _vectors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    thetas, ms, gs = _state(inputs)
    return thetas[0], ms[0], gs[0]


def _ours(thetas: list[Tensor], ms: list[Tensor], gs: list[Tensor]) -> Outputs:
    sofim_step_(thetas, ms, gs, beta=BETA, rho=RHO, lr=LR)
    return [*thetas, *ms]


def _truth(inputs: Inputs) -> Outputs:
    """The in-place form in float64, over all tensors as one vector."""
    thetas, ms, gs = ([x.double() for x in xs] for xs in _state(inputs))
    ms = [m.lerp_(g, 1 - BETA) for m, g in zip(ms, gs, strict=True)]
    b = _along_momentum(_dot(ms, gs), _dot(ms, ms))
    for theta, m, g in zip(thetas, ms, gs, strict=True):
        theta.add_(g, alpha=-LR / RHO).add_(m, alpha=b)
    return [*thetas, *ms]


def _dot(xs: list[Tensor], ys: list[Tensor]) -> float:
    return sum(torch.dot(x, y).item() for x, y in zip(xs, ys, strict=True))


def _along_momentum(dot: float, square: float) -> float:
    return LR * dot / (RHO**2 + RHO * square)


def _in_place(theta: Tensor, m: Tensor, g: Tensor) -> Outputs:
    m.lerp_(g, 1 - BETA)
    b = _along_momentum(torch.dot(m, g).item(), torch.dot(m, m).item())
    theta.add_(g, alpha=-LR / RHO).add_(m, alpha=b)
    return [theta, m]


def _expression(theta: Tensor, m: Tensor, g: Tensor) -> Outputs:
    """As the paper writes it: nothing in place."""
    m = BETA * m + (1 - BETA) * g
    theta = theta - LR * (g / RHO - m * (m @ g) / (RHO**2 + RHO * (m @ m)))
    return [theta, m]


def _by_products(theta: Tensor, both: Tensor) -> Outputs:
    """M and G are the rows of one buffer, so that the step is one product.

    (Both dots as one ``mv`` would save a pass too, but lose four times the accuracy.)
    """
    m, g = both
    m.lerp_(g, 1 - BETA)
    b = _along_momentum(torch.dot(m, g).item(), torch.dot(m, m).item())
    theta.addmv_(both.T, torch.tensor([b, -LR / RHO], device=both.device))
    return [theta, m]


def _as_rows(inputs: Inputs) -> tuple[Tensor, Tensor]:
    theta, m, g = inputs
    return theta.clone(), torch.stack((m, g))


def _for_the_compiler(theta: Tensor, m: Tensor, g: Tensor) -> Outputs:
    """No number leaves the graph, so that it may fuse what it can."""
    m.lerp_(g, 1 - BETA)
    b = LR * (m * g).sum() / (RHO**2 + RHO * (m * m).sum())
    theta.sub_(LR / RHO * g - b * m)
    return [theta, m]


def _vector_forms() -> tuple[Form, ...]:
    return (
        Form(AGAINST, _in_place, _vectors),
        Form("expression", _expression, _vectors),
        Form("lerp_, two dot, addmv_", _by_products, _as_rows),
        Form("fused by the compiler", _for_the_compiler, _vectors, eager=False),
    )


def _loop(thetas: list[Tensor], ms: list[Tensor], gs: list[Tensor]) -> Outputs:
    for m, g in zip(ms, gs, strict=True):
        m.lerp_(g, 1 - BETA)
    b = _along_momentum(_dot(ms, gs), _dot(ms, ms))
    for theta, m, g in zip(thetas, ms, gs, strict=True):
        theta.add_(g, alpha=-LR / RHO).add_(m, alpha=b)
    return [*thetas, *ms]


def _foreach(thetas: list[Tensor], ms: list[Tensor], gs: list[Tensor]) -> Outputs:
    torch._foreach_lerp_(ms, gs, 1 - BETA)
    dots = [torch.dot(m, g) for m, g in zip(ms, gs, strict=True)]
    squares = [torch.dot(m, m) for m in ms]
    dot, square = torch.stack([*dots, *squares]).view(2, -1).sum(1).tolist()
    torch._foreach_add_(thetas, gs, alpha=-LR / RHO)
    torch._foreach_add_(thetas, ms, alpha=_along_momentum(dot, square))
    return [*thetas, *ms]


def _list_for_the_compiler(thetas: list[Tensor], ms: list[Tensor], gs: list[Tensor]) -> Outputs:
    torch._foreach_lerp_(ms, gs, 1 - BETA)
    dot = torch.stack([(m * g).sum() for m, g in zip(ms, gs, strict=True)]).sum()
    square = torch.stack([(m * m).sum() for m in ms]).sum()
    b = LR * dot / (RHO**2 + RHO * square)
    for theta, m, g in zip(thetas, ms, gs, strict=True):
        theta.sub_(LR / RHO * g - b * m)
    return [*thetas, *ms]


def _flat_views(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Outputs]:
    """Return everything in one buffer each, as if the model had been built so, and its views."""
    n = len(inputs) // 3
    sizes = [x.numel() for x in inputs[:n]]
    theta, m, g = (torch.cat(inputs[i * n : (i + 1) * n]) for i in range(3))
    return theta, m, g, [*theta.split(sizes), *m.split(sizes)]


def _flat(theta: Tensor, m: Tensor, g: Tensor, views: Outputs) -> Outputs:
    _in_place(theta, m, g)
    return views


def _list_forms() -> tuple[Form, ...]:
    return (
        Form("loop of " + AGAINST, _loop, _state),
        Form("foreach", _foreach, _state),
        Form(f"{AGAINST} of flat buffers", _flat, _flat_views),
        Form("fused by the compiler", _list_for_the_compiler, _state, eager=False),
    )
