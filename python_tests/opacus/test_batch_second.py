"""``batch_first=False``: samples on the second axis are trained on as those on the first are."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.opacus import GradSampleModule, PrivacyEngine
from dpkernels.opacus.layers import DPLSTM, DPMultiheadAttention
from dpkernels.opacus.optimizers import DPOptimizer

RECORDS, STEPS, WORDS, WIDTH, CLASSES = 12, 5, 7, 4, 3


class Tagger(nn.Module):
    """One class for each word ``[T, B]`` of each sentence: ``[T, B, C]``."""

    def __init__(self, middle):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.middle = middle
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.norm(self.words(x))
        if isinstance(self.middle, nn.MultiheadAttention):
            x = self.middle(x, x, x)[0]
        elif isinstance(self.middle, nn.RNNBase):
            x = self.middle(x)[0]
        else:
            x = self.middle(x)
        return self.last(x)


class Classifier(Tagger):
    """One class for each sentence ``[T, B]``: ``[B, C]``."""

    def forward(self, x):
        x = self.norm(self.words(x))
        return self.last(self.middle(x)[0][-1])


MODELS = {
    "feed-forward": lambda: Tagger(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH))),
    "attention": lambda: Tagger(DPMultiheadAttention(WIDTH, 2)),
    "lstm": lambda: Tagger(DPLSTM(WIDTH, WIDTH)),
    "last state of a gru": lambda: Classifier(nn.GRU(WIDTH, WIDTH)),
}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def sentences():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (RECORDS, STEPS), generator=generator)
    return x, torch.randint(CLASSES, (RECORDS,), generator=generator)


def loss_of(outputs, labels):
    if outputs.dim() == 3:
        outputs = outputs.mean(0)
    return cross_entropy(outputs, labels)


def wanted_step(model, x, y, bound):
    """Return the average of every sample's clipped gradient, by the loop over single samples."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        loss = loss_of(model(x[i : i + 1].t()), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * min(1.0, float(bound / norm)) / RECORDS
    return total


def batch_second(batch):
    x, y = zip(*batch, strict=True)
    return torch.stack(x, 1), torch.stack(y)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["wrapped", "not wrapped", "by hand"])
def test_a_step_is_that_of_single_samples(name, how):
    model, (x, y) = model_of(name), sentences()
    bound = 0.05
    wanted = wanted_step(copy.deepcopy(model), x, y, bound)
    loader = DataLoader(TensorDataset(x, y), batch_size=RECORDS, collate_fn=batch_second)
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    given = {"noise_multiplier": 0.0, "max_grad_norm": bound}
    called = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "by hand":
            called = GradSampleModule(model, batch_first=False)
            optimizer = DPOptimizer(sgd, expected_batch_size=RECORDS, **given)
        else:
            held, optimizer, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=sgd,
                data_loader=loader,
                poisson_sampling=False,
                batch_first=False,
                wrap_model=how == "wrapped",
                **given,
            )
            called = held if how == "wrapped" else model
    plain = copy.deepcopy(model)
    ((words, labels),) = loader
    torch.testing.assert_close(called(words), plain(words))
    loss_of(called(words), labels).backward()
    assert optimizer.training.samples == RECORDS
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_single_layer_is_a_model_too():
    model = nn.Linear(WIDTH, CLASSES).double()
    x = torch.randn(STEPS, RECORDS, WIDTH, dtype=torch.float64)
    wanted = model(x)
    (gradient,) = torch.autograd.grad(wanted.square().sum() / RECORDS, model.weight)
    wrapped = GradSampleModule(model, batch_first=False)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 1.0),
        noise_multiplier=0.0,
        max_grad_norm=1e6,
        expected_batch_size=RECORDS,
    )
    outputs = wrapped(x)
    torch.testing.assert_close(outputs, wanted)
    outputs.square().sum((0, 2)).mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, gradient)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_given_back_as_it_was(name):
    model = model_of(name)
    held = GradSampleModule(model, batch_first=False)
    DPOptimizer(
        torch.optim.SGD(model.parameters(), 1.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=RECORDS,
    )
    assert "forward" in vars(model)
    assert held.to_standard_module() is model
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_as_many_steps_as_samples_are_still_steps():
    # Which axis holds samples is a matter of the model, not of lengths.
    model = model_of("feed-forward")
    x = torch.randint(WORDS, (STEPS, STEPS))
    labels = torch.randint(CLASSES, (STEPS,))
    wanted = wanted_step(copy.deepcopy(model), x.t(), labels, 0.05)
    called = GradSampleModule(model, batch_first=False)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.05,
        expected_batch_size=RECORDS,
    )
    loss_of(called(x), labels).backward()
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
