"""What ``make_private`` returns behaves as Opacus' users know it."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.opacus import GradSampleModule, PrivacyEngine
from dpkernels.opacus.accountants.utils import get_noise_multiplier
from dpkernels.opacus.data_loader import DPDataLoader
from dpkernels.opacus.optimizers import DPOptimizer
from dpkernels.privacy.mechanism import Poisson, Shuffled
from python_tests.opacus.small import (
    BATCH,
    RECORDS,
    arguments,
    classifier,
    made,
    parameters_of,
    records,
    train,
)

DELTA = 1e-5


def test_model_optimizer_and_loader_are_of_the_kinds_that_users_ask_for():
    model, optimizer, loader = made()
    assert isinstance(model, GradSampleModule) and isinstance(model, nn.Module)
    assert isinstance(optimizer, DPOptimizer) and isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, DPDataLoader) and isinstance(loader, DataLoader)
    assert len(loader) == RECORDS // BATCH and loader.sample_rate == BATCH / RECORDS


def test_the_model_is_the_one_inside_but_for_its_name():
    inner = classifier()
    inner.note = "mine"
    model, *_ = made(module=inner)
    assert model._module is inner and model.note == "mine"
    names = ["_module." + name for name in inner.state_dict()]
    assert [*model.state_dict()] == [name for name, _ in model.named_parameters()] == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in inner.parameters()]
    assert not model.eval()._module.training and model.train()._module.training
    with pytest.raises(AttributeError):
        _ = model.nothing


def test_a_copy_of_the_model_trains_without_privacy_only_if_that_is_said():
    model, optimizer, loader = made()
    copied = copy.deepcopy(model)
    x = torch.randn(2, 4).double()
    with pytest.warns(UserWarning, match="neither clipped nor noisy"):
        wanted = copied(x)
    assert torch.equal(wanted, model(x))
    train(model, optimizer, loader)
    assert torch.equal(copied(x), wanted) and not torch.equal(model(x), wanted)
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        copied(x).sum().backward()
    plain = copied.to_standard_module()
    plain(x).sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


@pytest.mark.parametrize("prefix", ["", "_module."])
def test_a_state_loads_with_and_without_opacus_prefix(prefix):
    model, *_ = made()
    wanted = {name: x + 1 for name, x in model._module.state_dict().items()}
    model.load_state_dict({prefix + name: x for name, x in wanted.items()})
    assert all(torch.equal(x, wanted[name]) for name, x in model._module.state_dict().items())


def test_the_optimizer_is_the_original_one_but_for_its_noise():
    given = arguments()
    _, optimizer, _ = made(**given)
    assert optimizer.original_optimizer is given["optimizer"]
    assert optimizer.param_groups is given["optimizer"].param_groups
    assert optimizer.state is given["optimizer"].state
    assert optimizer.state_dict() == given["optimizer"].state_dict()
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (1.0, 0.3)
    assert optimizer.expected_batch_size == BATCH


def test_learning_rates_follow_a_schedule():
    model, optimizer, loader = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, loader)
    scheduler.step()
    assert optimizer.original_optimizer.param_groups[0]["lr"] == 0.25


def test_a_closure_is_called_once():
    model, optimizer, loader = made()
    calls = []
    for x, y in loader:

        def closure(x=x, y=y):
            calls.append(len(x))
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert isinstance(optimizer.step(closure), torch.Tensor)
    assert len(calls) == len(loader) == optimizer.run.training.steps


def test_steps_are_skipped_when_that_is_signalled():
    model, optimizer, loader = made(poisson_sampling=False, noise_multiplier=0.0)
    before = parameters_of(model)
    x, y = next(iter(loader))
    for part in (slice(0, 2), slice(2, None)):
        optimizer.signal_skip_step(do_skip=part.start == 0)
        cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        assert torch.equal(parameters_of(model), before) is (part.start == 0)
        optimizer.zero_grad()
    other, plain, loader = made(poisson_sampling=False, noise_multiplier=0.0)
    next(iter(loader))
    cross_entropy(other(x), y).backward()
    plain.step()
    rounding = 2 * BATCH * torch.finfo(torch.float64).eps * before.abs().max()
    assert (parameters_of(model) - parameters_of(other)).abs().max() <= rounding


def test_a_sum_is_divided_by_nothing():
    steps = {}
    for reduction in ("mean", "sum"):
        model, optimizer, loader = made(
            loss_reduction=reduction, noise_multiplier=0.0, poisson_sampling=False
        )
        before = parameters_of(model)
        x, y = next(iter(loader))
        cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        steps[reduction] = parameters_of(model) - before
    rounding = 4 * BATCH * torch.finfo(torch.float64).eps
    torch.testing.assert_close(steps["sum"], BATCH * steps["mean"], rtol=rounding, atol=rounding)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_ghost_criterion_gives_the_loss_of_a_sample_over_its_positions(reduction):
    outputs, positions = 7, 3

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, outputs)

        def forward(self, x):
            return self.out(x)

    torch.manual_seed(0)
    x, y = torch.randn(RECORDS, positions, 4), torch.randint(outputs, (RECORDS, positions))
    y[:, -1] = -100
    model, optimizer, criterion, loader = made(
        module=Tagger(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        loss_reduction=reduction,
        grad_sample_mode="ghost",
        poisson_sampling=False,
    )
    x, y = next(iter(loader))
    logits = model(x)
    loss = criterion(logits.view(-1, outputs), y.view(-1), shape=logits.shape)
    each = [cross_entropy(a, b, reduction=reduction) for a, b in zip(logits, y, strict=True)]
    torch.testing.assert_close(loss, getattr(torch.stack(each), reduction)())
    loss.backward()
    optimizer.step()
    assert optimizer.run.training.steps == 1 and criterion.criterion.reduction == reduction


def test_a_hold_on_the_model_is_returned_if_it_is_not_to_be_wrapped():
    model = classifier()
    hooks, optimizer, loader = made(module=model, wrap_model=False)
    assert not isinstance(hooks, nn.Module) and hooks._module is model
    train(model, optimizer, loader)
    hooks.cleanup()
    cross_entropy(model(torch.randn(2, 4).double()), torch.tensor([0, 1])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("poisson_sampling", [True, False])
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_budget_is_kept_and_used(poisson_sampling, accountant):
    engine = PrivacyEngine(accountant=accountant)
    given = arguments(poisson_sampling=poisson_sampling)
    del given["noise_multiplier"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = engine.make_private_with_epsilon(
            **given, target_epsilon=3.0, target_delta=DELTA, epochs=2
        )
    assert len(engine.accountant) == 0 and engine.get_epsilon(DELTA) == 0
    train(*private, epochs=2)
    assert 0.98 * 3.0 <= engine.get_epsilon(DELTA) <= 3.0


def test_a_budget_that_is_partly_spent_warns():
    engine = PrivacyEngine(accountant="rdp")
    train(*made(engine))
    given = arguments(data_loader=DataLoader(engine.dataset, batch_size=BATCH))
    del given["noise_multiplier"]
    with pytest.warns(UserWarning, match="spent already"):
        engine.make_private_with_epsilon(**given, target_epsilon=3, target_delta=DELTA, epochs=1)


def test_epochs_and_batches_are_whole():
    # In floating point 1 / (1 / 93) is below 93, and 98 * (1 / 49) below 2.
    assert int(1 / (1 / 93)) == 92 and int(98 * (1 / 49)) == 1
    given = {"target_epsilon": 2.0, "target_delta": DELTA, "sample_rate": 1 / 93}
    assert get_noise_multiplier(**given, epochs=1) == get_noise_multiplier(**given, steps=93)
    *_, loader = made(data_loader=DataLoader(records(186), batch_size=2))
    assert len(loader) == 93 and loader.sampling == Poisson(1 / 93)
    _, optimizer, _ = made(data_loader=DataLoader(records(98), batch_size=2))
    assert optimizer.expected_batch_size == 2


def test_the_rate_and_the_batch_size_may_be_given():
    _, optimizer, loader = made(sample_rate=0.1, expected_batch_size=3)
    assert loader.sampling == Poisson(0.1) and len(loader) == 10
    assert optimizer.run.training.expected_batch_size == optimizer.expected_batch_size == 3


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_a_private_loader_serves_another_run(before, now):
    *_, loader = made(poisson_sampling=before)
    model, optimizer, again = made(data_loader=loader, poisson_sampling=now)
    assert again is not loader and isinstance(again.sampling, Poisson if now else Shuffled)
    assert len(again) == len(loader)
    train(model, optimizer, again)
    assert optimizer.run.training.steps == len(loader)


def test_a_noise_generator_is_a_seed_and_says_so():
    grads = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="fixed seed"):
            model, optimizer, _ = PrivacyEngine().make_private(
                **arguments(noise_generator=torch.Generator().manual_seed(3))
            )
        optimizer.step()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*grads) and (grads[0] != 0).all()


def test_noise_is_that_of_the_root_of_the_sum_of_squares_for_bounds_of_parameters():
    bounds = [0.3, 0.4, 1.2, 0.5]
    _, optimizer, _ = made(clipping="per_layer", max_grad_norm=bounds)
    assert optimizer.max_grad_norm == pytest.approx(math.hypot(*bounds), rel=1e-15)
    layers = optimizer.run.training.clipping.max_norm
    assert layers == {"0": math.hypot(0.3, 0.4), "2": math.hypot(1.2, 0.5)}


def test_compatibility_is_that_of_the_validator():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert not PrivacyEngine().is_compatible(module=model, optimizer=None, data_loader=None)
    assert PrivacyEngine().is_compatible(module=PrivacyEngine.get_compatible_module(model))
