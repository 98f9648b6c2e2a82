"""DiSK: less noise, no delay, and the optimizer's own step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpkernels.postprocess import DiSK, DPAdamBC
from python_tests.postprocess.training import filtered_adam_bc, filtered_sgd, made, train

KAPPA = 0.4


@pytest.mark.parametrize("schedule", [lambda t: 1.0, lambda t: 2.0 * 0.8**t])
def test_the_noise_that_is_left_is_the_one_that_is_stated(schedule) -> None:
    torch.manual_seed(0)
    n, count = 100_000, 20
    parameter = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    std = 0.0
    disk = DiSK(DPAdamBC([parameter], lr=0.0, noise_std=lambda: std), KAPPA)
    for t in range(count):
        std = schedule(t)
        parameter.grad = 3.0 + std * torch.randn(n, dtype=torch.float64)
        disk.step()
    error = disk.state[parameter]["filtered"] - 3.0
    # The mean of n squares of normal numbers has a relative standard deviation of sqrt(2 / n).
    bound = 5 * math.sqrt(2 / n)
    assert abs(float(error.square().mean()) / disk.filtered_noise_std() ** 2 - 1) <= bound


def test_constant_noise_goes_down_to_the_filters_limit() -> None:
    count = 20
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    disk = DiSK(DPAdamBC([parameter], noise_std=3.0), KAPPA)
    for _ in range(count):
        parameter.grad = torch.ones(1, dtype=torch.float64)
        disk.step()
    left = (1 - KAPPA) ** (2 * (count - 1))  # of the first gradient, which the filter starts from
    limit = KAPPA / (2 - KAPPA)
    wanted = 3.0 * math.sqrt(limit + left * (1 - limit))
    # Each step has 5 operations on numbers >= 0, and the formula no more: an ulp for each.
    assert disk.filtered_noise_std() == pytest.approx(wanted, rel=10 * count * 2**-53, abs=0)


def test_on_a_quadratic_the_filtered_gradient_is_the_one_at_the_iterate() -> None:
    # Numbers of so few bits that nothing is ever rounded: 7 steps add 3 or 4 bits each.
    hessian = torch.tensor([[1.0, 0.5, 0.0], [0.5, 2.0, 0.5], [0.0, 0.5, 1.5]], dtype=torch.float64)
    start = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    plain, filtered = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    sgd = torch.optim.SGD([plain], lr=0.25)
    disk = DiSK(torch.optim.SGD([filtered], lr=0.25), 0.5)
    for _ in range(7):
        plain.grad = hessian @ plain.detach()
        filtered.grad = hessian @ filtered.detach()
        sgd.step()
        disk.step()
        assert not torch.equal(filtered, plain)
        with disk.at_iterate():
            assert torch.equal(filtered, plain)


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


@pytest.mark.parametrize("told", ["filter", "optimizer", "number"])
def test_adam_bc_is_told_what_the_filter_leaves_of_the_noise(told) -> None:
    run = made(filtered_adam_bc, sigma=2.0)
    training, disk = run.training, run.training.optimizer
    std = 2.0 / training.expected_batch_size
    if told == "optimizer":
        disk.optimizer.follow(training)
    elif told == "number":
        disk.optimizer.noise_std = std
    train(run, 1)
    variance = std**2
    assert disk.optimizer.noise_std() == math.sqrt(variance)
    for sigma in (2.0, 1.0, 3.0):
        if told != "number":
            training.noise_multiplier = sigma
            std = sigma / training.expected_batch_size
        train(run, training.steps + 1)
        variance *= (1 - disk.kappa) ** 2
        variance += (disk.kappa * std) ** 2
        assert disk.optimizer.noise_std() == math.sqrt(variance)


def test_training_and_checkpoints_are_refused_at_the_iterate(tmp_path) -> None:
    run = made(filtered_sgd)
    train(run, 3)
    disk = run.training.optimizer
    with disk.at_iterate():
        with disk.at_iterate():
            pass
        with pytest.raises(RuntimeError, match=r"DiSK.state_dict: inside of at_iterate"):
            run.save(tmp_path / "run.pt")
        with pytest.raises(RuntimeError, match=r"DiSK.step: inside of at_iterate"):
            disk.step()
    run.save(tmp_path / "run.pt")


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
    with pytest.raises(RuntimeError, match="noise that DPAdamBC is to take out is not known"):
        DiSK(DPAdamBC([first])).step()
    disk.step()
    second.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"shape \[3\] has its first gradient after"):
        disk.step()


@pytest.mark.parametrize("inner", [lambda p: torch.optim.SGD(p, 0.1), DPAdamBC])
def test_a_step_without_any_gradient_is_refused(inner) -> None:
    # As when the optimizer inside was made private, and not the filter: its gradients never come.
    parameter = nn.Parameter(torch.zeros(3))
    disk = DiSK(inner([parameter]))
    if isinstance(disk.optimizer, DPAdamBC):
        disk.optimizer.noise_std = 0.1
    with pytest.raises(RuntimeError, match="pass the DiSK itself to make_private"):
        disk.step()
