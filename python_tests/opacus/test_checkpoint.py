"""A run goes on after a checkpoint as if it had not been stopped."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.schedulers import ExponentialGradClip, ExponentialNoise
from python_tests.opacus.small import BATCH, RECORDS, arguments, made, parameters_of, records, train
from python_tests.optional_packages import optional_package

DELTA = 1e-5


def quietly(function, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(**arguments)


def seeded(engine, **changes):
    return made(engine, noise_generator=torch.Generator().manual_seed(5), **changes)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path):
    # Batches in the loader's own order, and noise of a fixed seed, so that both runs are the same.
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = seeded(engine, poisson_sampling=False)
    train(model, optimizer, loader)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(
        path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1}
    )
    train(model, optimizer, loader)

    again = PrivacyEngine(accountant="rdp")
    other, resumed, rest = seeded(again, poisson_sampling=False)
    left = quietly(again.load_checkpoint, path=path, module=other, optimizer=resumed)
    assert left["epoch"] == 1 and again.get_epsilon(DELTA) < engine.get_epsilon(DELTA)
    train(other, resumed, rest)
    assert torch.equal(parameters_of(other), parameters_of(model))
    assert again.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    assert resumed.run.training.steps == optimizer.run.training.steps


def test_no_record_comes_twice_in_an_epoch_that_a_checkpoint_cuts():
    engine = PrivacyEngine(accountant="rdp")
    shuffled = {"data_loader": DataLoader(records(), batch_size=BATCH, shuffle=True)}
    seen, file = [], io.BytesIO()
    model, optimizer, loader = made(engine, poisson_sampling=False, **shuffled)
    for x, y in loader:
        seen += x[:, 0].tolist()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == 2 * BATCH:
            break
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)

    again = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(again, poisson_sampling=False, **shuffled)
    file.seek(0)
    again.load_checkpoint(path=file, module=model, optimizer=optimizer)
    torch.manual_seed(7)  # of another order, if one were drawn
    seen += [value for x, _ in loader for value in x[:, 0].tolist()]
    assert len(seen) == len(set(seen)) == RECORDS


def test_noise_from_the_operating_system_is_new_after_a_checkpoint():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, _ = made(engine)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    gradients = []
    for _ in range(2):
        file.seek(0)
        engine.load_checkpoint(path=file, module=model, optimizer=optimizer)
        optimizer.step()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.isin(*gradients).any()


def test_schedules_go_on_where_they_were():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    schedules = {
        "noise_scheduler": ExponentialNoise(optimizer, gamma=0.5),
        "grad_clip_scheduler": ExponentialGradClip(optimizer, gamma=2.0),
    }
    train(model, optimizer, loader)
    for schedule in schedules.values():
        schedule.step()
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer, **schedules)

    again = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(again)
    schedules = {
        "noise_scheduler": ExponentialNoise(optimizer, gamma=0.5),
        "grad_clip_scheduler": ExponentialGradClip(optimizer, gamma=2.0),
    }
    file.seek(0)
    again.load_checkpoint(path=file, module=model, optimizer=optimizer, **schedules)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.5, 0.6)
    for schedule in schedules.values():
        schedule.step()
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.25, 1.2)
    train(model, optimizer, loader)
    assert [(sigma, steps) for sigma, _, steps in again.accountant.history] == [(1.0, 4), (0.25, 4)]


def test_sums_without_noise_are_not_written(tmp_path):
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine, poisson_sampling=False)
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        engine.save_checkpoint(path=tmp_path / "x.pt", module=model, optimizer=optimizer)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_the_optimizer_that_is_passed_warns(tmp_path):
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, _ = made(engine)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model)
    with pytest.warns(UserWarning, match="optimizer"):
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)


def test_another_accountant_is_refused(tmp_path):
    engine = PrivacyEngine(accountant="rdp")
    model, *_ = made(engine)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model)
    with pytest.raises(ValueError, match="accountant='rdp'"):
        PrivacyEngine(accountant="prv").load_checkpoint(path=path, module=model)


def test_a_checkpoint_of_opacus_is_read(tmp_path):
    opacus = optional_package("opacus")
    path = tmp_path / "checkpoint.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = opacus.PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(**arguments())
        train(model, optimizer, loader)
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    ours = PrivacyEngine(accountant="rdp")
    other, resumed, rest = made(ours)
    with pytest.warns(UserWarning, match="does not say how records were sampled"):
        ours.load_checkpoint(path=path, module=other, optimizer=resumed)
    assert torch.equal(parameters_of(other), parameters_of(model))
    assert ours.accountant.history == engine.accountant.history
    train(other, resumed, rest)
    # Two entries: of Opacus' steps nobody knows how much of the noise cannot be drawn.
    assert [steps for *_, steps in ours.accountant.history] == [len(loader), len(rest)]
