"""Packed sequences: each sample ends where it ends, in recurrent layers of all kinds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpkernels.engine.layers.packed import Padding
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    private,
    private_sum,
    sample_gradients,
)

INPUT, HIDDEN, STEPS = 3, 4, 6
LENGTHS = torch.tensor([2, 6, 1, 4, 4])
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
    "both directions": {"bidirectional": True},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True},
}


class Packs(nn.Module):
    """Recurrent layers on sequences of several lengths, between linear layers.

    Outputs at all steps, last states and last cells in a row, from states that depend on samples.
    """

    def __init__(self, kind, **options):
        super().__init__()
        module, more = KINDS[kind]
        self.before = nn.Linear(INPUT, INPUT)
        self.layers = module(INPUT, HIDDEN, **{"batch_first": True, **more, **options})

    def forward(self, x, lengths):
        x = self.before(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, states = self.layers(packed, self.states(x))
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=STEPS)
        each = states if isinstance(states, tuple) else (states,)
        return torch.cat([padded.flatten(1), *(s.transpose(0, 1).flatten(1) for s in each)], 1)

    def states(self, x):
        layers = self.layers
        count = layers.num_layers * (2 if layers.bidirectional else 1)
        widths = [getattr(layers, "proj_size", 0) or HIDDEN]
        if isinstance(layers, nn.LSTM):
            widths.append(HIDDEN)
        start = x[:, :1, :1].transpose(0, 1)
        states = tuple(start.expand(count, -1, width).contiguous() for width in widths)
        return states if isinstance(layers, nn.LSTM) else states[0]


def example(kind, **options):
    torch.manual_seed(0)
    model = Packs(kind, **options).double()
    return model, torch.randn(len(LENGTHS), STEPS, INPUT, dtype=torch.float64), LENGTHS


@pytest.mark.parametrize("in_order", [False, True])
def test_padding_is_taken_off_again(in_order):
    lengths = LENGTHS.sort(descending=True).values if in_order else LENGTHS
    x = torch.randn(len(lengths), STEPS, INPUT)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
    padded, padding = Padding.of(packed)
    for i, length in enumerate(lengths):
        assert torch.equal(padded[i, :length], x[i, :length]) and not padded[i, length:].any()
        assert torch.equal(padding.last(padded)[i], x[i, length - 1])
        assert torch.equal(padding.reversed(padded)[i, :length], x[i, :length].flip(0))
    again = padding.repacked(padded)
    for field, wanted in zip(again, packed, strict=True):
        assert field is wanted is None or torch.equal(field, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_and_sums_are_those_of_single_samples(kind, options):
    model, x, lengths = example(kind, **options)
    gradients = sample_gradients(model, (x, lengths))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (x, lengths), bound), clipped_sum(gradients, bound))
    followed = copy.deepcopy(model)
    private(followed, bound)
    given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual, wanted = followed(given, lengths), model(other, lengths)
    torch.testing.assert_close(actual, wanted)
    for output in (actual, wanted):
        output.square().sum().backward()
    torch.testing.assert_close(given.grad, other.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_after_the_end_of_a_sequence_does_not_matter(kind):
    model, x, lengths = example(kind, bidirectional=True)
    bound = median_norm(sample_gradients(model, (x, lengths)))
    wanted = private_sum(model, (x, lengths), bound)
    after = torch.arange(STEPS) >= lengths.unsqueeze(1)
    for value in (1e30, float("nan")):
        changed = torch.where(after.unsqueeze(-1), value, x)
        # Without the linear layer, which sees the padding, too.
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        for copied in (one, other):
            copied.before = nn.Identity()
        assert_same(
            private_sum(one, (changed, lengths), bound), private_sum(other, (x, lengths), bound)
        )
    assert_same(private_sum(model, (x, lengths), bound), wanted)


def test_states_that_overflow_after_the_end_do_not_drop_the_sample():
    # relu(8 h): 8^t leaves float64's range after 341 steps, which the short sequence never takes.
    layer = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True).double()
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1.0)
        layer.weight_hh_l0.fill_(8.0)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.layer(packed)[1][0]

    x = torch.zeros(2, 400, 1, dtype=torch.float64)
    x[0, :2] = 1.0
    lengths = torch.tensor([2, 400])
    gradients = sample_gradients(Last(), (x[:1], lengths[:1]))
    wanted = clipped_sum(gradients, 1.0)
    assert_same(private_sum(Last(), (x, lengths), 1.0), wanted)


def test_a_record_moves_the_sum_by_the_bound_at_most():
    model, x, lengths = example("lstm", bidirectional=True, num_layers=2)
    bound = median_norm(sample_gradients(model, (x, lengths)))
    everyone = private_sum(model, (x, lengths), bound)
    for left_out in range(len(x)):
        kept = [i for i in range(len(x)) if i != left_out]
        rest = private_sum(model, (x[kept], lengths[kept]), bound)
        moved = sum((everyone[n] - g).square().sum() for n, g in rest.items()).sqrt()
        assert moved <= bound * (1 + 1e-6)
