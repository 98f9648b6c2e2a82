"""``GradSampleModule`` and ``DPOptimizer`` by hand, without ``PrivacyEngine``."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dpkernels.opacus import GradSampleModule, PrivacyEngine
from dpkernels.opacus.accountants import RDPAccountant
from dpkernels.opacus.grad_sample import GradSampleHooks
from dpkernels.opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from dpkernels.opacus.schedulers import ExponentialNoise
from dpkernels.opacus.utils.batch_memory_manager import BatchMemoryManager
from python_tests.opacus.small import BATCH, classifier, made, parameters_of, records, train
from python_tests.optional_packages import optional_package

GIVEN = {"noise_multiplier": 0.0, "max_grad_norm": 0.1, "expected_batch_size": BATCH}


def by_hand(wrap=GradSampleModule, kind=DPOptimizer, model_first=True, **changes):
    model = classifier()
    sgd = torch.optim.SGD(model.parameters(), 0.5)
    options = {"loss_reduction": changes.get("loss_reduction", "mean")}
    wrapped = wrap(model, **options) if model_first else None
    optimizer = kind(optimizer=sgd, **GIVEN | changes)
    wrapped = wrapped or wrap(model, **options)
    loader = DataLoader(records(), batch_size=BATCH)
    return (wrapped if isinstance(wrapped, nn.Module) else model), optimizer, loader


@pytest.mark.parametrize("wrap", [GradSampleModule, GradSampleHooks])
@pytest.mark.parametrize("model_first", [True, False])
def test_steps_are_those_of_opacus(wrap, model_first):
    opacus = optional_package("opacus")
    theirs = opacus.GradSampleModule(classifier())
    sgd = torch.optim.SGD(theirs.parameters(), 0.5)
    their_optimizer = opacus.optimizers.DPOptimizer(sgd, **GIVEN)
    model, optimizer, loader = by_hand(wrap, model_first=model_first)
    train(model, optimizer, loader, epochs=2)
    train(theirs, their_optimizer, loader, epochs=2)
    # Opacus divides a norm n above C by n + 1e-6: a relative 1e-5 of every step.
    moved = (parameters_of(theirs) - parameters_of(classifier())).norm()
    assert (parameters_of(model) - parameters_of(theirs)).norm() < 2e-5 * moved


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_a_record_moves_a_step_by_the_bound_at_most(loss_reduction):
    x, y = records()[:BATCH]
    sums = []
    for left_out in range(-1, BATCH):
        kept = [i for i in range(BATCH) if i != left_out]
        model, optimizer, _ = by_hand(loss_reduction=loss_reduction)
        cross_entropy(model(x[kept]), y[kept], reduction=loss_reduction).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
        divided = BATCH if loss_reduction == "mean" else 1
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * divided)
    for other in sums[1:]:
        assert (sums[0] - other).norm() <= GIVEN["max_grad_norm"] * (1 + 1e-6)


def test_noise_is_that_which_was_asked_for():
    model, optimizer, _ = by_hand(noise_multiplier=3.0)
    drawn = []
    for _ in range(50):
        optimizer.step()
        drawn.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    sigma = 3.0 * GIVEN["max_grad_norm"] / BATCH
    count = len(drawn) * len(drawn[0])
    # The sample variance of n normal draws is within 6 standard deviations of its own.
    assert abs(torch.stack(drawn).var() / sigma**2 - 1) < 6 * (2 / count) ** 0.5


def test_an_accountant_that_is_attached_counts_steps():
    accountant = RDPAccountant()
    model, optimizer, loader = by_hand(noise_multiplier=1.0)
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.25))
    train(model, optimizer, loader)
    assert accountant.history == [(1.0, 0.25, len(loader))]
    ((statement, _),) = accountant.accountant.history
    assert statement.unreachable == optimizer.training.unreachable_mass > 0
    epsilon, order = accountant.get_privacy_spent(delta=1e-5)
    assert epsilon == accountant.get_epsilon(1e-5) and order > 1


def test_skipped_steps_add_up():
    wanted, plain, _ = by_hand()
    x, y = records()[:BATCH]
    cross_entropy(wanted(x), y, reduction="mean").backward()
    plain.step()
    model, optimizer, _ = by_hand()
    for part in ([0, 1], [2, 3, 4]):
        optimizer.zero_grad()
        cross_entropy(model(x[part]), y[part]).backward()
        optimizer.signal_skip_step(part == [0, 1])
        optimizer.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(wanted), rtol=1e-12, atol=0)


def test_other_optimizers_clip_as_they_say():
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 1e-3,
        "unclipped_num_std": 2.0,
    }
    model, optimizer, loader = by_hand(kind=AdaClipDPOptimizer, noise_multiplier=1.0, **adaptive)
    train(model, optimizer, loader)
    assert optimizer.noise_multiplier == 1.0 and optimizer.max_grad_norm != 0.1
    model, optimizer, loader = by_hand(kind=DPPerLayerOptimizer, max_grad_norm=[0.3, 0.4, 1.2, 0.5])
    assert optimizer.max_grad_norm == pytest.approx(1.3928388277184118, rel=1e-15)
    train(model, optimizer, loader)


def test_a_schedule_sets_the_noise_of_later_steps():
    accountant = RDPAccountant()
    model, optimizer, loader = by_hand(noise_multiplier=2.0)
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.25))
    schedule = ExponentialNoise(optimizer, gamma=0.5)
    for _ in range(2):
        train(model, optimizer, loader)
        schedule.step()
    assert [sigma for sigma, *_ in accountant.history] == [2.0, 1.0]
    assert optimizer.training.noise_multiplier == 0.5


def test_ended_training_takes_no_step():
    model, optimizer, _ = by_hand()
    assert isinstance(model.to_standard_module(), nn.Sequential)
    with pytest.raises(RuntimeError, match="private training has ended"):
        optimizer.step()


def test_a_second_optimizer_takes_the_model_over():
    model, first, loader = by_hand(noise_multiplier=1.0)
    second = DPOptimizer(torch.optim.SGD(model.parameters(), 0.1), **GIVEN)
    train(model, second, loader)
    assert second.training.steps == len(loader)
    with pytest.raises(RuntimeError, match="private training has ended"):
        first.step()


def test_reductions_must_be_the_same():
    model = GradSampleModule(classifier(), loss_reduction="sum")
    with pytest.raises(ValueError, match="loss_reduction"):
        DPOptimizer(torch.optim.SGD(model.parameters(), 0.1), **GIVEN)


def test_batches_are_split_by_the_loader_of_make_private_only():
    _, optimizer, loader = by_hand()
    with (
        pytest.raises(ValueError, match="signal_skip_step"),
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer),
    ):
        pass


def test_a_checkpoint_goes_on_with_noise_that_was_never_used():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = by_hand(noise_multiplier=1.0)
    train(model, optimizer, loader)
    file, gradients = io.BytesIO(), []
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    for _ in range(2):
        file.seek(0)
        other, resumed, _ = by_hand(noise_multiplier=1.0)
        engine.load_checkpoint(path=file, module=other, optimizer=resumed)
        assert torch.equal(parameters_of(other), parameters_of(model))
        assert resumed.training.steps == len(loader)
        resumed.step()
        gradients.append(torch.cat([p.grad.flatten() for p in other.parameters()]))
    assert not torch.isin(*gradients).any()


@pytest.mark.parametrize("changed", [{"noise_multiplier": 2.0}, {"max_grad_norm": 0.7}, {}])
def test_a_checkpoint_keeps_what_the_caller_has_changed_and_says_so(changed):
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    train(model, optimizer, loader)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    again = PrivacyEngine(accountant="rdp")
    other, resumed, batches = made(again, **changed)
    if changed:
        with pytest.warns(UserWarning, match=f"{next(iter(changed))} stays"):
            again.load_checkpoint(path=file, module=other, optimizer=resumed)
    else:
        again.load_checkpoint(path=file, module=other, optimizer=resumed)
    wanted = {"noise_multiplier": 1.0, "max_grad_norm": 0.3} | changed
    for name, value in wanted.items():
        assert getattr(resumed, name) == value
    assert resumed.training.noise_multiplier == wanted["noise_multiplier"]
    assert resumed.training.sensitivity == wanted["max_grad_norm"]
    train(other, resumed, batches)
    assert again.accountant.history[-1][0] == wanted["noise_multiplier"]
