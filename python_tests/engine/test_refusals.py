"""What cannot be private is refused, before the first step where that can be known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dpkernels
from dpkernels.engine import Unsupported
from python_tests.engine.models import made
from python_tests.engine.oracle import private, square


def old_weight_norm(module, name="weight"):
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(module, name)


def normed_projection():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    weight_norm(attention.out_proj)
    return attention


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), r"1 \(BatchNorm1d\).*group_norm"),
        (nn.BatchNorm2d(3, affine=False), r"the model itself \(BatchNorm2d\)"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm rescales"),
        (nn.Embedding(3, 2, sparse=True), "sparse shows"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq divides"),
        (nn.EmbeddingBag(3, 2, mode="max"), "'sum' or 'mean'"),
        (weight_norm(nn.GRU(3, 3), "weight_hh_l0"), "remove_parametrizations"),
        (normed_projection(), "remove_parametrizations"),
        (old_weight_norm(nn.Linear(3, 3)), "weight_g, weight_v"),
        (old_weight_norm(nn.LSTM(3, 3), "weight_hh_l0"), "weight_hh_l0_g"),
        (nn.LazyLinear(3), "call the model once"),
        (nn.DataParallel(nn.Linear(3, 3)), r"model\.module"),
        (nn.Linear(3, 3).requires_grad_(False), "nothing to train"),
    ],
)
def test_models_are_refused_by_name(model, match):
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    with pytest.raises(Unsupported, match=match):
        dpkernels.make_private(
            model,
            torch.optim.SGD(parameters, 0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            loss_reduction="mean",
        )
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"loss_reduction": "average"}, "one of mean, sum"),
        ({"max_grad_norm": 0.0}, "max_norm"),
        ({"loss_scale": 0.0}, "loss_scale"),
    ],
)
def test_bad_numbers_are_refused(option, match):
    model = nn.Linear(2, 2)
    arguments = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "expected_batch_size": 4,
        "loss_reduction": "mean",
    }
    with pytest.raises(ValueError, match=match):
        dpkernels.make_private(
            model, torch.optim.SGD(model.parameters(), 0.1), **(arguments | option)
        )


def test_the_optimizer_must_update_just_what_is_trained():
    model, stranger = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(3, 3)
    arguments = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "expected_batch_size": 4,
        "loss_reduction": "mean",
    }
    both = [*model.parameters(), *stranger.parameters()]
    with pytest.raises(ValueError, match="without noise"):
        dpkernels.make_private(model, torch.optim.SGD(both, 0.1), **arguments)
    with pytest.raises(ValueError, match=r"weight of 0 \(Linear\)"):
        dpkernels.make_private(model, torch.optim.SGD(model[1].parameters(), 0.1), **arguments)


def test_a_compiled_model_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="_orig_mod"):
        private(torch.compile(model), 1.0)
    model.compile()
    with pytest.raises(Unsupported, match=r"torch\.compile"):
        private(model, 1.0)


def test_a_model_is_made_private_once():
    model = nn.Linear(2, 2)
    training, _ = private(model, 1.0)
    with pytest.raises(Unsupported, match="detach"):
        private(model, 1.0)
    training.detach()
    private(model, 1.0)


def test_a_penalty_on_weights_is_noticed():
    model = nn.Linear(5, 5)
    private(model, 1.0)
    loss = square(model(torch.randn(3, 5))).sum() + model.weight.square().sum()
    with pytest.raises(RuntimeError, match="decay weights in the optimizer"):
        loss.backward()


def test_two_calls_in_one_backward_pass_are_refused():
    model, inputs = made("linear")
    private(model, 1.0)
    loss = square(model(*inputs)).sum() + square(model(inputs[0] + 1)).sum()
    with pytest.raises(RuntimeError, match="two calls of the model"):
        loss.backward()


def test_two_calls_of_a_layer_on_its_own_are_refused():
    model, inputs = made("linear")
    private(model, 1.0)
    loss = square(model[0](inputs[0])).sum() + square(model[0](inputs[0] + 1)).sum()
    with pytest.raises(RuntimeError, match="called twice"):
        loss.backward()


def test_two_backward_passes_through_one_call_are_refused():
    model, inputs = made("linear")
    private(model, 1.0)
    losses = square(model(*inputs))
    losses[0].backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="add the losses up"):
        losses[1:].sum().backward()


def test_a_closure_is_refused():
    model, inputs = made("linear")
    _, optimizer = private(model, 1.0)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: square(model(*inputs)).sum())


def test_norms_are_not_there_unless_asked_for():
    model, inputs = made("linear")
    training, _ = private(model, 1.0)
    square(model(*inputs)).sum().backward()
    with pytest.raises(RuntimeError, match="keep_norms=True"):
        training.sample_norms()


def test_batch_norm_is_converted_in_one_call():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(48))
    )
    nn.init.uniform_(model[1].weight)
    weight = model[1].weight.clone()
    converted = dpkernels.batch_norm_to_group_norm(model)
    assert isinstance(converted[1], nn.GroupNorm) and converted[1].num_groups == 16
    assert torch.equal(converted[1].weight, weight)
    private(converted, 1.0)
    assert isinstance(dpkernels.batch_norm_to_group_norm(nn.BatchNorm1d(8)), nn.GroupNorm)
    with pytest.raises(ValueError, match="groups"):
        dpkernels.batch_norm_to_group_norm(model, groups=0)
