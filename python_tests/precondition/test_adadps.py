"""FactoredAdaDPS: exact where second moments have rank one, and honest about what it is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels.precondition.adadps import FactoredAdaDPS, factored
from dpkernels.precondition.probes import ColouredNoise, Features, PrivateData


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
    )


def private(model: nn.Module, preconditioner: FactoredAdaDPS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sigma = 0
        return dpkernels.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=1e9,
            expected_batch_size=4,
            loss_reduction="sum",
            preconditioner=preconditioner,
        )


def test_a_moment_of_rank_one_is_scaled_to_ones() -> None:
    torch.manual_seed(0)
    moment = torch.outer(torch.rand(5, dtype=torch.float64), torch.rand(7, dtype=torch.float64))
    sides = factored(moment, 1e-30)
    product = torch.outer(sides.left.values, sides.right.values)
    # sqrt(eps) = 1e-15 beside roots of the order of 1, twice, and a few ulps.
    assert torch.allclose(product * moment.sqrt(), torch.ones(5, 7).double(), rtol=0, atol=1e-13)


def test_one_sample_is_scaled_to_the_signs_of_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    probe = Features(6, 3, dtype=torch.float64)
    scaling = FactoredAdaDPS(model, probe, losses, batches=1, batch_size=1, eps=1e-30)
    (x,), y = probe.batch(1, torch.Generator().manual_seed(0))
    weight, bias = torch.autograd.grad(losses(model(x), y).sum(), list(model.parameters()))
    sides = scaling.sides("")
    gradient = torch.cat([weight, bias[:, None]], 1)
    scaled = sides.left.values[:, None] * gradient * sides.right.values
    assert torch.allclose(scaled, gradient.sign(), rtol=0, atol=1e-12)


def test_a_layer_without_gradients_gets_finite_factors() -> None:
    sides = factored(torch.zeros(3, 4), 1e-4)
    assert sides.left.values.isfinite().all() and sides.right.values.isfinite().all()


def test_the_engine_scales_what_the_report_says() -> None:
    model = network()
    scaling = FactoredAdaDPS(model, ColouredNoise((1, 8, 8), classes=3), losses, batch_size=16)
    assert "0: G diagonal 4, A diagonal 10" in scaling.report()
    assert "5: G diagonal 3, A diagonal 65" in scaling.report()
    assert "1: none, it has no trained weight with two sides" in scaling.report()
    assert "3: none, a convolution with groups" in scaling.report()
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    plain = torch.autograd.grad(losses(model(x), y).sum(), list(model.parameters()))
    training = private(model, scaling)
    losses(model(x), y).sum().backward()
    training.optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    for name, parameter, gradient in zip(names, model.parameters(), plain, strict=True):
        layer, attribute = name.split(".")
        sides = scaling.sides(layer)
        if sides.left is None:
            wanted = gradient
        elif attribute == "bias":
            wanted = sides.left.values * gradient * sides.right.values[-1]
        else:
            rows = sides.left.values[:, None] * gradient.flatten(1) * sides.right.values[:-1]
            wanted = rows.view_as(gradient)
        error = (parameter.grad - wanted / 4).norm() / (wanted / 4).norm()
        # Sums of at most 4 samples x 36 positions in another order.
        assert error <= 144 * torch.finfo(torch.float32).eps


def test_a_refresh_follows_the_parameters_and_leaves_training_alone() -> None:
    model = network()
    scaling = FactoredAdaDPS(
        model, ColouredNoise((1, 8, 8), classes=3), losses, batch_size=16, refresh_every=2
    )
    training = private(model, scaling)
    random_state = torch.get_rng_state()
    before = scaling.sides("5")
    scaling.after_step()
    assert scaling.sides("5") is before
    scaling.after_step()
    assert scaling.sides("5") is not before
    assert training.samples == 0 and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    again = FactoredAdaDPS(model, ColouredNoise((1, 8, 8), classes=3), losses, batch_size=16)
    assert not torch.equal(again.sides("5").right.values, before.right.values)


def test_a_model_without_such_layers_is_left_as_it_is() -> None:
    model = nn.Conv2d(2, 2, 3, groups=2)
    scaling = FactoredAdaDPS(model, ColouredNoise((2, 8, 8), classes=2), losses)
    assert scaling.sides("").left is None and "groups" in scaling.report()


def test_with_an_oracle_the_training_has_no_guarantee() -> None:
    model = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(9, 6), torch.arange(9) % 3)
    scaling = FactoredAdaDPS(model, PrivateData(data, not_private=True), losses, batch_size=4)
    assert "oracle" in private(model, scaling).void


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": 0}, "batches must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"refresh_every": 0}, "refresh_every must be at least 1"),
        ({"eps": 0.0}, "eps must be a finite number > 0"),
    ],
)
def test_what_is_wrong_is_said(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        FactoredAdaDPS(nn.Linear(6, 3), Features(6, 3), losses, **arguments)
