"""Noise and bound follow their schedules, and each step is accounted with its own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from dpkernels.opacus import PrivacyEngine, schedulers
from python_tests.opacus.small import classifier, made, train
from python_tests.optional_packages import optional_package

KINDS = [
    ("ExponentialNoise", {"gamma": 0.9}, "noise_multiplier"),
    ("StepNoise", {"step_size": 2, "gamma": 0.5}, "noise_multiplier"),
    ("LambdaNoise", {"noise_lambda": lambda epoch: 1 - epoch / 10}, "noise_multiplier"),
    ("ExponentialGradClip", {"gamma": 1.1}, "max_grad_norm"),
    ("StepGradClip", {"step_size": 3, "gamma": 2.0}, "max_grad_norm"),
    ("LambdaGradClip", {"scheduler_function": lambda epoch: 1 + epoch}, "max_grad_norm"),
]


class Theirs:
    """What Opacus' schedules ask of an optimizer."""

    noise_multiplier, max_grad_norm = 1.0, 0.3


@pytest.mark.parametrize(("kind", "options", "attribute"), KINDS)
def test_values_are_those_of_opacus(kind, options, attribute):
    theirs = optional_package("opacus.schedulers")
    _, ours, _ = made()
    wanted = Theirs()
    schedule = getattr(schedulers, kind)(ours, **options)
    their_schedule = getattr(theirs, kind)(wanted, **options)
    for _ in range(7):
        assert getattr(ours, attribute) == pytest.approx(getattr(wanted, attribute), rel=1e-15)
        schedule.step()
        their_schedule.step()


def test_each_step_is_accounted_with_its_own_noise():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    schedule = schedulers.ExponentialNoise(optimizer, gamma=0.5)
    stds = []
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        training = optimizer.run.training
        stds.append(training.noise_multiplier * training.sensitivity)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert [sigma for sigma, _, _ in engine.accountant.history] == [1.0, 0.5, 0.25, 0.125]
    assert stds == pytest.approx([0.3, 0.15, 0.075, 0.0375], rel=1e-15)


def test_the_bound_of_a_step_is_the_scheduled_one():
    moved = []
    for factor in (1.0, 0.5):
        model, optimizer, loader = made(
            noise_multiplier=0.0, poisson_sampling=False, max_grad_norm=1e-3
        )
        schedulers.LambdaGradClip(optimizer, scheduler_function=lambda _, c=factor: c)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        x, y = next(iter(loader))
        cross_entropy(model(x), y).backward()
        optimizer.step()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    # All are clipped at this bound, so that the sum is proportional to it, but for subtractions
    # from parameters below 1.
    eps = torch.finfo(torch.float64).eps
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=100 * eps, atol=2 * eps)


def test_noise_cannot_change_between_backward_and_step():
    model, optimizer, loader = made(poisson_sampling=False)
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="noise_multiplier"):
        optimizer.noise_multiplier = 0.1
    with pytest.raises(RuntimeError, match="clipping"):
        optimizer.max_grad_norm = 0.1


def test_a_schedule_of_the_callers_own():
    class Halving(schedulers._NoiseScheduler):
        def get_noise_multiplier(self):
            return 0.5**self.last_epoch

    model, optimizer, loader = made()
    schedule = Halving(optimizer)
    schedule.step()
    train(model, optimizer, loader)
    assert optimizer.run.accountant.history[0][0].noise_multiplier == 0.5


def test_an_optimizer_without_noise_is_refused():
    plain = torch.optim.SGD(classifier().parameters(), 0.1)
    with pytest.raises(ValueError, match="noise_multiplier"):
        schedulers.ExponentialNoise(plain, gamma=0.5)
    with pytest.raises(ValueError, match="max_grad_norm"):
        schedulers.LambdaGradClip(plain, scheduler_function=lambda _: 1.0)
