"""The Hessian's spectrum: equal to that of the Hessian itself, where that can be formed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpkernels.engine.private import make_private
from dpkernels.precondition.diagnostics_hessian import Spectrum, hessian_spectrum, lanczos
from dpkernels.train.models import build

EPS = 2.0**-52
# Nodes and weights come from at most 15 steps on at most 26 elements, each of which rounds by EPS
# relative to the largest eigenvalue; weights also feel how close nodes are, a tenth of that here.
ROUNDED = 15 * 26 * 10 * EPS


def moment(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size + 2, size, generator=generator, dtype=torch.float64)
    return x.T @ x / size


def network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def hessian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def mean(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        values = {n: v.view(s) for n, v, s in zip(names, parts, shapes, strict=True)}
        return losses(torch.func.functional_call(model, values, (x,)), y).mean()

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.autograd.functional.hessian(mean, flat)


def test_with_all_steps_lanczos_finds_every_eigenvalue() -> None:
    matrix = moment(15, 0)
    start = torch.randn(15, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = lanczos(lambda vector: matrix @ vector, start, 15)
    wanted = torch.linalg.eigvalsh(matrix)
    assert (found.nodes - wanted).abs().max() <= 15**2 * EPS * wanted.max()
    assert float(found.weights.sum()) == pytest.approx(1, rel=ROUNDED)


def test_few_steps_have_the_first_moments_of_the_hessian() -> None:
    model, x, y = network()
    matrix = hessian(model, x, y)
    found = hessian_spectrum(model, losses, [x], y, steps=3, vectors=1, seed=5)
    generator = torch.Generator().manual_seed(5)
    v = torch.randn(len(matrix), generator=generator, dtype=torch.float64)
    v /= v.norm()
    # Gauss quadrature with 3 nodes is exact up to the fifth power.
    power = v
    scale = float(torch.linalg.matrix_norm(matrix, 2))
    for degree in range(6):
        moment_of_nodes = float((found.weights * found.nodes**degree).sum())
        assert abs(moment_of_nodes - float(v @ power)) <= ROUNDED * scale**degree
        power = matrix @ power


def test_a_loss_that_is_an_average_is_refused_and_a_sum_is_not() -> None:
    model, x, y = network()
    with pytest.raises(ValueError, match="it is an average"):
        hessian_spectrum(model, functional.cross_entropy, [x], y, steps=2, vectors=1)
    each = hessian_spectrum(model, losses, [x], y, steps=2, vectors=1)
    total = hessian_spectrum(model, lambda o, t: losses(o, t).sum(), [x], y, steps=2, vectors=1)
    assert torch.equal(each.nodes, total.nodes)


def test_probing_leaves_the_model_and_the_random_state_alone() -> None:
    model, x, y = network()
    before = torch.get_rng_state()
    hessian_spectrum(model, losses, [x], y, steps=2, vectors=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and all(p.grad is None for p in model.parameters())


def test_lanczos_ends_where_the_space_does() -> None:
    matrix = torch.diag(torch.tensor([2.0, 2.0, 5.0, 5.0], dtype=torch.float64))
    found = lanczos(lambda vector: matrix @ vector, torch.ones(4, dtype=torch.float64), 4)
    assert found.nodes.tolist() == pytest.approx([2, 5], rel=ROUNDED)
    assert found.weights.tolist() == pytest.approx([0.5, 0.5], rel=ROUNDED)


def test_a_density_integrates_to_one() -> None:
    spectrum = Spectrum(torch.tensor([0.0, 1.0]).double(), torch.tensor([0.25, 0.75]).double(), 4)
    at = torch.linspace(-3, 4, 7001, dtype=torch.float64)
    density = spectrum.density(at, 0.1)
    # Sums of a Gaussian on a grid much finer than its width converge faster than any power.
    assert float(density.sum() * (at[1] - at[0])) == pytest.approx(1, rel=1e-9)
    peak = 0.75 / (0.1 * math.sqrt(2 * math.pi))
    assert float(density[4000]) == pytest.approx(peak, rel=1e-9)


def spread(function_of_eigenvalues: torch.Tensor, vectors: int = 1) -> float:
    """Return the standard deviation of the quadrature's mean over random vectors.

    The weights of a Gaussian vector's directions are Dirichlet's with parameters 1/2: the variance
    of a weighted mean of f is 2 Var(f) / (n + 2).
    """
    variance = float(function_of_eigenvalues.var(correction=0))
    return math.sqrt(2 * variance / (len(function_of_eigenvalues) + 2) / vectors)


def test_moments_of_the_density_are_traces_of_powers() -> None:
    model, x, y = network()
    eigenvalues = torch.linalg.eigvalsh(hessian(model, x, y))
    found = hessian_spectrum(model, losses, [x], y, steps=8, vectors=100)
    assert found.size == len(eigenvalues) == 26
    assert float(found.weights.sum()) == pytest.approx(1, rel=ROUNDED)
    for power in (1, 2, 3):
        wanted = eigenvalues**power
        moment_of_nodes = float((found.weights * found.nodes**power).sum())
        # One draw in 500 million is as far off as six standard deviations.
        assert abs(moment_of_nodes - float(wanted.mean())) <= 6 * spread(wanted, 100)


def test_the_density_has_every_cluster_of_a_known_matrix() -> None:
    generator = torch.Generator().manual_seed(2)
    bulk, few = torch.rand(1500, generator=generator), 4 + torch.rand(500, generator=generator)
    eigenvalues = torch.cat([bulk, few]).double()
    start = torch.randn(2000, generator=generator, dtype=torch.float64)
    found = lanczos(lambda vector: eigenvalues * vector, start, 30)
    at = torch.linspace(-1, 6, 7001, dtype=torch.float64)
    density = found.density(at, 0.05)
    above = float(density[at > 2.5].sum() * (at[1] - at[0]))
    assert abs(above - 0.25) <= 6 * spread((eigenvalues > 2.5).double())
    assert float(density[(at > 1.5) & (at < 3.5)].max()) < 1e-2 * float(density.max())


def test_an_outlier_is_found_once_however_many_steps() -> None:
    # Without orthogonalisation, copies of 100 appear as soon as it has converged.
    eigenvalues = torch.cat([torch.linspace(0, 1, 299), torch.tensor([100.0])])
    start = torch.randn(300, generator=torch.Generator().manual_seed(0))
    found = lanczos(lambda vector: eigenvalues * vector, start, 100)
    assert len(found.nodes) == 100
    assert int((found.nodes > 50).sum()) == 1


def test_a_million_parameters_in_float32_take_all_steps() -> None:
    eigenvalues = torch.linspace(1, 1.2, 1_000_000)
    start = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    found = lanczos(lambda vector: eigenvalues * vector, start, 4)
    assert len(found.nodes) == 4
    squares = (eigenvalues.double() - 1.1).square()
    variance = float((found.weights * (found.nodes - 1.1).square()).sum())
    assert abs(variance - float(squares.mean())) <= 6 * spread(squares)


def test_the_decay_counts_eigenvalues_by_magnitude() -> None:
    matrix = torch.diag(torch.tensor([1.0, -4.0, 2.0, 3.0], dtype=torch.float64))
    found = lanczos(lambda vector: matrix @ vector, torch.ones(4, dtype=torch.float64), 4)
    magnitudes, counts = found.decay()
    assert magnitudes.tolist() == pytest.approx([4, 3, 2, 1], rel=ROUNDED)
    assert counts.tolist() == pytest.approx([1, 2, 3, 4], rel=ROUNDED)


def test_attention_has_second_derivatives() -> None:
    torch.manual_seed(0)
    model = build("vit", (1, 8, 8), 3).double().eval()
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.arange(4) % 3
    found = hessian_spectrum(model, losses, [x], y, steps=1, vectors=1, seed=1)
    parameters = list(model.parameters())
    v = torch.randn(found.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = (v / v.norm()).split([p.numel() for p in parameters])

    def slope(at: float) -> float:
        moved = {
            name: p.detach() + at * part.view_as(p)
            for (name, p), part in zip(model.named_parameters(), parts, strict=True)
        }
        moved = {name: value.requires_grad_() for name, value in moved.items()}
        loss = losses(torch.func.functional_call(model, moved, (x,)), y).mean()
        gradients = torch.autograd.grad(loss, list(moved.values()))
        return float(torch.cat([g.flatten() for g in gradients]) @ torch.cat(parts))

    coarse, fine = ((slope(h) - slope(-h)) / (2 * h) for h in (2e-3, 1e-3))
    # Errors of differences go with h^2: the finer one's is a third of what the two differ by.
    assert abs(float(found.nodes) - fine) <= abs(coarse - fine)


def test_a_model_in_private_training_is_left_alone() -> None:
    model, x, y = network()
    wanted = hessian_spectrum(model, losses, [x], y, steps=3, vectors=1)
    training = make_private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=8,
        loss_reduction="sum",
    )
    losses(model(x), y).sum().backward()
    found = hessian_spectrum(model, losses, [x], y, steps=3, vectors=1)
    assert torch.equal(found.nodes, wanted.nodes)
    assert (training.samples, training.microbatches) == (8, 1)


def test_what_is_wrong_is_said() -> None:
    model, x, y = network()
    with pytest.raises(ValueError, match="at least 1, got 0 and 4"):
        hessian_spectrum(model, losses, [x], y, steps=0)
    with pytest.raises(ValueError, match="gradient of the loss must be finite"):
        hessian_spectrum(model, losses, [x * math.inf], y)
