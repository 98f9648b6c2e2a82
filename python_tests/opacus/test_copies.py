"""Models in private training are saved, loaded and copied as ordinary ones are."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from dpkernels.opacus import GradSampleModule, PrivacyEngine
from python_tests.opacus.small import arguments, classifier, made, parameters_of, train


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"torch.save": saved_and_loaded, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("options", [{}, {"batch_first": False}], ids=["first", "second"])
def test_a_copy_computes_the_same_and_is_its_own(copied, options):
    model, optimizer, _ = made(**options)
    x = torch.randn(2, 3, 4).double()
    other = copied(model)
    with torch.no_grad():
        wanted = model(x)
        assert isinstance(other, GradSampleModule) and torch.equal(other(x), wanted)
        optimizer.step()  # of noise
        assert torch.equal(other(x), wanted) and not torch.equal(model(x), wanted)
    assert other.state_dict().keys() == model.state_dict().keys()
    assert other.training and not copied(model.eval()).training


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_made_private_on_its_own(copied):
    model, optimizer, loader = made()
    other, others, batches = made(module=copied(model))
    train(other, others, batches)
    before = parameters_of(other)
    train(model, optimizer, loader)
    assert torch.equal(parameters_of(other), before)
    assert others.training.steps == optimizer.training.steps == len(loader)


def test_saving_does_not_disturb_the_training_that_goes_on():
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine)
    train(model, optimizer, loader)
    saved_and_loaded(model)
    train(model, optimizer, loader)
    assert optimizer.training.steps == engine.accountant.history[0][2] == 2 * len(loader)


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


@pytest.mark.parametrize("prefix", ["", "_module."])
def test_states_of_models_that_contain_a_wrapped_one_load(prefix):
    model, *_ = made()
    outer = Pair(model, nn.Linear(2, 2).double())
    names = [name for name, _ in outer.named_parameters()]
    assert [*outer.state_dict()] == names and names[0] == "first._module.0.weight"
    wanted = {name: x + 1 for name, x in outer.state_dict().items()}
    given = {name.replace("_module.", prefix): x for name, x in wanted.items()}
    assert outer.load_state_dict(given) == ([], [])
    assert all(torch.equal(x, wanted[name]) for name, x in outer.state_dict().items())
    # What is missing or unexpected is still noticed.
    with pytest.raises(RuntimeError, match="Missing"):
        outer.load_state_dict({name: x for name, x in given.items() if "0.bias" not in name})
    with pytest.raises(RuntimeError, match="Unexpected"):
        outer.load_state_dict(given | {"first.strange": torch.zeros(1)})


def test_a_wrapped_model_that_nobody_trains_privately_warns():
    model = GradSampleModule(classifier())
    with pytest.warns(UserWarning, match="neither clipped nor noisy"):
        model(torch.randn(2, 4).double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private, *_ = PrivacyEngine(accountant="rdp").make_private(**arguments())
        private(torch.randn(2, 4).double())


def test_a_model_that_cannot_be_trained_privately_is_refused_where_it_is_wrapped():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    with pytest.raises(NotImplementedError, match="BatchNorm1d"):
        GradSampleModule(model)
    assert GradSampleModule(model, strict=False)._module is model


def test_disabled_hooks_let_calls_pass_that_cannot_be_trained_on():
    model, optimizer, _ = made()
    x = torch.randn(2, 4).double()
    model.disable_hooks()
    with pytest.raises(RuntimeError, match="clipped"):
        model(x).sum().backward()
    model.enable_hooks()
    model(x).sum().backward()
    assert optimizer.training.samples == 2
