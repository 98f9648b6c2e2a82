"""Diagnostics of factors: equal to what they stand for, where that can be formed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpkernels.precondition import ColouredNoise, Kfac, diagnostics

EPS = 2.0**-52
# Sums of at most 144 products, in four places: the inner product, two norms, and one more sum.
ROUNDED = 4 * 144 * EPS


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
    assert found.cosine_f == pytest.approx(diagnostics.cosine(f, other_f), rel=ROUNDED)
    assert found.error_f == pytest.approx(diagnostics.relative_error(f, other_f), rel=ROUNDED)
    assert found.cosine_f == pytest.approx(found.cosine_a * found.cosine_g, rel=ROUNDED)


def test_a_factor_of_scale_changes_the_error_and_not_the_cosine() -> None:
    a, g = moment(4, 0), moment(3, 1)
    found = diagnostics.align({"x": (a, g)}, {"x": (3 * a, g)})["x"]
    assert found.cosine_f == pytest.approx(1, rel=ROUNDED)
    assert found.error_f == pytest.approx(2, rel=ROUNDED)
    assert found.error_g == 0


def test_the_error_is_exact_where_factors_nearly_agree() -> None:
    a, g = moment(4, 0), moment(3, 1)
    found = diagnostics.align({"x": (a, g)}, {"x": (a + 2.0**-40 * a, g)})["x"]
    # a + 2^-40 a has lost 12 bits at most of the difference: eps / 2^-40, relative to it.
    assert found.error_f == pytest.approx(2.0**-40, rel=4 * EPS * 2.0**40)
    assert diagnostics.align({"x": (a, g)}, {"x": (a, g)})["x"].error_f == 0


def test_diagonals_stand_for_diagonal_matrices() -> None:
    a, g, other = moment(4, 0).diagonal(), moment(3, 1), moment(4, 2).diagonal()
    wanted = diagnostics.kronecker_spectrum(torch.diag(a), g)
    assert torch.equal(diagnostics.kronecker_spectrum(a, g), wanted)
    found = diagnostics.align({"x": (a, g)}, {"x": (other, g)})["x"]
    full = diagnostics.align({"x": (torch.diag(a), g)}, {"x": (torch.diag(other), g)})["x"]
    assert found.cosine_a == pytest.approx(full.cosine_a, rel=ROUNDED)
    assert found.error_f == pytest.approx(full.error_f, rel=ROUNDED)


def test_a_factor_of_zeros_has_no_direction() -> None:
    a, g = moment(4, 0), moment(3, 1)
    found = diagnostics.align({"x": (a, g)}, {"x": (0 * a, g)})["x"]
    assert math.isnan(found.cosine_a) and math.isnan(found.cosine_f)
    assert found.error_a == 1 and found.error_f == pytest.approx(1, rel=ROUNDED)


def test_a_group_has_the_mean_of_its_layers() -> None:
    rows = [diagnostics.Alignment(*(float(n),) * 6) for n in (1, 2, 6)]
    assert diagnostics.mean_alignment(rows) == diagnostics.Alignment(*(3.0,) * 6)


def test_factors_are_those_that_the_preconditioner_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 4))

    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    probe = ColouredNoise((1, 4, 4), classes=4)
    found = diagnostics.estimate_factors(model, probe, losses, batches=2, batch_size=16, seed=3)
    kfac = Kfac(model, probe, losses, batches=2, batch_size=16, seed=3, sides="AG")
    wanted = diagnostics.factors_of(kfac.moments())
    assert list(found) == ["0", "3"]  # normalisation has none
    assert found["0"][0].shape == (10, 10) and found["3"][1].shape == (4, 4)
    assert all(torch.equal(x, y) for n in found for x, y in zip(found[n], wanted[n], strict=True))
    one_sided = Kfac(model, probe, losses, batches=1, batch_size=16, sides="A")
    assert diagnostics.factors_of(one_sided.moments()) == {}


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"same layers, got \['x'\] and \['y'\]"):
        diagnostics.align({"x": (torch.eye(1),) * 2}, {"y": (torch.eye(1),) * 2})
    with pytest.raises(ValueError, match=r"layer 'x' must be of the same shapes.*\[3\]"):
        diagnostics.align({"x": (torch.eye(3),) * 2}, {"x": (torch.ones(3), torch.eye(3))})
    with pytest.raises(ValueError, match="must have layers, got none"):
        diagnostics.mean_alignment([])
