"""What a run counts when loops are not as they should be: left early, gone back, left out."""

from __future__ import annotations

import math

import pytest
import torch

from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.gaussian import gaussian_epsilon
from dpkernels.privacy.mechanism import NotPrivate
from dpkernels.privacy.samplers import FixedSizeSampler, PoissonSampler, ShuffledSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from python_tests.run.training import RECORDS, made, train

DELTA = 1e-5


def closed(sigma=2.0):
    """Return a private training without a run."""
    run, _ = made(sigma=sigma)
    run.close()
    return run.training, run.loader.dataset


def step(run, batch):
    x, y = batch
    torch.nn.functional.cross_entropy(run.training.model(x), y).backward()
    run.training.optimizer.step()
    run.training.optimizer.zero_grad()


@pytest.fixture
def shuffled(recwarn):
    """Return a training, and a loader of 5 shuffled batches."""
    training, data = closed()
    return training, PrivateLoader(data, ShuffledSampler(RECORDS, 8, seed=1))


def epochs(count):
    """Return epsilon of so many shuffled epochs at sigma = 2, in which a record moves 2 C."""
    return gaussian_epsilon(DELTA, math.sqrt(count))


def test_a_batch_looked_at_before_the_run_is_of_its_first_epoch(shuffled):
    training, loader = shuffled
    next(iter(loader))
    run = PrivateRun(training, loader, accountant="gaussian")
    for batch in loader:
        step(run, batch)
    assert training.steps == 4 and run.epsilon(DELTA) == pytest.approx(epochs(1))
    step(run, next(iter(loader)))
    assert run.epsilon(DELTA) == pytest.approx(epochs(2))


def test_runs_that_share_an_accountant_have_epochs_of_their_own(recwarn):
    accountant = make_accountant("gaussian")
    for count in range(1, 4):
        training, data = closed()
        loader = PrivateLoader(data, ShuffledSampler(RECORDS, 8, seed=1))
        run = PrivateRun(training, loader, accountant=accountant)
        step(run, next(iter(loader)))
        assert run.epsilon(DELTA) == pytest.approx(epochs(count))


def test_a_step_of_noise_alone_is_about_no_batch_of_a_shuffled_epoch(shuffled):
    training, loader = shuffled
    run = PrivateRun(training, loader, accountant="gaussian")
    for batch in loader:
        step(run, batch)
        training.optimizer.step()
    assert training.steps == 10 and run.epsilon(DELTA) == pytest.approx(epochs(1))


def test_a_run_begins_before_the_first_step():
    training, data = closed()
    training.optimizer.step()
    with pytest.raises(ValueError, match="1 steps that nobody has counted"):
        PrivateRun(training, PrivateLoader(data, PoissonSampler(RECORDS, 0.2)))


def test_steps_after_the_end_leave_no_epsilon():
    run, scheduler = made()
    train(run, scheduler, 2)
    run.close()
    assert run.epsilon(DELTA) > 0
    run.training.optimizer.step()
    with pytest.raises(NotPrivate, match="1 steps were taken"):
        run.epsilon(DELTA)
    assert run.report(DELTA).epsilon is None


def test_a_loader_belongs_to_one_run():
    run, _ = made()
    with pytest.raises(ValueError, match="belongs to another run"):
        PrivateRun(run.training, run.loader)


def test_what_the_accountant_does_not_know_is_refused_before_the_first_step():
    training, data = closed()
    loader = PrivateLoader(data, PoissonSampler(RECORDS, 0.2))
    with pytest.raises(ValueError, match="mixture of Gaussians"):
        PrivateRun(training, loader, accountant="gaussian")
    assert loader.watcher is None


def test_going_back_to_a_checkpoint_takes_nothing_back(tmp_path, recwarn):
    run, scheduler = made()
    train(run, scheduler, 2)
    run.save(tmp_path / "run.pt", scheduler=scheduler)
    train(run, scheduler, 7)
    spent = run.epsilon(DELTA)
    run.load(tmp_path / "run.pt", scheduler=scheduler)
    assert run.training.steps == 2 and run.epsilon(DELTA) == spent
    train(run, scheduler, 3)
    assert run.epsilon(DELTA) > spent


def test_going_back_in_a_shuffled_epoch_begins_another(shuffled, tmp_path):
    training, loader = shuffled
    run = PrivateRun(training, loader, accountant="gaussian")
    batches = iter(loader)
    step(run, next(batches))
    run.save(tmp_path / "run.pt")
    step(run, next(batches))
    run.load(tmp_path / "run.pt")
    # The second batch comes again: its records are in two steps.
    step(run, next(iter(loader)))
    assert run.epsilon(DELTA) == pytest.approx(epochs(2))


def test_a_load_that_fails_does_not_leave_a_trained_model_uncounted(tmp_path, recwarn):
    run, scheduler = made()
    train(run, scheduler, 3)
    run.save(tmp_path / "run.pt", scheduler=scheduler)
    training, data = closed()
    before = [p.detach().clone() for p in training.model.parameters()]
    loader = PrivateLoader(data, ShuffledSampler(RECORDS, 8, seed=1))
    other = PrivateRun(training, loader, accountant="gaussian")
    with pytest.raises(ValueError, match="mixture of Gaussians"):
        other.load(tmp_path / "run.pt", scheduler=scheduler)
    for wanted, got in zip(before, training.model.parameters(), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("kind", [PoissonSampler, FixedSizeSampler, ShuffledSampler])
@pytest.mark.parametrize("skipped", ["first", "middle", "last"])
def test_a_batch_without_a_step_is_refused(kind, skipped):
    training, data = closed()
    loader = PrivateLoader(data, kind(RECORDS, 0.2 if kind is PoissonSampler else 8))
    accountant = "gaussian" if kind is ShuffledSampler else "rdp"
    run = PrivateRun(training, loader, accountant=accountant)
    left_out = {"first": 0, "middle": 2, "last": len(loader) - 1}[skipped]

    def loop():
        for k, batch in enumerate(loader):
            if k != left_out:
                step(run, batch)

    with pytest.raises(RuntimeError, match="must not depend on the batch"):
        loop()


def test_looking_at_batches_without_any_step_is_the_callers_business():
    run, scheduler = made()
    next(iter(run.loader))
    for _ in run.loader:
        pass
    train(run, scheduler, 3)
    assert run.accountant.steps == 3


def test_a_microbatch_twice_in_place_of_another_is_refused():
    run, _ = made(physical=2)
    model = run.training.model
    with pytest.raises(RuntimeError, match="once for each microbatch"):  # noqa: PT012
        for x, y in run.loader:
            for _ in range(2):
                torch.nn.functional.cross_entropy(model(x), y).backward()
            if run.loader.is_last_microbatch:
                run.training.optimizer.step()


def test_a_microbatch_twice_after_one_that_was_left_out_is_refused():
    run, _ = made(physical=4)
    model = run.training.model

    def loop():
        for x, y in (batch for _ in range(50) for batch in run.loader):
            last = run.loader.is_last_microbatch
            # Of batches in two halves, the second twice, so that the number of samples is right.
            for _ in range(2 * last if run.loader.batch_size_now == 8 else 1):
                torch.nn.functional.cross_entropy(model(x), y).backward()
            if last:
                run.training.optimizer.step()

    with pytest.raises(RuntimeError, match="does not have all samples"):
        loop()


def test_calls_on_two_batches_are_not_about_the_same_samples(recwarn):
    training, data = closed()
    training._capture._same_samples = True
    loader = PrivateLoader(data, FixedSizeSampler(RECORDS, 8))
    PrivateRun(training, loader, accountant="rdp")
    batches = iter(loader)
    losses = []
    for _ in range(2):
        x, y = next(batches)
        losses.append(torch.nn.functional.cross_entropy(training.model(x), y))
    with pytest.raises(RuntimeError, match="two calls of the model"):
        sum(losses).backward()
