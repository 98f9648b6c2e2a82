"""Where Opacus allows what is not private, or accounts it as something else, we do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from dpkernels.engine import make_private as engine_make_private
from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.data_loader import DPDataLoader, OwnOrder
from dpkernels.opacus.validators import ModuleValidator
from dpkernels.opacus.validators.errors import UnsupportedModuleError
from dpkernels.ops.noise import UNREACHABLE_MASS
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.mechanism import Poisson, Shuffled, gaussian_step
from python_tests.opacus.small import (
    BATCH,
    RECORDS,
    arguments,
    made,
    made_of_halves,
    records,
    train,
)

DELTA = 1e-5


def spent(statement, steps, accountant="rdp"):
    accountant = make_accountant(accountant)
    accountant.compose(statement, steps)
    return accountant.epsilon(DELTA)


def test_shuffled_batches_are_accounted_without_amplification():
    engine = PrivacyEngine(accountant="rdp")
    with pytest.warns(UserWarning, match="poisson_sampling=False"):
        private = engine.make_private(**arguments(poisson_sampling=False))
    train(*private, epochs=2)
    batches = RECORDS // BATCH
    assert engine.get_epsilon(DELTA) == spent(
        gaussian_step(1.0, Shuffled(batches), unreachable=UNREACHABLE_MASS), 2 * batches
    )
    claimed = spent(gaussian_step(1.0, Poisson(1 / batches)), 2 * batches)
    assert engine.get_epsilon(DELTA) > claimed


def test_leaving_an_epoch_early_does_not_make_the_next_one_cheaper():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine, poisson_sampling=False)
    seen = []
    for _ in range(4):
        for x, y in loader:
            seen += x[:, 0].tolist()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            break
    # One epoch's cost, and no record came twice.
    assert len(set(seen)) == len(seen) == RECORDS
    assert engine.get_epsilon(DELTA) == spent(
        gaussian_step(1.0, Shuffled(4), unreachable=UNREACHABLE_MASS), 4
    )


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * RECORDS, RECORDS),
        RandomSampler(range(RECORDS), replacement=True),
    ],
)
@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_samplers_that_nobody_accounts_are_refused(sampler, poisson_sampling):
    loader = DataLoader(records(), batch_size=BATCH, sampler=sampler)
    with pytest.raises(ValueError, match=type(sampler).__name__):
        made(data_loader=loader, poisson_sampling=poisson_sampling)


def test_a_record_that_is_twice_in_an_epoch_is_noticed():
    sampler = RandomSampler(range(RECORDS), replacement=True)
    batches = OwnOrder(DataLoader(records(), batch_size=BATCH, sampler=sampler))
    # 20 draws of 20 records are all different with probability 20! / 20^20 = 2e-8.
    with pytest.raises(RuntimeError, match="one batch at most"):
        list(batches)


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_a_second_step_on_a_batch_is_refused(poisson_sampling):
    model, optimizer, loader = made_of_halves(poisson_sampling=poisson_sampling)
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="second step"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.run.accountant.steps == optimizer.run.training.steps == 1


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_batches_that_are_added_up_for_one_step_are_refused(poisson_sampling):
    model, optimizer, loader = made(poisson_sampling=poisson_sampling)
    for x, y in loader:
        cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="samples"):
        optimizer.step()


def halves(model, x):
    half = len(x) // 2
    return torch.cat([model(x[:half]), model(x[half : 2 * half])]), slice(2 * half)


def trimmed(model, x):
    return model(x[:-1]), slice(len(x) - 1)


@pytest.mark.parametrize("call", [halves, trimmed])
def test_a_part_of_a_batch_is_refused(call):
    model, optimizer, loader = made()
    x, y = next(batch for batch in loader if len(batch[0]) > 1)
    outputs, used = call(model, x)
    cross_entropy(outputs, y[used]).backward()
    with pytest.raises(RuntimeError, match="whole batch"):
        optimizer.step()
    assert optimizer.run.training.steps == optimizer.run.training.samples == 0


def test_samples_that_did_not_come_from_the_loader_are_refused():
    model, optimizer, _ = made()
    x, y = next(iter(DataLoader(records(), batch_size=BATCH)))
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.step"):
        optimizer.step()


def test_empty_batches_are_steps_of_noise():
    loader = DataLoader(records(2), batch_size=1)
    model, optimizer, loader = made(data_loader=loader, sample_rate=0.01, expected_batch_size=1.0)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert (after != before).all() and after.isfinite().all()
    # 100 batches of two records at 1%: all are not empty with probability 1e-170 or less.
    assert len(sizes) == 100 and 0 in sizes
    assert optimizer.run.accountant.steps == 100


def test_a_made_up_batch_in_place_of_an_empty_one_is_refused():
    with pytest.raises(ValueError, match="rand_on_empty"):
        made(rand_on_empty=True)
    with pytest.raises(ValueError, match="rand_on_empty"):
        DPDataLoader(records(), sample_rate=0.1, rand_on_empty=True)


def test_gradients_that_the_caller_fills_in_are_refused():
    with pytest.raises(ValueError, match="no_op"):
        made(grad_sample_mode="no_op")


def test_secure_mode_is_not_promised():
    with pytest.raises(ValueError, match="cryptographic"):
        PrivacyEngine(secure_mode=True)


def test_the_central_limit_is_not_taken_for_sampled_steps():
    with pytest.raises(ValueError, match="Poisson"):
        made(PrivacyEngine(accountant="gdp"))


def test_samplings_of_two_adjacencies_do_not_add_up():
    engine = PrivacyEngine(accountant="rdp")
    train(*made(engine))
    with pytest.raises(ValueError, match="adjacency"):
        made(engine, poisson_sampling=False)


def test_the_gaussian_accountant_is_exact_without_sampling():
    engine = PrivacyEngine(accountant="gdp")
    train(*made(engine, poisson_sampling=False))
    assert engine.get_epsilon(DELTA) == spent(
        gaussian_step(1.0, Shuffled(4), unreachable=UNREACHABLE_MASS), 4, "gaussian"
    )


def test_a_step_hook_of_the_callers_does_not_end_accounting():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    gradients = []
    optimizer.attach_step_hook(lambda optimizer: gradients.append(optimizer.params[0].grad.clone()))
    train(model, optimizer, loader)
    assert len(gradients) == len(loader) == engine.accountant.history[0][2]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_steps_of_the_original_optimizer_are_private_and_accounted_too():
    model, optimizer, loader = made()
    train(model, optimizer.original_optimizer, loader)
    assert optimizer.run.accountant.steps == optimizer.run.training.steps == len(loader)


def test_frozen_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model[1].requires_grad_(False)
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d"):
        made(module=model, optimizer=torch.optim.SGD(model[2].parameters(), 0.1))


def test_frozen_batch_norm_in_evaluation_mode_is_a_constant():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    norm = model[1].requires_grad_(False).eval()
    norm.running_mean.normal_()
    before = {name: x.clone() for name, x in norm.state_dict().items()}
    assert ModuleValidator.is_valid(model) and PrivacyEngine().is_compatible(module=model)
    trained = [*model[0].parameters(), *model[2].parameters()]
    private, optimizer, loader = made(module=model, optimizer=torch.optim.SGD(trained, 0.1))
    train(private, optimizer, loader)
    assert all(torch.equal(x, before[name]) for name, x in norm.state_dict().items())
    # What would mix samples is noticed when it happens, too.
    private.train()
    with pytest.raises(ValueError, match=r"eval\(\)"):
        private(torch.randn(3, 4).double())


def test_the_count_of_adaptive_clipping_is_accounted():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(
        engine,
        clipping="adaptive",
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=10.0,
        min_clipbound=1e-3,
        unclipped_num_std=2.0,
    )
    assert optimizer.noise_multiplier == 1.0
    # What is left for gradients: 1 / sqrt(1 - 1/16).
    assert optimizer.run.training.noise_multiplier == pytest.approx(math.sqrt(16 / 15), rel=1e-15)
    bound = optimizer.max_grad_norm
    train(model, optimizer, loader)
    assert optimizer.max_grad_norm != bound
    (noise_multiplier, rate, steps), *others = engine.accountant.history
    assert not others and (rate, steps) == (BATCH / RECORDS, len(loader))
    assert noise_multiplier == pytest.approx(1.0, rel=1e-15)


def test_one_engine_for_two_data_sets_warns():
    engine = PrivacyEngine(accountant="rdp")
    engine.make_private(**arguments())
    with pytest.warns(UserWarning, match="another data set"):
        engine.make_private(**arguments())


def test_a_model_that_the_engine_itself_trains_is_refused():
    given = arguments()
    training = engine_make_private(
        given["module"],
        given["optimizer"],
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        loss_reduction="mean",
    )
    with pytest.raises(ValueError, match="detach"):
        made(**given)
    training.detach()
    made(**given)


def test_a_model_given_back_is_an_ordinary_one():
    model, _, _ = made()
    plain = model.to_standard_module()
    cross_entropy(plain(torch.randn(2, 4).double()), torch.tensor([0, 1])).backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


@pytest.mark.parametrize("wrap_model", [True, False])
def test_an_optimizer_whose_training_has_ended_takes_no_step(wrap_model):
    held, optimizer, loader = made_of_halves(wrap_model=wrap_model)
    model, hooked = held._module, []
    optimizer.attach_step_hook(hooked.append)
    held.cleanup()
    x, y = next(iter(loader))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="private training has ended"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.original_optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * parameter.grad)
    assert not hooked and not optimizer.original_optimizer._optimizer_step_pre_hooks


def test_training_that_was_ended_twice_is_ended():
    _, optimizer, _ = made()
    optimizer.run.training.detach()
    optimizer.run.training.detach()
    with pytest.raises(RuntimeError, match="private training has ended"):
        optimizer.step()
