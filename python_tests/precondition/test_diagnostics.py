"""Diagnostics: equal to what they stand for, where that can be formed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpkernels.precondition import diagnostics
from dpkernels.precondition.diagnostics_hessian import Spectrum, hessian_spectrum, lanczos
from dpkernels.precondition.diagnostics_plots import plot_alignment, plot_spectra

EPS = 2.0**-52


def moment(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size + 2, size, generator=generator, dtype=torch.float64)
    return x.T @ x / size


def test_the_spectrum_is_that_of_the_kronecker_product() -> None:
    a, g = moment(4, 0), moment(3, 1)
    wanted = torch.linalg.eigvalsh(torch.kron(a, g)).flip(0)
    found = diagnostics.kronecker_spectrum(a, g)
    # Eigenvalues are known to the norm times eps, times a modest power of the size.
    assert (found - wanted).abs().max() <= 12 * 12 * EPS * wanted.max()


def test_alignment_is_that_of_the_kronecker_products() -> None:
    a, g, other_a, other_g = moment(4, 0), moment(3, 1), moment(4, 2), moment(3, 3)
    found = diagnostics.align({"x": (a, g)}, {"x": (other_a, other_g)})["x"]
    f, other_f = torch.kron(a, g), torch.kron(other_a, other_g)
    assert found.cosine_f == pytest.approx(diagnostics.cosine(f, other_f), rel=1e3 * EPS)
    assert found.error_f == pytest.approx(diagnostics.relative_error(f, other_f), rel=1e3 * EPS)
    assert found.cosine_f == pytest.approx(found.cosine_a * found.cosine_g, rel=1e3 * EPS)


def test_a_factor_of_scale_changes_the_error_and_not_the_cosine() -> None:
    a, g = moment(4, 0), moment(3, 1)
    found = diagnostics.align({"x": (a, g)}, {"x": (3 * a, g)})["x"]
    assert found.cosine_f == pytest.approx(1, rel=1e3 * EPS)
    assert found.error_f == pytest.approx(2, rel=1e3 * EPS)
    assert found.error_g == 0


def test_signal_to_noise_counts_elements() -> None:
    found = diagnostics.signal_to_noise({"x": torch.full((4, 25), 0.3)}, 0.1)
    assert found["x"] == pytest.approx(3, rel=1e-6)  # 0.3 in float32


def test_the_clipped_fraction_is_by_the_norm_over_all_layers() -> None:
    norms = {"x": torch.tensor([3.0, 0.5, 3.0]), "y": torch.tensor([4.0, 0.5, 0.0])}
    assert diagnostics.clipped_fraction(norms, 4.5) == pytest.approx(1 / 3)
    assert diagnostics.clipped_fraction(norms, 5.0) == 0  # on the bound: not clipped


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
    assert float(found.weights.sum()) == pytest.approx(1, rel=1e3 * EPS)


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
        assert abs(moment_of_nodes - float(v @ power)) <= 1e4 * EPS * scale**degree
        power = matrix @ power


def test_probing_leaves_the_model_and_the_random_state_alone() -> None:
    model, x, y = network()
    before = torch.get_rng_state()
    hessian_spectrum(model, losses, [x], y, steps=2, vectors=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and all(p.grad is None for p in model.parameters())


def test_lanczos_ends_where_the_space_does() -> None:
    matrix = torch.diag(torch.tensor([2.0, 2.0, 5.0, 5.0], dtype=torch.float64))
    found = lanczos(lambda vector: matrix @ vector, torch.ones(4, dtype=torch.float64), 4)
    assert found.nodes.tolist() == pytest.approx([2, 5], rel=1e3 * EPS)
    assert found.weights.tolist() == pytest.approx([0.5, 0.5], rel=1e3 * EPS)


def test_a_density_integrates_to_one() -> None:
    spectrum = Spectrum(torch.tensor([0.0, 1.0]).double(), torch.tensor([0.25, 0.75]).double())
    at = torch.linspace(-3, 4, 7001, dtype=torch.float64)
    density = spectrum.density(at, 0.1)
    # Sums of a Gaussian on a grid much finer than its width converge faster than any power.
    assert float(density.sum() * (at[1] - at[0])) == pytest.approx(1, rel=1e-9)
    peak = 0.75 / (0.1 * math.sqrt(2 * math.pi))
    assert float(density[4000]) == pytest.approx(peak, rel=1e-9)


def test_plots_have_a_curve_for_each_source() -> None:
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    pink, oracle = {"x": (moment(4, 0), moment(3, 1))}, {"x": (moment(4, 2), moment(3, 3))}
    (axes,) = plot_spectra({"pink": pink, "oracle": oracle}).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [12, 12]
    history = {"pink": {0: diagnostics.align(oracle, pink), 5: diagnostics.align(oracle, pink)}}
    left, right = plot_alignment(history).axes
    assert list(left.lines[0].get_xdata()) == [0, 5] and len(right.lines) == 1


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"same layers, got \['x'\] and \['y'\]"):
        diagnostics.align({"x": (torch.eye(1),) * 2}, {"y": (torch.eye(1),) * 2})
    with pytest.raises(ValueError, match="noise_std must be > 0"):
        diagnostics.signal_to_noise({}, 0.0)
    with pytest.raises(ValueError, match="must have samples"):
        diagnostics.clipped_fraction({}, 1.0)
    model, x, y = network()
    with pytest.raises(ValueError, match="at least 1, got 0 and 4"):
        hessian_spectrum(model, losses, [x], y, steps=0)
