"""What a run accounts for, what it refuses, and what it reports."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from dpkernels.engine.clipping import Adaptive
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.mechanism import (
    GaussianQuery,
    NotPrivate,
    Poisson,
    Shuffled,
    Statement,
    gaussian_step,
)
from dpkernels.privacy.samplers import ShuffledSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from python_tests.run.training import RATE, RECORDS, made, train


def loss_of(run, x, y):
    return nn.functional.cross_entropy(run.training.model(x), y)


def some_batch(run):
    """Return the first batch of the seed, which has records."""
    x, y = next(iter(run.loader))
    assert len(x) > 1
    return x, y


def drawn_step(run, sigma, sampling):
    """Return what a step of ``run`` releases, with the noise that it cannot draw."""
    return gaussian_step(sigma, sampling, unreachable=run.training.unreachable_mass)


def test_epsilon_is_that_of_the_statement_and_the_steps():
    run, scheduler = made(sigma=1.3)
    assert run.epsilon(1e-5) == 0
    train(run, scheduler, 7)
    accountant = make_accountant("rdp")
    accountant.compose(drawn_step(run, 1.3, Poisson(RATE)), 7)
    assert run.epsilon(1e-5) == accountant.epsilon(1e-5)


def test_the_count_of_adaptive_clipping_is_accounted_for():
    run, scheduler = made(sigma=1.3, clip=Adaptive(1.0, count_std=4.0))
    train(run, scheduler, 3)
    mass = run.training.unreachable_mass
    queries = (GaussianQuery(1.0, 1.3, mass), GaussianQuery(0.5, 4.0))
    assert run.statement() == Statement(queries, Poisson(RATE))
    assert len(run.accountant.history) == 1
    both = 1 / math.sqrt(1 / 1.3**2 + 0.5**2 / 4.0**2)
    assert run.statement().noise_multiplier == pytest.approx(both, rel=1e-12)
    alone, scheduler = made(sigma=1.3)
    train(alone, scheduler, 3)
    assert run.epsilon(1e-5) > alone.epsilon(1e-5)


def test_noise_that_changes_is_composed_as_it_was():
    run, scheduler = made(sigma=1.0)
    train(run, scheduler, 2)
    run.training.noise_multiplier = 3.0
    train(run, scheduler, 5)
    assert [(s.noise_multiplier, n) for s, n in run.accountant.history] == [(1.0, 2), (3.0, 3)]


def test_shuffled_batches_count_as_what_they_are():
    run, _ = made(sigma=2.0)
    run.close()
    data = run.loader.dataset
    with pytest.warns(UserWarning, match="seed"):
        loader = PrivateLoader(data, ShuffledSampler(RECORDS, 8, seed=1))
    shuffled = PrivateRun(run.training, loader, accountant="gaussian")
    for _ in range(2):
        for x, y in loader:
            loss_of(shuffled, x, y).backward()
            run.training.optimizer.step()
    assert shuffled.loader.sampling == Shuffled(5)
    assert shuffled.statement().noise_multiplier == 1.0  # 2 C for one record in another's place
    exact = make_accountant("gaussian")
    exact.compose(drawn_step(run, 2.0, Shuffled(5)), 10)
    assert shuffled.epsilon(1e-5) == exact.epsilon(1e-5)


def test_samples_from_elsewhere_are_refused():
    run, _ = made()
    x, y = run.loader.dataset[:3]
    loss_of(run, x, y).backward()
    with pytest.raises(RuntimeError, match="samples come from another loader"):
        run.training.optimizer.step()


def test_a_second_step_on_one_batch_is_refused_before_it_is_released():
    run, _ = made()
    x, y = some_batch(run)
    loss_of(run, x, y).backward()
    run.training.optimizer.step()
    loss_of(run, x, y).backward()
    counter = run.training.noise_key.counter
    with pytest.raises(RuntimeError, match="second step on the samples of one batch"):
        run.training.optimizer.step()
    assert run.training.noise_key.counter == counter
    assert run.training.steps == run.accountant.steps


def test_a_step_on_several_batches_is_refused():
    run, _ = made()
    with pytest.raises(RuntimeError, match="adding batches up"):  # noqa: PT012
        for x, y in run.loader:
            loss_of(run, x, y).backward()
        run.training.optimizer.step()
    assert run.training.steps == run.accountant.steps == 0


def test_a_step_on_a_part_of_a_batch_is_refused():
    run, _ = made()
    x, y = some_batch(run)
    loss_of(run, x[1:], y[1:]).backward()
    with pytest.raises(RuntimeError, match="who is left out would depend"):
        run.training.optimizer.step()
    assert run.training.steps == run.accountant.steps


def test_microbatches_of_one_batch_are_one_step():
    whole, scheduler = made()
    train(whole, scheduler, 6)
    split, scheduler = made(physical=3)
    train(split, scheduler, 6)
    assert split.accountant.steps == 6
    assert whole.epsilon(1e-5) == split.epsilon(1e-5)


def test_a_run_without_a_guarantee_has_no_epsilon():
    run, _ = made()
    run.close()
    void = PrivateRun(run.training, run.loader, accountant="rdp", void="it looks at the data")
    train(void, torch.optim.lr_scheduler.ConstantLR(run.training.optimizer), 1)
    with pytest.raises(NotPrivate, match="it looks at the data"):
        void.epsilon(1e-5)
    report = void.report(1e-5)
    assert report.epsilon is None and "it looks at the data" in str(report)


def test_a_preconditioner_that_is_not_private_leaves_no_epsilon():
    run, scheduler = made()
    run.close()
    run.training._step.preconditioner.not_private = "factors of the private data"
    train(oracle := PrivateRun(run.training, run.loader, accountant="rdp"), scheduler, 1)
    with pytest.raises(NotPrivate, match="factors of the private data"):
        oracle.epsilon(1e-5)


def test_a_checkpoint_is_refused_in_the_middle_of_a_step(tmp_path):
    run, scheduler = made()
    x, y = some_batch(run)
    loss_of(run, x, y).backward()
    with pytest.raises(RuntimeError, match="between backward"):
        run.save(tmp_path / "run.pt", scheduler=scheduler)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_loaded_with_what_it_was_saved_with(tmp_path):
    run, scheduler = made()
    run.save(tmp_path / "run.pt", scheduler=scheduler)
    with pytest.raises(ValueError, match="scheduler must be given"):
        run.load(tmp_path / "run.pt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        run.load(tmp_path / "other.pt")


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path):
    run, scheduler = made()
    train(run, scheduler, 1)
    run.save(tmp_path / "run.pt", scheduler=scheduler, extra=1)
    with pytest.raises((AttributeError, TypeError)):
        run.save(tmp_path / "run.pt", scheduler=scheduler, extra=lambda: None)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    with pytest.warns(UserWarning, match="seed"):
        assert run.load(tmp_path / "run.pt", scheduler=scheduler) == 1


def test_the_report_names_mechanism_cost_and_origin():
    run, scheduler = made(sigma=1.25, clip=0.5)
    train(run, scheduler, 4)
    report = run.report(1e-5, cross_check=True)
    state = json.loads(report.to_json())
    # By privacy loss distributions there, by Renyi divergences here, which are looser.
    assert 0 < state["epsilon_by_dp_accounting"] < state["epsilon"]
    assert run.report(1e-5).epsilon_by_dp_accounting is None
    assert state["epsilon"] == run.epsilon(1e-5) and state["delta"] == 1e-5
    assert state["steps"] == 4 and state["noise_multiplier"] == 1.25
    assert state["max_grad_norm"] == 0.5 and "Flat" in state["clipping"]
    (release,) = state["releases"]
    assert release["steps"] == 4
    assert Statement.from_dict(release["statement"]) == run.statement()
    assert "PoissonSampler" in state["sampler"] and "fixed seed 1" in state["noise"]
    assert [layer["rule"] for layer in state["layers"]] == ["linear", "linear"]
    assert state["depends_on_the_data"] == {"nonfinite_samples": 0}
    assert {"dpkernels", "python", "torch"} <= state["versions"].keys() and state["seconds"] > 0
    text = str(report)
    for part in ("add-remove", "record", "Poisson(rate=0.2)", "aggregate", "fixed seed 1"):
        assert part in text


def test_samples_that_are_not_finite_are_counted_in_the_report(tmp_path):
    run, _ = made()
    x, y = some_batch(run)
    x[0] = math.nan
    loss_of(run, x, y).backward()
    run.training.optimizer.step()
    assert run.report(1e-5).nonfinite_samples == 1
    run.save(tmp_path / "run.pt")
    again, _ = made()
    with pytest.warns(UserWarning, match="seed"):
        again.load(tmp_path / "run.pt")
    assert again.report(1e-5).nonfinite_samples == 1


def test_a_report_without_noise_is_json_all_the_same():
    run, scheduler = made(sigma=0.0)
    train(run, scheduler, 1)
    state = json.loads(run.report(1e-5).to_json(), parse_constant=pytest.fail)
    assert state["epsilon"] == "infinity"
