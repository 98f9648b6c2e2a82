"""The optimizers in private runs: they learn, and go on after a checkpoint as if nothing was."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from dpkernels.postprocess import DiSK
from python_tests.postprocess.training import OPTIMIZERS, accuracy, made, parameters_of, train


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_it_learns_what_is_easy(build) -> None:
    run = made(build)
    before = accuracy(run)
    train(run, 60)
    optimizer = run.training.optimizer
    if isinstance(optimizer, DiSK):
        with optimizer.at_iterate():
            after = accuracy(run)
    else:
        after = accuracy(run)
    # The classes are apart: of the mistakes at the beginning most can be had.
    assert 1 - after < (1 - before) / 3


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_a_run_resumes_bit_for_bit(build, tmp_path: Path) -> None:
    whole = made(build)
    train(whole, 8)
    first = made(build)
    train(first, 5)
    first.save(tmp_path / "run.pt")
    resumed = made(build)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fixed seed
        resumed.load(tmp_path / "run.pt")
    assert torch.equal(parameters_of(resumed), parameters_of(first))
    train(resumed, 8)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_a_resume_without_the_state_is_another_run(build) -> None:
    whole = made(build)
    train(whole, 8)
    first = made(build)
    train(first, 5)
    first.training.optimizer.state.clear()
    train(first, 8)
    assert not torch.equal(parameters_of(first), parameters_of(whole))
