"""DiSK: less noise, no delay, and the optimizer's own step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpkernels.postprocess import DiSK
from python_tests.postprocess.training import filtered_adam_bc, filtered_sgd, made, train

KAPPA = 0.4


def test_noise_on_a_constant_gradient_goes_down_as_theory_says() -> None:
    torch.manual_seed(0)
    n, count = 200_000, 20
    parameter = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    disk = DiSK(torch.optim.SGD([parameter], lr=0.0), KAPPA)
    for _ in range(count):
        parameter.grad = 3.0 + torch.randn(n, dtype=torch.float64)
        disk.step()
    error = disk.state[parameter]["filtered"] - 3.0
    left = (1 - KAPPA) ** (2 * (count - 1))  # of the first gradient, which the filter starts from
    limit = KAPPA / (2 - KAPPA)
    wanted = limit + left * (1 - limit)
    # The mean of n squares of normal numbers has a relative standard deviation of sqrt(2 / n).
    assert abs(float(error.square().mean()) / wanted - 1) <= 5 * math.sqrt(2 / n)
    assert disk.noise_scale == pytest.approx(math.sqrt(wanted), rel=1e-12)


def test_on_a_quadratic_the_filtered_gradient_is_the_one_at_the_iterate() -> None:
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    hessian, start = root @ root.T / 6, torch.randn(6, dtype=torch.float64)
    plain, filtered = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    sgd = torch.optim.SGD([plain], lr=0.1)
    disk = DiSK(torch.optim.SGD([filtered], lr=0.1), KAPPA)
    for _ in range(30):
        plain.grad = hessian @ plain.detach()
        filtered.grad = hessian @ filtered.detach()
        sgd.step()
        disk.step()
    assert not torch.equal(filtered, plain)
    with disk.at_iterate():
        # Both contract, so that errors of rounding do not grow: 30 steps of a few ulps of |x|.
        assert torch.allclose(filtered, plain, rtol=0, atol=30 * 8 * 2**-52 * float(start.norm()))


def test_with_kappa_one_it_is_the_optimizer_itself() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(9), torch.randn(10, 9)
    plain, filtered = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    adam, disk = torch.optim.Adam([plain]), DiSK(torch.optim.Adam([filtered]), 1.0)
    for gradient in gradients:
        plain.grad, filtered.grad = gradient, gradient.clone()
        adam.step()
        disk.step()
    assert torch.equal(plain, filtered)


def test_the_shifted_point_is_gamma_displacements_ahead() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    disk = DiSK(torch.optim.SGD([parameter], lr=1.0), 0.5)
    parameter.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    disk.step()
    assert parameter.tolist() == [-2.0, 4.0]  # x = -g, and as far again: gamma = 1
    with disk.at_iterate():
        assert parameter.tolist() == [-1.0, 2.0]
    assert parameter.tolist() == [-2.0, 4.0]
    assert parameter.grad.tolist() == [1.0, -2.0]


def test_a_schedule_reaches_the_optimizer_inside() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=1.0)
    disk = DiSK(inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(disk, 0.5)
    parameter.grad = torch.ones(1)
    disk.step()
    scheduler.step()
    disk.load_state_dict(disk.state_dict())
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25


def test_an_interrupted_evaluation_leaves_the_shifted_point() -> None:
    run = made(filtered_sgd)
    train(run, 3)
    disk, model = run.training.optimizer, run.training.model
    before = model[0].weight.detach().clone()

    def interrupted() -> None:
        with disk.at_iterate():
            assert not torch.equal(model[0].weight, before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model[0].weight, before)


def test_adam_bc_is_told_what_the_filter_leaves_of_the_noise() -> None:
    run = made(filtered_adam_bc, sigma=2.0)
    training, disk = run.training, run.training.optimizer
    std = 2.0 / training.expected_batch_size
    scales = []
    for step in range(1, 6):
        train(run, step)
        assert disk.optimizer.noise_std() == disk.noise_scale * std
        scales.append(disk.noise_scale)
    limit = math.sqrt(disk.kappa / (2 - disk.kappa))
    assert scales[0] == 1 and scales == sorted(scales, reverse=True) and scales[-1] > limit


def test_what_is_wrong_is_said() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([first, second], lr=1.0)
    for kappa in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"kappa must be in \(0, 1\]"):
            DiSK(sgd, kappa)
    disk = DiSK(sgd)
    with pytest.raises(ValueError, match="takes no closure"):
        disk.step(lambda: 0.0)
    first.grad = torch.ones(2)
    disk.step()
    second.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"shape \[3\] has its first gradient after"):
        disk.step()
