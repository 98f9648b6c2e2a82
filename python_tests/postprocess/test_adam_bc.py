"""DP-AdamBC: Adam without noise, an unbiased second moment with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpkernels.engine.clipping import Adaptive
from dpkernels.postprocess import DPAdamBC
from python_tests.postprocess.training import adam_bc, made


def steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients) -> None:
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()


def test_without_noise_it_is_adam_bit_for_bit() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(7, 5), torch.randn(20, 7, 5)
    # Above the floor, whose root takes the place of Adam's eps: v_hat of the first step is g^2, and
    # goes down by 0.999 at most with every other.
    assert 0.9 * gradients[0].square().min() > 1e-16
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    steps(DPAdamBC([ours], lr=0.1, noise_std=0.0), ours, gradients)
    steps(torch.optim.Adam([theirs], lr=0.1, eps=0.0), theirs, gradients)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("schedule", [lambda t: 0.5, lambda t: 2.0 * 0.97**t])
def test_the_second_moment_is_unbiased_under_any_noise(schedule) -> None:
    torch.manual_seed(0)
    n, count, beta, signal = 100_000, 100, 0.98, 0.1
    parameter = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    std = 0.0
    optimizer = DPAdamBC([parameter], lr=0.0, betas=(0.9, beta), noise_std=lambda: std)
    for t in range(count):
        std = schedule(t)
        parameter.grad = signal + std * torch.randn(n, dtype=torch.float64)
        optimizer.step()
    correction = 1 - beta**count
    moment = optimizer.state[parameter]["exp_avg_sq"].mean() / correction
    noise = optimizer.param_groups[0]["noise_moment"] / correction
    # (s + e)^2 has the variance 2 std^4 + 4 s^2 std^2; the mean over elements and steps has that of
    # their weighted sum. Five standard deviations.
    weights = [(1 - beta) * beta ** (count - 1 - t) / correction for t in range(count)]
    variances = [2 * schedule(t) ** 4 + 4 * (signal * schedule(t)) ** 2 for t in range(count)]
    variance = sum(w**2 * v for w, v in zip(weights, variances, strict=True)) / n
    bound = 5 * math.sqrt(variance)
    assert bound < 0.01 * noise  # so that a correction which is wrong by a percent is seen
    assert abs(float(moment) - noise - signal**2) <= bound


def test_where_noise_explains_everything_the_floor_sets_the_step() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    # Powers of two, whose products, roots and quotients are exact.
    optimizer = DPAdamBC([parameter], lr=0.125, betas=(0.5, 0.75), noise_std=1.0, floor=2**-12)
    steps(optimizer, parameter, [torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)])
    # m_hat = g, and v_hat - 1 < 0: lr g / sqrt(floor).
    assert parameter.tolist() == [-4.0, 4.0, 0.0]


def test_moments_of_half_precision_parameters_are_those_of_float32() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(300, 4096).bfloat16()
    half, single = (nn.Parameter(torch.zeros(4096, dtype=x)) for x in (torch.bfloat16, None))
    both = [DPAdamBC([p], lr=0.01, noise_std=1.0) for p in (half, single)]
    for optimizer, parameter in zip(both, (half, single), strict=True):
        steps(optimizer, parameter, gradients.to(parameter.dtype))
    wanted, got = both[1].state[single], both[0].state[half]
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert half.dtype == torch.bfloat16 and half.any()


def test_a_checkpoint_does_not_round_the_moments(tmp_path) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 7).bfloat16()
    straight, resumed = (nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)) for _ in range(2))
    whole = DPAdamBC([straight], noise_std=0.5)
    steps(whole, straight, gradients[:3])
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed.data.copy_(straight)
    other = DPAdamBC([resumed], noise_std=0.5)
    state = torch.load(tmp_path / "state.pt")
    other.load_state_dict(state)
    for optimizer, parameter in ((whole, straight), (other, resumed)):
        steps(optimizer, parameter, gradients[3:])
    for name, value in whole.state[straight].items():
        assert torch.equal(other.state[resumed][name], value)
        assert not torch.equal(state["state"][0][name], value)  # it was copied


@pytest.mark.parametrize("count", [1, 5, 200])
def test_the_floor_is_a_tenth_of_the_noise_that_v_hat_has_seen(count) -> None:
    std, beta = 0.5, 0.98
    quiet = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = DPAdamBC([quiet], lr=1.0, betas=(0.0, beta), noise_std=std)
    quiet.grad = torch.full((1,), 1e-9, dtype=torch.float64)
    for _ in range(count):
        before = quiet.item()
        optimizer.step()
    # The step is lr g / sqrt(floor). n follows count + 1 products and sums, and the place, some
    # 1e-9 count / std, is subtracted from: each rounds to 2^-53.
    floor = (1e-9 / (before - quiet.item())) ** 2
    assert abs(floor / (0.1 * std**2) - 1) <= (4 * count + 8) * 2.0**-53


@pytest.mark.parametrize("clip", [1.5, Adaptive(1.5)])
def test_it_follows_the_noise_of_each_released_gradient(clip) -> None:
    run = made(adam_bc, sigma=2.0, clip=clip)
    training, optimizer = run.training, run.training.optimizer
    beta2, moment = 0.999, 0.0
    for sigma in (2.0, 1.0, 3.0):
        training.noise_multiplier = sigma
        std = sigma * training.sensitivity / training.expected_batch_size
        x, y = next(iter(run.loader))
        nn.functional.cross_entropy(training.model(x), y).backward()
        optimizer.step()
        moment += (1 - beta2) * (std**2 - moment)
        assert optimizer.noise_std() == std
        assert optimizer.param_groups[0]["noise_moment"] == moment


def test_a_schedule_is_not_the_last_noise_for_all() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = DPAdamBC([parameter], noise_std=3.0)
    steps(optimizer, parameter, torch.ones(2, 1))
    optimizer.noise_std = 0.0
    steps(optimizer, parameter, torch.ones(2, 1))
    variance = optimizer.param_groups[0]["noise_moment"] / (1 - 0.999**4)
    assert 0 < variance < 9


def test_what_is_wrong_is_said() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="noise_std is not known; call follow"):
        DPAdamBC([parameter]).step()
    with pytest.raises(RuntimeError, match=r"shape \[2\] has no gradient"):
        DPAdamBC([parameter], noise_std=1.0).step()
    with pytest.raises(ValueError, match="noise_std must be a finite number >= 0"):
        DPAdamBC([parameter], noise_std=-1.0)
    with pytest.raises(ValueError, match="floor must be a finite number > 0"):
        DPAdamBC([parameter], floor=0.0)
    with pytest.raises(ValueError, match="betas must be two numbers"):
        DPAdamBC([parameter], betas=(0.9, 1.0))
