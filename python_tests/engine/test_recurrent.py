"""Recurrent networks: outputs of the module itself, sums of the loop over single samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpkernels.ops.factor import Full
from dpkernels.precondition import Sides
from python_tests.engine.autograd_loop import (
    assert_accurate_under_autocast,
    assert_private_sum,
    make_private,
)
from python_tests.tolerance import assert_as_accurate

INPUT, HIDDEN, STEPS, BATCH = 3, 4, 5, 3

KINDS = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected lstm": (nn.LSTM, {"proj_size": 2}),
}
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True, "batch_first": False},
}


class Recurs(nn.Module):
    """Layers on sequences ``[B, T, I]`` from states that depend on the inputs or are not given.

    Outputs, last states and last cells in a row. uses: how often; the states are handed on.
    """

    def __init__(self, kind, states=False, uses=1, checkpointed=False, **options):
        super().__init__()
        module, more = KINDS[kind]
        self.layers = module(INPUT, HIDDEN, **{"batch_first": True, **more, **options})
        self.states, self.uses, self.checkpointed = states, uses, checkpointed
        self.before = nn.Linear(INPUT, INPUT) if states else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        states, results = self._states(x) if self.states else None, []
        for _ in range(self.uses):
            outputs, states = self._run(x, states)
            each = states if isinstance(states, tuple) else (states,)
            results += [outputs.flatten(1), *(s.transpose(0, 1).flatten(1) for s in each)]
        return torch.cat(results, 1)

    def _run(self, x, states):
        if self.checkpointed:
            return checkpoint(self.layers, x, states, use_reentrant=False)
        if self.layers.batch_first:
            return self.layers(x, states)
        outputs, states = self.layers(x.transpose(0, 1), states)
        return outputs.transpose(0, 1), states

    def _states(self, x):
        layers = self.layers
        count = layers.num_layers * (2 if layers.bidirectional else 1)
        first = x.mean((1, 2)).view(1, -1, 1) * torch.arange(1, count + 1).view(-1, 1, 1)
        h = first.expand(-1, -1, layers.proj_size or HIDDEN)
        return (h, first.expand(-1, -1, HIDDEN).cos()) if isinstance(layers, nn.LSTM) else h


def sequences(batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, STEPS, INPUT, generator=generator, dtype=torch.float64)


def seeded(*args, **kwargs) -> Recurs:
    torch.manual_seed(0)
    return Recurs(*args, **kwargs)


def private(model: nn.Module) -> nn.Module:
    make_private(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_sum_is_that_of_the_loop_for_every_option(kind, options):
    assert_private_sum(seeded(kind, **OPTIONS[options]), [sequences()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ["plain", "two layers in both directions"])
def test_gradients_flow_to_initial_states(kind, options):
    assert_private_sum(seeded(kind, states=True, **OPTIONS[options]), [sequences()])


@pytest.mark.parametrize("kind", ["relu", "gru", "lstm"])
@pytest.mark.parametrize(("batch", "reduction"), [(1, "sum"), (1, "mean"), (3, "mean")])
def test_sum_is_that_of_the_loop_for_every_batch_and_reduction(kind, batch, reduction):
    assert_private_sum(seeded(kind), [sequences(batch)], reduction=reduction)


@pytest.mark.parametrize("kind", KINDS)
def test_sum_over_a_single_step_is_that_of_the_loop(kind):
    assert_private_sum(seeded(kind, bidirectional=True), [sequences()[:, :1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", [True, False])
def test_sum_of_a_module_used_twice_has_the_terms_between_the_uses(kind, states):
    assert_private_sum(seeded(kind, states, uses=2), [sequences()])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ("tanh", "gru", "projected lstm")
        for name, _ in Recurs(kind).named_parameters()
    ],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_sum_is_that_of_the_loop_if_one_parameter_is_frozen_or_trained(kind, name, frozen):
    model = seeded(kind, num_layers=2)
    for other, parameter in model.named_parameters():
        parameter.requires_grad_((other == name) != frozen)
    assert_private_sum(model, [sequences()])


@pytest.mark.parametrize("kind", ["tanh", "gru", "projected lstm"])
def test_sum_with_a_weight_shared_between_layers_has_the_terms_between_them(kind):
    model = seeded(kind, num_layers=2)
    model.layers.weight_hh_l1 = model.layers.weight_hh_l0
    assert_private_sum(model, [sequences()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_not_finite_adds_nothing(kind):
    assert_private_sum(seeded(kind, bidirectional=True), [sequences()], poison=True)


@pytest.mark.parametrize("kind", ["tanh", "gru", "lstm"])
def test_checkpointed_layers_have_the_same_sum(kind):
    assert_private_sum(seeded(kind, checkpointed=True), [sequences()])


def test_factors_act_on_weight_and_bias_of_each_product():
    generator = torch.Generator().manual_seed(0)
    sizes = {"ih_l0": (3 * HIDDEN, INPUT + 1), "hh_l0": (3 * HIDDEN, HIDDEN + 1)}
    factors = {
        part: [torch.randn(n, n, generator=generator, dtype=torch.float64).cov() for n in both]
        for part, both in sizes.items()
    }

    def transform(gradient):
        changed = dict(gradient)
        for part, (left, right) in factors.items():
            weight, bias = (f"layers.{x}_{part}" for x in ("weight", "bias"))
            both = left @ torch.cat([gradient[weight], gradient[bias][:, None]], 1) @ right
            changed[weight], changed[bias] = both[:, :-1], both[:, -1]
        return changed

    sides = {f"layers.{part}": Sides(*map(Full, both)) for part, both in factors.items()}
    assert_private_sum(seeded("gru"), [sequences()], sides=sides, transform=transform)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_and_states_are_as_accurate_as_the_modules_own(kind, options):
    model = seeded(kind, True, **OPTIONS[options]).double()
    x = sequences()
    exact = model(x).detach()
    narrow = copy.deepcopy(model).float()
    plain = narrow(x.float()).detach()
    assert_as_accurate(private(narrow)(x.float()).detach(), plain, exact)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_between_layers_and_in_training_only(training):
    model = seeded("gru", num_layers=2, dropout=1.0).double().train(training)
    x = sequences()
    exact = model(x).detach()
    narrow = copy.deepcopy(model).float()
    plain = narrow(x.float()).detach()
    # All of the first layer's outputs are dropped, or none.
    assert_as_accurate(private(narrow)(x.float()).detach(), plain, exact)
    model.layers.dropout = 0.0
    assert torch.equal(model(x), exact) != training


@pytest.mark.parametrize("kind", ["tanh", "gru", "projected lstm"])
def test_sum_is_as_accurate_as_plain_training_under_autocast(kind):
    assert_accurate_under_autocast(seeded(kind), [sequences()])


def test_the_report_names_every_product():
    model = seeded("projected lstm", bidirectional=True)
    training = make_private(model)
    names = [layer.name for layer in training.report().layers]
    assert names == [
        f"layers.{part}_l0{end}" for end in ("", "_reverse") for part in ("ih", "hh", "hr")
    ]


@pytest.mark.parametrize(
    ("shape", "message"),
    [((STEPS, INPUT), "3 axes"), ((2, 0, INPUT), "step"), ((2, STEPS, INPUT + 1), "input_size")],
)
def test_inputs_of_the_wrong_shape_are_refused(shape, message):
    model = private(nn.LSTM(INPUT, HIDDEN, batch_first=True))
    with pytest.raises(RuntimeError, match=message):
        model(torch.zeros(shape))


def test_states_of_other_samples_are_refused():
    model = private(nn.GRU(INPUT, HIDDEN, batch_first=True))
    with pytest.raises(RuntimeError, match="hidden size"):
        model(torch.zeros(2, STEPS, INPUT), torch.zeros(1, 1, HIDDEN))


@pytest.mark.parametrize(
    ("cell", "state"),
    [
        (nn.RNNCell, torch.zeros(1, HIDDEN)),
        (nn.GRUCell, torch.zeros(HIDDEN)),
        (nn.LSTMCell, (torch.zeros(2, HIDDEN), torch.zeros(1, HIDDEN))),
    ],
)
def test_states_of_a_cell_that_are_not_one_a_sample_are_refused(cell, state):
    model = private(cell(INPUT, HIDDEN))
    with pytest.raises(RuntimeError, match=rf"the model itself \({cell.__name__}\).*states"):
        model(torch.zeros(2, INPUT), state)
    with pytest.raises(RuntimeError, match="its input must be"):
        model(torch.zeros(INPUT))
