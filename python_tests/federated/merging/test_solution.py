"""Which of the minimisers is found: Proposition 2 and Lemma 1 of FedFisher, by dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.federated import ConjugateGradients, GradientDescent, merge
from dpkernels.federated.merging.preconditioners import SHIFT, inverse_of
from dpkernels.federated.merging.quadratic import quadratic
from dpkernels.federated.merging.solvers import safe_rates
from dpkernels.federated.merging.states import mean
from dpkernels.fisher import Fisher, Kronecker
from python_tests.federated.merging.cases import (
    CONVOLUTION,
    LINEAR,
    NORM,
    clients,
    matrix,
    semidefinite,
    system,
)

LAYERS = (CONVOLUTION, LINEAR, NORM)
P = [0.5, 0.3, 0.2]
TOLERANCE = 1e-10
TO_THE_END = ConjugateGradients(iterations=500, tolerance=TOLERANCE)


def nearest(f: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """Return the projection of ``start`` onto the solutions of F W = b."""
    return start + torch.linalg.pinv(f, hermitian=True) @ (b - f @ start)


def smallest(f: Tensor) -> float:
    """Return the smallest eigenvalue that is not zero."""
    eigenvalues = torch.linalg.eigvalsh(f)
    return float(eigenvalues[eigenvalues > 1e-12 * eigenvalues[-1]][0])


@pytest.mark.parametrize("preconditioner", [None, "diagonal", "kronecker"])
@pytest.mark.parametrize("lost", [0, 2])
def test_the_normal_equation_holds(preconditioner, lost) -> None:
    states, fishers = clients(3, lost=lost)
    solver = ConjugateGradients(500, TOLERANCE, preconditioner)
    found = merge(states, fishers, weights=P, solver=solver).state
    for layer in LAYERS:
        f, b, start = system(states, fishers, P, layer)
        left = torch.linalg.vector_norm(f @ matrix(found, layer) - b)
        assert left <= 2 * TOLERANCE * torch.linalg.vector_norm(f @ start - b)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_conjugate_gradients_find_the_solution_nearest_to_the_mean(lost) -> None:
    # Two clients, so that even their sum is singular.
    states, fishers = clients(2, seed=lost, lost=lost)
    found = merge(states, fishers, weights=P[:2], solver=TO_THE_END).state
    shares = [share / sum(P[:2]) for share in P[:2]]
    for layer in LAYERS:
        f, b, start = system(states, fishers, shares, layer)
        assert lost == 0 or torch.linalg.matrix_rank(f, hermitian=True) < len(f)
        error = torch.linalg.vector_norm(matrix(found, layer) - nearest(f, b, start))
        residual = torch.linalg.vector_norm(f @ start - b)
        assert error <= 2 * TOLERANCE * residual / smallest(f)


def test_gradient_descent_contracts_to_the_same_limit() -> None:
    # |W(T) - W*| <= (1 - rate lambda_min)^T |W(0) - W*|, lambda_min the smallest but zero.
    states, fishers = clients(2, lost=2)
    for steps in (50, 2000):
        found = merge(states, fishers, solver=GradientDescent(steps)).state
        for layer in LAYERS:
            f, b, start = system(states, fishers, [0.5, 0.5], layer)
            limit = nearest(f, b, start)
            rate = 0.75 / float(torch.linalg.eigvalsh(f)[-1])
            allowed = (1 - rate * smallest(f)) ** steps * torch.linalg.vector_norm(start - limit)
            error = torch.linalg.vector_norm(matrix(found, layer) - limit)
            assert error <= allowed * (1 + 1e-6) + 1e-12 * torch.linalg.vector_norm(start)


@pytest.mark.parametrize("lost", [0, 2])
def test_rates_are_below_the_inverse_of_the_largest_eigenvalue(lost) -> None:
    states, fishers = clients(3, lost=lost)
    blocks, objective = quadratic(states, fishers, P, mean(states, P), 0.0, [0, 1, 2])
    for block, rate in zip(blocks, safe_rates(objective), strict=True):
        f, _, _ = system(states, fishers, P, block.parameters)
        # 100 power iterations find these largest eigenvalues to well below a percent.
        assert 0.74 <= rate * float(torch.linalg.eigvalsh(f)[-1]) <= 1


def one_layer(gs: list[Tensor], as_: list[Tensor]) -> tuple[list[dict[str, Tensor]], list[Fisher]]:
    generator = torch.Generator().manual_seed(1)
    shape = (len(gs[0]), len(as_[0]))
    states = [{"w": torch.randn(shape, generator=generator).double()} for _ in gs]
    pairs = zip(gs, as_, strict=True)
    return states, [Fisher({"w": Kronecker("w", None, a, g)}, {}, 1) for g, a in pairs]


def limit_and_start(states, fishers, preconditioner) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    solver = ConjugateGradients(500, 1e-13, preconditioner)
    found = merge(states, fishers, solver=solver).state
    f, b, start = system(states, fishers, [0.5, 0.5], ("w",))
    return matrix(found, ("w",)), f, b, start


def test_a_preconditioner_of_the_same_range_keeps_the_limit() -> None:
    generator = torch.Generator().manual_seed(0)

    def in_one_range(size: int) -> list[Tensor]:
        root = torch.randn(size, size - 2, generator=generator).double()
        kernels = [semidefinite(size - 2, size - 2, generator, torch.float64) for _ in range(2)]
        return [root @ kernel @ root.mT for kernel in kernels]

    states, fishers = one_layer(in_one_range(4), in_one_range(5))
    found, f, b, start = limit_and_start(states, fishers, "kronecker")
    error = torch.linalg.vector_norm(found - nearest(f, b, start))
    residual = torch.linalg.vector_norm(f @ start - b)
    assert error <= 1e-12 * residual / smallest(f)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_a_kronecker_preconditioner_is_the_shifted_inverse_of_one_product(damping) -> None:
    generator = torch.Generator().manual_seed(0)
    g, a = (semidefinite(size, size, generator, torch.float64) for size in (4, 5))
    states, fishers = one_layer([2 * g, g], [a, 3 * a])
    _, objective = quadratic(states, fishers, [0.5, 0.5], states[0], damping, [0, 1])
    f, _, _ = system(states, fishers, [0.5, 0.5], ("w",))
    m = f + (SHIFT + damping) * f.trace() / len(f) * torch.eye(len(f), dtype=f.dtype)
    residual = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    (found,) = inverse_of("kronecker", objective)([residual], [0])
    torch.testing.assert_close(found.flatten(), torch.linalg.solve(m, residual.flatten()))


def test_another_preconditioner_finds_the_solution_nearest_in_its_own_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    gs = [semidefinite(4, 2, generator, torch.float64) for _ in range(2)]
    as_ = [semidefinite(5, 3, generator, torch.float64) for _ in range(2)]
    states, fishers = one_layer(gs, as_)
    found, f, b, start = limit_and_start(states, fishers, "kronecker")
    # The partial traces of F, straight from the dense matrix.
    by_rows = f.view(4, 5, 4, 5)
    of_g, of_a = torch.einsum("oipi->op", by_rows), torch.einsum("oioj->ij", by_rows)
    m = torch.kron(of_g, of_a) / f.trace() + SHIFT * f.trace() / len(f) * torch.eye(
        len(f), dtype=f.dtype
    )
    # min |W - start|_M with F W = b: start + M^-1 F (F M^-1 F)^+ (b - F start)
    through = torch.linalg.solve(m, f)
    wanted = start + through @ torch.linalg.pinv(f @ through, hermitian=True, rtol=1e-12) @ (
        b - f @ start
    )
    scale = torch.linalg.vector_norm(wanted - start)
    assert torch.linalg.vector_norm(found - wanted) <= 1e-9 * scale
    assert torch.linalg.vector_norm(found - nearest(f, b, start)) > 1e-2 * scale


def test_float32_is_as_near_as_its_rounding_lets_it() -> None:
    states, fishers = clients(3, dtype=torch.float32)
    found = merge(states, fishers, weights=P).state
    assert found["fc.weight"].dtype == torch.float32
    for layer in LAYERS:
        f, b, _ = system(states, fishers, P, layer)
        condition = float(torch.linalg.cond(f))
        wanted = torch.linalg.solve(f, b)
        error = torch.linalg.vector_norm(matrix(found, layer) - wanted)
        # The solver's tolerance, or eps, times the condition number.
        assert error <= 2e-6 * condition * torch.linalg.vector_norm(wanted)
