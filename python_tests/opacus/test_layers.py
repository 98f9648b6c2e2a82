"""Layers under Opacus' names take its arguments, and load and compute what its layers do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels.opacus import layers
from dpkernels.opacus.grad_sample.functorch import make_functional
from dpkernels.opacus.utils.module_utils import (
    are_state_dict_equal,
    parametrized_modules,
    trainable_modules,
    trainable_parameters,
)
from python_tests.optional_packages import optional_package

RECURRENT = [
    ("DPRNN", {}),
    ("DPRNN", {"nonlinearity": "relu", "num_layers": 2}),
    ("DPGRU", {"bidirectional": True}),
    ("DPGRU", {"bias": False}),
    ("DPLSTM", {"num_layers": 2, "bidirectional": True}),
]


def assert_close(ours, theirs):
    """Both compute the same in float64, through some hundred additions of numbers about 1."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1000 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent_layers_compute_what_opacus_ones_do(kind, options, nested):
    theirs = getattr(optional_package("opacus.layers"), kind)
    torch.manual_seed(0)
    wanted = theirs(5, 4, batch_first=True, **options).double()
    layer = getattr(layers, kind)(5, 4, batch_first=True, **options).double()
    if nested:
        nn.Sequential(layer).load_state_dict(nn.Sequential(wanted).state_dict())
    else:
        layer.load_state_dict(wanted.state_dict())
    x = torch.randn(3, 6, 5).double()
    directions = 2 if options.get("bidirectional") else 1
    shape = directions * options.get("num_layers", 1), 3, 4
    state = torch.randn(shape).double()
    state = (state, torch.randn(shape).double()) if kind == "DPLSTM" else state
    for start in ({}, {"state_init": state}):
        output, last = layer(x, **start)
        their_output, their_last = wanted(x, **start)
        assert_close(output, their_output)
        assert_close(last, their_last)
    assert_close(layer(x, hx=state)[0], wanted(x, state)[0])


@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_states_have_torchs_names(kind, options):
    layer = getattr(layers, kind)(5, 4, **options)
    plain = getattr(nn, kind.removeprefix("DP"))(5, 4, **options)
    assert [*layer.state_dict()] == [*plain.state_dict()]


@pytest.mark.parametrize("kind", ["DPRNN", "DPGRU"])
def test_only_an_lstm_projects(kind):
    with pytest.raises(ValueError, match="proj_size"):
        getattr(layers, kind)(5, 4, proj_size=2)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"kdim": 6, "vdim": 7}])
def test_attention_computes_what_opacus_does(options):
    theirs = optional_package("opacus.layers").DPMultiheadAttention
    torch.manual_seed(0)
    # With batch_first=True, Opacus 1.6 takes heads for positions on the way out.
    wanted = theirs(8, 2, **options).double()
    inputs = [torch.randn(5, 3, options.get(name, 8)).double() for name in ("", "kdim", "vdim")]
    output, weights = wanted(*inputs)
    for batch_first in (False, True):
        layer = layers.DPMultiheadAttention(8, 2, batch_first=batch_first, **options).double()
        layer.load_state_dict(wanted.state_dict())
        turned = [x.transpose(0, 1) if batch_first else x for x in inputs]
        ours, our_weights = layer(*turned)
        assert_close(ours.transpose(0, 1) if batch_first else ours, output)
        assert_close(our_weights, weights)


def test_a_model_becomes_a_function_of_its_parameters():
    model = nn.Linear(3, 2)
    call, values = make_functional(model, disable_autograd_tracking=True)
    assert not any(value.requires_grad for value in values)
    x = torch.randn(4, 3)
    assert torch.equal(call(values, x), model(x))
    assert torch.equal(call([0 * value for value in values], x), torch.zeros(4, 2))


def test_modules_and_parameters_are_counted_by_whether_they_are_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2).requires_grad_(False))
    assert [name for name, _ in parametrized_modules(model)] == ["0", "2"]
    assert [name for name, _ in trainable_modules(model)] == ["0"]
    assert [name for name, _ in trainable_parameters(model)] == ["0.weight", "0.bias"]
    state = model.state_dict()
    assert are_state_dict_equal(state, {name: x.clone() for name, x in state.items()})
    assert not are_state_dict_equal(state, {name: x + 1 for name, x in state.items()})
