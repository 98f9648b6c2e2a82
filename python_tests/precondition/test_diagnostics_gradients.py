"""Diagnostics of clipped gradients: equal to autograd's, sample by sample."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpkernels.engine.private import make_private
from dpkernels.engine.sides import FixedSides, Sides
from dpkernels.ops.factor import Diagonal, Full
from dpkernels.precondition import ColouredNoise, Kfac
from dpkernels.precondition import diagnostics_gradients as diagnostics

EPS = 2.0**-52
BOUND = 4.0  # between the samples' norms


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 2)).double()
    return model, torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 2


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def test_means_and_norms_are_those_of_preconditioned_clipped_samples() -> None:
    model, x, y = model_and_data()
    left = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    right = torch.arange(1.0, 6.0, dtype=torch.float64)  # four inputs, and the bias
    sides = FixedSides({"0": Sides(Full(left), Diagonal(right))})
    batches = [((x[:5],), y[:5]), ((x[5:],), y[5:])]
    found = diagnostics.clipped_gradients(
        model, batches, losses, max_norm=BOUND, preconditioner=sides
    )

    copy = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 2)).double()
    copy.load_state_dict(model.state_dict())
    copy.eval()
    total, norms = {"0": 0.0, "3": 0.0}, {"0": [], "3": []}
    for n in range(7):
        copy.zero_grad()
        losses(copy(x[n : n + 1]), y[n : n + 1]).sum().backward()
        whole = torch.cat([copy[0].weight.grad, copy[0].bias.grad[:, None]], 1)
        whole = left @ whole * right
        first = torch.cat([whole[:, :-1].flatten(), whole[:, -1]])
        last = torch.cat([copy[3].weight.grad.flatten(), copy[3].bias.grad])
        factor = min(1.0, BOUND / float(torch.cat([first, last]).norm()))
        for name, gradient in (("0", first), ("3", last)):
            total[name] = total[name] + factor * gradient / 7
            norms[name].append(float(gradient.norm()))
    for name in ("0", "3"):
        # Squared norms of ghost products: a hundred operations on numbers near 1.
        assert found.sample_norms[name].tolist() == pytest.approx(norms[name], rel=100 * EPS)
        assert found.means[name].tolist() == pytest.approx(total[name].tolist(), abs=100 * EPS)
    over = [math.hypot(a, b) > BOUND for a, b in zip(norms["0"], norms["3"], strict=True)]
    assert 0 < sum(over) < 7
    assert diagnostics.clipped_fraction(found.sample_norms, BOUND) == pytest.approx(sum(over) / 7)


def test_training_and_preconditioner_know_nothing_of_it() -> None:
    model, x, y = model_and_data()
    probe = ColouredNoise((1, 4), classes=2, dtype=torch.float64)
    flat = nn.Sequential(nn.Flatten(), *model)
    kfac = Kfac(flat, probe, losses, batches=1, batch_size=8, refresh_every=1)
    training = make_private(
        flat,
        torch.optim.SGD(flat.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=7,
        loss_reduction="sum",
        preconditioner=kfac,
    )
    losses(flat(x), y).sum().backward()
    before = [p.clone() for p in flat.parameters()]
    diagnostics.clipped_gradients(flat, [((x,), y)], losses, max_norm=1.0, preconditioner=kfac)
    assert (training.steps, training.samples, kfac.refreshes) == (0, 7, 1)
    assert flat.training
    assert all(torch.equal(p, q) for p, q in zip(flat.parameters(), before, strict=True))


def test_signal_to_noise_counts_elements() -> None:
    found = diagnostics.signal_to_noise({"x": torch.full((4, 25), 0.3)}, 0.1)
    assert found["x"] == pytest.approx(3, rel=1e-6)  # 0.3 in float32


def test_the_clipped_fraction_is_by_the_norm_over_all_layers() -> None:
    norms = {"x": torch.tensor([3.0, 0.5, 3.0]), "y": torch.tensor([4.0, 0.5, 0.0])}
    assert diagnostics.clipped_fraction(norms, 4.5) == pytest.approx(1 / 3)
    assert diagnostics.clipped_fraction(norms, 5.0) == 0  # on the bound: not clipped


def test_a_gradient_that_is_not_finite_is_clipped() -> None:
    norms = {"x": torch.tensor([math.nan, math.inf, 0.5, 0.5])}
    assert diagnostics.clipped_fraction(norms, 1.0) == 0.5


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="noise_std must be > 0"):
        diagnostics.signal_to_noise({}, 0.0)
    with pytest.raises(ValueError, match="must have samples"):
        diagnostics.clipped_fraction({}, 1.0)
    with pytest.raises(ValueError, match="batches must have records, got none"):
        diagnostics.clipped_gradients(model_and_data()[0], [], losses, max_norm=1.0)


def test_a_loss_that_is_an_average_is_refused() -> None:
    model, x, y = model_and_data()
    with pytest.raises(ValueError, match="it is an average"):
        diagnostics.clipped_gradients(model, [((x,), y)], functional.cross_entropy, max_norm=BOUND)
