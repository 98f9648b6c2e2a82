"""The private loader in Accelerate's and Lightning's hands: the same steps as in a plain loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import dpkernels
from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.data_loader import DPDataLoader
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.mechanism import Poisson, gaussian_step
from dpkernels.privacy.samplers import FixedSizeSampler
from dpkernels.run import PrivateLoader, PrivateRun
from python_tests.opacus.small import BATCH, RECORDS, arguments, classifier, parameters_of, records
from python_tests.optional_packages import optional_package

accelerate = optional_package("accelerate")
lightning = optional_package("lightning")

EPOCHS, RATE, DELTA = 3, BATCH / RECORDS, 1e-5
STEPS = EPOCHS * RECORDS // BATCH

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def accelerator():
    """Return what makes an accelerator, which is one for the whole process until the test ends."""

    def made(**options):
        return accelerate.Accelerator(cpu=True, **options)

    yield made
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def seeded_loader(**options) -> DPDataLoader:
    """Return a loader that draws the same batches in every test."""
    return DPDataLoader(
        records(), sample_rate=RATE, generator=torch.Generator().manual_seed(3), **options
    )


def seeded(**changes):
    """Return an engine and what it makes private, with samples and noise from seeds."""
    engine = PrivacyEngine(accountant="rdp")
    generator = torch.Generator().manual_seed(5)
    changes = {"data_loader": seeded_loader(), "noise_generator": generator} | changes
    return engine, *engine.make_private(**arguments(**changes))


def plain_loop():
    """Return the parameters after an ordinary loop over the same samples, with the same noise."""
    _, model, optimizer, loader = seeded()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return parameters_of(model)


def check_private(engine, optimizer) -> None:
    """Assert that every step was accounted for, and had noise once."""
    accountant = make_accountant("rdp")
    mass = optimizer.run.training.unreachable_mass
    accountant.compose(gaussian_step(1.0, Poisson(RATE), unreachable=mass), STEPS)
    assert engine.get_epsilon(DELTA) == pytest.approx(accountant.epsilon(DELTA), rel=1e-12)
    training = optimizer.run.training
    assert training.steps == STEPS
    one_step = training.noise_key.counter / STEPS
    _, _, other_optimizer, _ = seeded()
    other_optimizer.step()
    assert other_optimizer.run.training.noise_key.counter == one_step


@pytest.mark.parametrize("workers", [0, 1])
def test_a_prepared_loader_trains_as_the_loader_does(accelerator, workers):
    accelerator = accelerator()
    engine, model, optimizer, loader = seeded(data_loader=seeded_loader(num_workers=workers))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    their_model, their_optimizer, their_loader, their_scheduler = prepared
    for _ in range(EPOCHS):
        for x, y in their_loader:
            with accelerator.accumulate(their_model):
                accelerator.backward(cross_entropy(their_model(x), y))
                their_optimizer.step()
                their_scheduler.step()
                their_optimizer.zero_grad()
    assert torch.equal(parameters_of(model), plain_loop())
    check_private(engine, optimizer)


def test_a_prepared_loader_puts_batches_on_the_accelerators_device(accelerator, monkeypatch):
    *_, loader = seeded()
    loader = accelerator().prepare(loader)
    state = accelerate.state.PartialState._shared_state
    monkeypatch.setitem(state, "device", torch.device("meta"))
    x, y = next(iter(loader))
    assert x.is_meta and y.is_meta


def test_accumulating_batches_with_accelerate_is_refused(accelerator):
    accelerator = accelerator(gradient_accumulation_steps=2)
    _, model, optimizer, loader = seeded()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loop():
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="instead of adding batches up"):
        loop()


def test_a_loader_that_was_prepared_before_gets_that_reason(accelerator):
    prepared = accelerator().prepare(DataLoader(records(), batch_size=BATCH, shuffle=True))
    with pytest.raises(ValueError, match="went through Accelerate's prepare"):
        PrivacyEngine().make_private(**arguments(data_loader=prepared))


class Lit(lightning.LightningModule):
    """A classifier with the hooks that Lightning asks for."""

    def __init__(self, model, optimizer=None):
        super().__init__()
        self.model = model
        self.held = [optimizer]  # an optimizer is no part of the module's state

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self):
        return self.held[0]


class MadePrivateByItself(Lit):
    """Makes itself private in ``configure_optimizers``, with the loader that the trainer has."""

    def configure_optimizers(self):
        self.trainer.fit_loop.setup_data()
        engine, _, optimizer, _ = seeded(module=self, data_loader=self.trainer.train_dataloader)
        self.held = [optimizer, engine]
        return optimizer


def fit(lit, loader, **options):
    silent = ("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "logger")
    quiet = dict.fromkeys(silent, False)
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1} | quiet | options
    trainer = lightning.Trainer(**options)
    trainer.fit(lit, loader)
    return trainer


@pytest.mark.parametrize("workers", [0, 1])
def test_lightning_trains_as_a_plain_loop_does(workers):
    engine, model, optimizer, loader = seeded(data_loader=seeded_loader(num_workers=workers))
    trainer = fit(Lit(model, optimizer), loader)
    assert trainer.global_step == STEPS
    assert torch.equal(parameters_of(model), plain_loop())
    check_private(engine, optimizer)


def test_a_module_that_makes_itself_private_is_fed_by_the_trainers_loader():
    lit = MadePrivateByItself(classifier())
    fit(lit, seeded_loader())
    assert torch.equal(parameters_of(lit.model), plain_loop())
    optimizer, engine = lit.held
    check_private(engine, optimizer)


def test_lightning_may_stop_and_go_on_in_the_middle_of_an_epoch():
    engine, model, optimizer, loader = seeded()
    fit(Lit(model, optimizer), loader, max_epochs=-1, max_steps=STEPS - 5)
    fit(Lit(model, optimizer), loader, max_epochs=-1, max_steps=5)
    check_private(engine, optimizer)


def test_samples_of_the_first_loader_get_that_reason():
    own = DataLoader(records(), batch_size=BATCH)
    _, model, optimizer, _ = seeded(data_loader=own)
    with pytest.raises(RuntimeError, match=r"come from another loader .*make_private returned"):
        fit(Lit(model, optimizer), own)


def test_manual_optimisation_of_a_run():
    class Manual(Lit):
        automatic_optimization = False

        def training_step(self, batch, index):
            x, y = batch
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(cross_entropy(self(x), y))
            optimizer.step()
            optimizer.zero_grad()

    model = nn.Sequential(nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        loss_reduction="mean",
    )
    loader = PrivateLoader(records(), FixedSizeSampler(RECORDS, BATCH))
    run = PrivateRun(training, loader, accountant="rdp")
    fit(Manual(model, optimizer), loader)
    assert training.steps == run.accountant.steps == STEPS


def test_a_distributed_sampler_in_place_of_ours_is_refused():
    sampler = torch.utils.data.DistributedSampler(records(), num_replicas=2, rank=0)
    with pytest.raises(TypeError, match=r"got DistributedSampler.*use_distributed_sampler=False"):
        PrivateLoader(records(), sampler)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_gets_that_reason(in_place):
    model = classifier()
    if in_place:
        model.compile()
    else:
        model = torch.compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(dpkernels.Unsupported, match=r"went through torch\.compile"):
            PrivacyEngine().make_private(**arguments(module=model))
