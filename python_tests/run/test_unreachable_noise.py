"""A run states which part of its noise cannot be drawn."""

from __future__ import annotations

import math

import pytest

from dpkernels.engine.clipping import Adaptive
from dpkernels.ops.noise import UNREACHABLE_MASS
from dpkernels.privacy import gaussian_step, make_accountant
from python_tests.run.training import made, train


@pytest.mark.parametrize("clip", [1.0, Adaptive(1.0, count_std=2.0)])
def test_every_element_counts_in_every_step(clip) -> None:
    run, scheduler = made(clip=clip)
    elements = sum(parameter.numel() for parameter in run.training.model.parameters())
    least, most = elements * UNREACHABLE_MASS, (elements + 1) * UNREACHABLE_MASS
    assert least < run.statement().unreachable <= most
    train(run, scheduler, 3)
    assert [steps for _, steps in run.accountant.history] == [3]
    assert run.accountant.history[0][0].unreachable == run.statement().unreachable


def test_epsilon_is_that_of_exact_noise_to_a_millionth() -> None:
    run, scheduler = made()
    train(run, scheduler, 4)
    exact = make_accountant("rdp")
    exact.compose(gaussian_step(1.5, run.loader.sampling), 4)
    epsilon = exact.epsilon(1e-5)
    assert epsilon <= run.epsilon(1e-5) <= epsilon * (1 + 1e-6)


def test_a_generator_that_leaves_out_too_much_has_no_epsilon(monkeypatch) -> None:
    monkeypatch.setattr("dpkernels.engine.private.UNREACHABLE_MASS", 2.0**-22)
    run, scheduler = made()
    train(run, scheduler, 4)
    assert run.epsilon(1e-5) == math.inf
