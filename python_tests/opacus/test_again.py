"""``make_private`` again on a model: rounds of federated code, phases of training."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dpkernels.opacus import GradSampleModule, PrivacyEngine
from dpkernels.opacus.data_loader import DPDataLoader
from dpkernels.opacus.optimizers import DPOptimizer
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
ROUNDS = 3


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("given", ["wrapped", "inside"])
@pytest.mark.parametrize("forgotten", [True, False])
def test_rounds_add_up_and_end_each_other(wrap_model, given, forgotten):
    engine = PrivacyEngine(accountant="rdp")
    inner = module = classifier()
    loader = DataLoader(records(), batch_size=BATCH)
    earlier = []
    for done in range(ROUNDS):
        sgd = torch.optim.SGD(inner.parameters(), 0.5)
        held, optimizer, private = made(
            engine, module=module, optimizer=sgd, data_loader=loader, wrap_model=wrap_model
        )
        if wrap_model and given == "wrapped":
            module = held
        train(inner, optimizer, private)
        assert engine.accountant.history == [(1.0, BATCH / RECORDS, (done + 1) * len(loader))]
        for old in earlier:
            with pytest.raises(RuntimeError, match="private training has ended"):
                old.step()
        earlier = [] if forgotten else [*earlier, optimizer]
        del held, optimizer, private, sgd


def test_the_optimizer_and_the_loader_of_the_round_before_serve_again():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    for _ in range(ROUNDS):
        train(model, optimizer, loader)
        model, optimizer, loader = made(
            engine, module=model, optimizer=optimizer, data_loader=loader
        )
    assert isinstance(model, GradSampleModule) and not isinstance(model._module, GradSampleModule)
    assert len(optimizer.original_optimizer._optimizer_step_pre_hooks) == 2
    assert engine.accountant.history[0][2] == ROUNDS * len(loader)


def test_a_round_clips_and_adds_noise_once():
    # Without noise, a second round's step is that of a model made private once.
    first = made(poisson_sampling=False, noise_multiplier=0.0)
    again = made(
        module=made(poisson_sampling=False, noise_multiplier=0.0)[0],
        poisson_sampling=False,
        noise_multiplier=0.0,
    )
    train(*first)
    train(*again)
    assert torch.equal(parameters_of(first[0]), parameters_of(again[0]))


@pytest.mark.parametrize("same", ["generator", "seed"])
def test_no_noise_comes_twice(same):
    model, generator, gradients = classifier(), torch.Generator().manual_seed(3), []
    for _ in range(ROUNDS):
        if same == "seed":
            generator = torch.Generator().manual_seed(3)
        model, optimizer, _ = made(module=model, noise_generator=generator)
        optimizer.step()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for k, one in enumerate(gradients):
        for other in gradients[k + 1 :]:
            assert not torch.isin(one, other).any()


def test_two_models_of_one_generator_have_noise_of_their_own():
    generator, gradients = torch.Generator().manual_seed(3), []
    for _ in range(2):
        model, optimizer, _ = made(noise_generator=generator)
        optimizer.step()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.isin(*gradients).any()


def test_samples_of_the_round_before_are_not_dropped():
    engine = PrivacyEngine(accountant="rdp")
    model, _, loader = made(engine, poisson_sampling=False)
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="has no step"):
        made(engine, module=model, data_loader=loader, poisson_sampling=False)


def test_what_is_wrong_leaves_the_round_before_alone():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    for wrong in ({"noise_multiplier": -1.0}, {"clipping": "none"}, {"sample_rate": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            made(engine, module=model, data_loader=loader, **wrong)
    train(model, optimizer, loader)
    assert engine.accountant.history[0][2] == len(loader)


def test_a_phase_may_train_other_layers():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    train(model, optimizer, loader)
    first = model._module[0]
    first.requires_grad_(False)
    frozen = first.weight.clone()
    rest = torch.optim.SGD(model._module[2].parameters(), 0.5)
    model, optimizer, loader = made(engine, module=model, optimizer=rest, data_loader=loader)
    train(model, optimizer, loader)
    assert torch.equal(first.weight, frozen)


@pytest.mark.parametrize("batch", [3, 7, 8])
def test_the_expected_batch_size_is_not_rounded(batch):
    loader = DataLoader(records(), batch_size=batch)
    _, optimizer, private = made(data_loader=loader)
    assert optimizer.expected_batch_size == pytest.approx(RECORDS / len(loader), rel=1e-12)
    assert optimizer.training.expected_batch_size == optimizer.expected_batch_size
    assert private.sample_rate == 1 / len(loader)


def test_the_generator_of_a_loader_drives_the_sampling_and_says_so():
    def drawn(seed):
        loader = DataLoader(
            records(), batch_size=BATCH, generator=torch.Generator().manual_seed(seed)
        )
        with pytest.warns(UserWarning, match="who was in each batch"):
            *_, private = PrivacyEngine(accountant="rdp").make_private(
                **arguments(data_loader=loader)
            )
        return [x[:, 0].tolist() for x, _ in private]

    assert drawn(5) == drawn(5) != drawn(6)
    # Without one, and with a loader of ours, whose workers have a generator, nothing is seeded.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(**arguments())
        again = arguments(module=model, optimizer=optimizer, data_loader=loader)
        *_, loader = PrivacyEngine(accountant="rdp").make_private(**again)
        loader = DPDataLoader.from_data_loader(loader)
    assert loader.private_sampler.seed is None


def test_a_batch_without_a_step_is_not_dropped_by_making_the_model_private_again():
    engine = PrivacyEngine()
    model, optimizer, loader = _begun(engine)
    for _ in loader:
        break
    with pytest.raises(RuntimeError, match="has no step"):
        engine.make_private(
            module=model,
            optimizer=optimizer.original_optimizer,
            data_loader=_data(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    engine.make_private(
        module=model,
        optimizer=optimizer.original_optimizer,
        data_loader=_data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def test_an_optimizer_built_by_hand_gives_way_to_make_private():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    by_hand = DPOptimizer(
        optimizer=torch.optim.SGD(module.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=8,
    )
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=module,
        optimizer=by_hand,
        data_loader=_data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    assert engine.get_epsilon(1e-5) > 0


def _data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    y = torch.randint(3, (64,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def _begun(engine):
    module = torch.nn.Linear(4, 3)
    return engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), 0.1),
        data_loader=_data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
