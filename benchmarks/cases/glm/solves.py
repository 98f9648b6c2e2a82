"""One round of Newton steps for many clients in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases.glm.data import (
    GAMMA,
    HESSIAN_BOUND,
    Size,
    curvatures,
    exact_hessian,
    hessian_factors,
    make_problem,
    probabilities,
    records_of,
)
from benchmarks.cases.glm.rounds import CHOLESKY_LOOP, cg_loop, hessian_bounds, newton_loop
from benchmarks.cases.glm.rounds import LOOP as CLIENTS
from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.glm import Records, newton_step, newton_step_cg, solve

LOOP = "Python loop of torch.linalg.solve"
# Clients whose Hessians a batched form holds at a time: 64 of 640 x 640 take 105 MB.
GROUP = 64
# Of one client with more classes than this, one product with x x^T for all pairs of classes beats
# a product for each: 1.4 against 4.1 ms for 64 x 10, 0.8 against 0.3 ms for 123 x 2.
FEW_CLASSES = 4
CG_TOLERANCE, CG_ITERATIONS = 1e-6, 100

Solver = Callable[[Tensor, Tensor], Tensor]


def _lu(matrices: Tensor, v: Tensor) -> Tensor:
    solutions: Tensor = torch.linalg.solve(matrices, v)
    return solutions


def _cholesky(matrices: Tensor, v: Tensor) -> Tensor:
    factors = torch.linalg.cholesky_ex(matrices).L
    return torch.cholesky_solve(v.unsqueeze(-1), factors).squeeze(-1)


def _one_by_one(solver: Solver, hessians: Tensor, v: Tensor, damped: Tensor) -> Outputs:
    """Solve client after client in one kept buffer."""
    solutions = torch.empty_like(v)
    for hessian, rhs, solution in zip(hessians, v, solutions, strict=True):
        damped[0].copy_(hessian).diagonal().add_(GAMMA)
        solution.copy_(solver(damped[0], rhs))
    return [solutions]


def _in_groups(solver: Solver, hessians: Tensor, v: Tensor, damped: Tensor) -> Outputs:
    """Solve batches of clients in a kept buffer."""
    size = len(damped)
    parts = []
    for some, rhs in zip(hessians.split(size), v.split(size), strict=True):
        buffer = damped[: len(some)].copy_(some)
        buffer.diagonal(dim1=1, dim2=2).add_(GAMMA)
        parts.append(solver(buffer, rhs))
    return [torch.cat(parts)]


def _exact(hessians: list[Tensor] | Tensor, v: Tensor) -> Outputs:
    solutions = []
    for hessian, rhs in zip(hessians, v, strict=True):
        damped = hessian.double()
        damped = damped + GAMMA * torch.eye(len(damped), dtype=torch.float64, device=v.device)
        solutions.append(_cholesky(damped, rhs.double().flatten()))
    return [torch.stack(solutions)]


def solve_case(size: Size, target: Target) -> Case:
    """Solve with given Hessians."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x, _, theta, v = make_problem(size, device, generator)
        hessians = x.new_empty(size.clients, size.width, size.width)
        for index, client in enumerate(zip(x, theta, strict=True)):
            hessians[index] = exact_hessian(*client)
        return [hessians, v.flatten(1)]

    def kept(count: int) -> Callable[[Inputs], tuple[Tensor, Tensor, Tensor]]:
        return lambda i: (i[0], i[1], torch.empty_like(i[0][:count]))

    def form(name: str, run: Callable[..., Outputs], solver: Solver, count: int) -> Form:
        return Form(name, lambda *arguments: run(solver, *arguments), kept(count), compilable=False)

    n = size.width
    return Case(
        op="glm_solve",
        name=f"glm solve, {size.clients} clients, {size.features} x {size.classes}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=make_inputs,
        bytes_moved=4 * size.clients * (n * n // 2 + 2 * n),
        flops=size.clients * (n**3 // 3 + 2 * n**2),
        bound="gemm",
        ours=Form("dpkernels", lambda h, v: [solve(h, v, GAMMA)], tuple),
        plain=(
            form(LOOP, _one_by_one, _lu, 1),
            form("Python loop of cholesky_ex, cholesky_solve", _one_by_one, _cholesky, 1),
            form("batched torch.linalg.solve", _in_groups, _lu, GROUP),
            form("batched cholesky_ex, cholesky_solve", _in_groups, _cholesky, GROUP),
        ),
        truth=lambda i: _exact(*i),
        target=target,
    )


def _hessians(x: Tensor, theta: Tensor) -> Tensor:
    """Clipped sums of a group of clients, by the faster of two forms."""
    p = probabilities(x, theta)
    curvature = curvatures(p, hessian_factors(x, p))
    clients, classes, features = theta.shape
    if clients > 1 or classes <= FEW_CLASSES:
        blocks = x.new_empty(clients, classes, features, classes, features)
        for a in range(classes):
            for b in range(a, classes):
                block = torch.bmm((x * curvature[..., a, b].unsqueeze(2)).mT, x)
                blocks[:, a, :, b] = block
                if a != b:
                    blocks[:, b, :, a] = block
    else:
        products = (x.unsqueeze(3) * x.unsqueeze(2)).reshape(*x.shape[:2], -1)
        sums = torch.bmm(curvature.reshape(*x.shape[:2], -1).mT, products)
        blocks = sums.view(clients, classes, classes, features, features).permute(0, 1, 3, 2, 4)
    return blocks.reshape(clients, classes * features, classes * features)


def _round(solver: Solver, group: int, x: Tensor, theta: Tensor, v: Tensor) -> Outputs:
    """Hessian sums and solves, ``group`` clients at a time; one alone is solved as a matrix."""
    parts = []
    for some, weights, rhs in zip(x.split(group), theta.split(group), v.split(group), strict=True):
        hessians = _hessians(some, weights)
        hessians.diagonal(dim1=1, dim2=2).add_(GAMMA)
        flat = rhs.flatten(1)
        parts.append(
            solver(hessians[0], flat[0]).unsqueeze(0) if group == 1 else solver(hessians, flat)
        )
    return [torch.cat(parts)]


def _reduced_flops(size: Size) -> int:
    """Hessian sum, then a Cholesky factorisation of one class less (see ``newton_step``)."""
    pairs, n = size.classes * (size.classes - 1) // 2, (size.classes - 1) * size.features
    sums = size.records * pairs * size.features * (size.features + 1)
    return size.clients * (sums + n**3 // 3 + 2 * n**2)


def _newton_truth(inputs: Inputs) -> Outputs:
    x, _, theta, v = inputs
    return _exact([exact_hessian(*client) for client in zip(x, theta, strict=True)], v)


def newton_case(size: Size, target: Target) -> Case:
    """Hessian sums and solves: one round of DP-FedNew."""

    def ours(records: Records, theta: Tensor, v: Tensor) -> Outputs:
        step = newton_step(
            records,
            theta,
            v,
            hessian_bound=HESSIAN_BOUND,
            gamma=GAMMA,
        )
        return [step.solutions.flatten(1)]

    def form(name: str, solver: Solver, group: int) -> Form:
        return Form(
            name,
            lambda *arguments: _round(solver, group, *arguments),
            lambda i: (i[0], i[2], i[3]),
            compilable=False,
        )

    return Case(
        op="glm_newton",
        name=f"glm Hessian sum and solve, {size}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * size.clients * (size.records * size.features + 3 * size.width),
        flops=_reduced_flops(size),
        bound="gemm",
        ours=Form("dpkernels", ours, lambda i: (records_of(i), i[2], i[3])),
        plain=(
            form(LOOP, _lu, 1),
            form("Python loop of cholesky_ex, cholesky_solve", _cholesky, 1),
            Form(
                CHOLESKY_LOOP,
                newton_loop,
                lambda i: (
                    *(i[0], i[2], i[3], hessian_bounds(i)),
                    poisoned(size.width, size.width, like=i[0]),
                ),
                compilable=False,
            ),
            form("batched torch.linalg.solve", _lu, GROUP),
            form("batched cholesky_ex, cholesky_solve", _cholesky, GROUP),
        ),
        truth=_newton_truth,
        target=target,
    )


def _batched_cg(x: Tensor, theta: Tensor, v: Tensor) -> Outputs:
    """Conjugate gradients of all clients at once, until all have converged."""
    p = probabilities(x, theta)
    weighted = p * hessian_factors(x, p).unsqueeze(2)
    y, remainder, direction = torch.zeros_like(v), v.clone(), v.clone()
    square = start = remainder.square().sum((1, 2), keepdim=True)
    for _ in range(CG_ITERATIONS):
        scores = torch.bmm(x, direction.mT)
        scores -= (p * scores).sum(2, keepdim=True)
        image = torch.bmm(scores.mul_(weighted).mT, x).add_(direction, alpha=GAMMA)
        step = square / (direction * image).sum((1, 2), keepdim=True)
        y.addcmul_(step, direction)
        remainder.addcmul_(step, image, value=-1)
        before, square = square, remainder.square().sum((1, 2), keepdim=True)
        if bool((square <= CG_TOLERANCE**2 * start).all()):
            break
        direction.mul_(square / before).add_(remainder)
    return [y.flatten(1)]


def cg_case(size: Size, target: Target) -> Case:
    """The same systems without any Hessian."""

    def ours(records: Records, theta: Tensor, v: Tensor) -> Outputs:
        step = newton_step_cg(
            records,
            theta,
            v,
            hessian_bound=HESSIAN_BOUND,
            gamma=GAMMA,
            tolerance=CG_TOLERANCE,
            max_iterations=CG_ITERATIONS,
        )
        return [step.solutions.flatten(1)]

    # Nearly all clients take nine iterations, and the residual is one more product.
    iterations = 10
    return Case(
        op="glm_newton_cg",
        name=f"glm conjugate gradients, {size}",
        dtype=torch.float32,
        parameters={**size.parameters, "tolerance": CG_TOLERANCE},
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * size.clients * (size.records * size.features + 3 * size.width),
        flops=iterations * 4 * size.clients * size.records * size.width,
        bound="gemm",
        ours=Form("dpkernels", ours, lambda i: (records_of(i), i[2], i[3])),
        plain=(
            Form("batched bmm", _batched_cg, lambda i: (i[0], i[2], i[3]), compilable=False),
            Form(
                CLIENTS,
                cg_loop,
                lambda i: (
                    *(i[0], i[2], i[3], hessian_bounds(i)),
                    *(poisoned(*i[3].shape, like=i[3]), CG_TOLERANCE, CG_ITERATIONS),
                ),
                compilable=False,
            ),
        ),
        truth=_newton_truth,
        target=target,
    )
