"""Samples that influence each other, and axes that are not the samples', are refused at once."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpkernels.engine import Unsupported
from dpkernels.engine.provenance import Provenance
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    private,
    private_sum,
    sample_gradients,
    square,
)


class Between(nn.Module):
    """A function of the whole batch before, between or after two linear layers."""

    def __init__(self, function, place):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function, self.place = function, place

    def forward(self, x):
        x = self.function(x) if self.place == "before" else x
        x = torch.tanh(self.first(x))
        x = self.second(self.function(x) if self.place == "between" else x)
        return self.function(x) if self.place == "after" else x


class Running:
    """A running mean that no buffer holds."""

    mean = 0.0

    def __call__(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def sort_and_unsort(x):
    order = x.detach()[:, 0].argsort()
    weights = torch.linspace(1, 2, len(x), dtype=x.dtype).unsqueeze(1)
    return (x[order] * weights)[order.argsort()]


def sorted_order(x):
    return x[x.detach()[:, 0].argsort()]


MIXING = {
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "mean": lambda x: x - x.mean(0),
    "detached mean": lambda x: x - x.detach().mean(0),
    "largest": lambda x: x / x.abs().max(),
    "detached scale": lambda x: x / x.detach().std(),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "sorted": sorted_order,
    "sort and unsort": sort_and_unsort,
    "softmax over samples": lambda x: x.softmax(0),
    "attention over samples": lambda x: (x @ x.T).softmax(1) @ x,
    "running mean": lambda x: Running()(Running()(x)),
    "cumulative sum": lambda x: x.cumsum(0),
    "neighbour": lambda x: x + torch.cat([x[1:], x[:1]]),
}


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("samples", [2, 3, 8])
def test_a_model_that_mixes_samples_is_refused_before_anything_is_collected(name, place, samples):
    torch.manual_seed(0)
    model = Between(MIXING[name], place).double()
    training, _ = private(model, 1.0)
    x = torch.randn(samples, 4, dtype=torch.float64)
    with pytest.raises(Unsupported, match="mixes samples") as refused:
        model(x)
    assert training.samples == 0
    # Nothing of the records: no number but the names of layers.
    assert not re.search(r"\d\.\d|tensor", str(refused.value))


def test_a_running_mean_that_no_buffer_holds_is_refused():
    model = Between(Running(), "between").double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match="mixes samples"):
        model(torch.randn(4, 4, dtype=torch.float64))


def test_a_loss_inside_of_the_model_that_mixes_samples_is_refused():
    class Loss(nn.Module):
        def __init__(self, normalised):
            super().__init__()
            self.layer, self.normalised = nn.Linear(4, 3), normalised

        def forward(self, x, y):
            losses = functional.cross_entropy(self.layer(x), y, reduction="none", ignore_index=-100)
            return losses.sum() / ((y >= 0).sum() if self.normalised else len(y))

    x, y = torch.randn(6, 4), torch.tensor([0, -100, 2, -100, -100, 0])
    model = Loss(normalised=True)
    private(model, 1.0)
    with pytest.raises(Unsupported, match="mixes samples"):
        model(x, y)
    model = Loss(normalised=False)
    training, _ = private(model, 1.0)
    model(x, y).backward()
    assert training.samples == 6


class SecondAxis(nn.Module):
    """Layers that are given ``[T, N, ...]``, or positions ``[T, ...]``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(20, 4)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        for name in ("tokens", "linear", "norm"):
            getattr(self, name).requires_grad_(name == kind.split()[0])
        self.places.requires_grad_(kind == "places of samples")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        match self.kind:
            case "tokens":
                h = self.tokens(x.t()).transpose(0, 1)
            case "linear":
                h = self.linear(self.tokens(x).transpose(0, 1)).transpose(0, 1)
            case "norm":
                h = self.norm(self.tokens(x).transpose(0, 1)).transpose(0, 1)
            case "linear on positions":
                h = self.tokens(x) + self.linear(self.places.weight[: x.shape[1]])
            case "norm on positions":
                h = self.tokens(x) + self.norm(self.places.weight[: x.shape[1]])
            case "places of samples":
                h = self.tokens(x) + self.places(x[0])
        return self.head(torch.tanh(h))


@pytest.mark.parametrize(
    "kind",
    ["tokens", "linear", "norm", "linear on positions", "norm on positions", "places of samples"],
)
@pytest.mark.parametrize(("samples", "length"), [(5, 5), (5, 3), (5, 1), (2, 2), (3, 7)])
def test_an_axis_that_is_not_the_samples_is_served_right_or_refused(kind, samples, length):
    """Also if it is as long as the batch: by a module around the layer that has samples first."""
    torch.manual_seed(0)
    model = SecondAxis(kind).double()
    x = torch.randint(9, (samples, length))
    gradients = sample_gradients(model, (x,))
    bound = median_norm(gradients)
    training, optimizer = private(model, bound)
    try:
        square(model(x)).sum().backward()
    except (Unsupported, RuntimeError):
        assert training.samples == 0 and kind == "places of samples"
        return
    assert training.samples == samples
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def test_tokens_of_records_on_the_second_axis_are_not_taken_for_positions():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.tokens(x.t()).transpose(0, 1))

    torch.manual_seed(0)
    model, x = Transposed().double(), torch.randint(9, (6, 1))
    gradients = sample_gradients(model, (x,))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (x,), bound), clipped_sum(gradients, bound))


class Places(nn.Module):
    """Positions in every form that is known to be shared by all samples."""

    def __init__(self, form):
        super().__init__()
        self.tokens, self.places, self.head = (
            nn.Embedding(9, 4),
            nn.Embedding(12, 4),
            nn.Linear(4, 3),
        )
        self.register_buffer("ids", torch.arange(12).unsqueeze(0))
        self.form = form

    def forward(self, x):
        steps = x.shape[1]
        places = {
            "[T]": lambda: torch.arange(steps),
            "[1, T]": lambda: torch.arange(steps).unsqueeze(0),
            "buffer": lambda: self.ids[:, :steps],
            "[N, T]": lambda: self.ids[:, :steps].expand(len(x), -1),
            "computed": lambda: torch.ones(steps, dtype=torch.long).cumsum(0).flip(0) - 1,
            "longest": lambda: torch.arange(int((x >= 0).sum(1).max())),
            "of samples": lambda: (x >= 0).long().cumsum(1) - 1,
        }[self.form]()
        return self.head(torch.tanh(self.tokens(x) + self.places(places)))


FORMS = ("[T]", "[1, T]", "buffer", "[N, T]", "computed", "longest", "of samples")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes", [[(5, 5)], [(5, 3)], [(1, 4), (4, 4)], [(1, 1), (3, 3)], [(4, 7), (7, 7), (7, 4)]]
)
def test_positions_are_shared_by_all_samples_whatever_the_lengths(form, sizes):
    torch.manual_seed(0)
    model = Places(form).double()
    batches = [torch.randint(9, size) for size in sizes]
    gradients = [g for x in batches for g in sample_gradients(model, (x,))]
    bound = median_norm(gradients)
    _, optimizer = private(model, bound)
    for x in batches:
        square(model(x)).sum().backward()
    optimizer.step()
    actual = {name: p.grad for name, p in model.named_parameters()}
    assert_same(actual, clipped_sum(gradients, bound))


class Unsqueezed(Places):
    """Positions whose shape matters."""

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1])).unsqueeze(0)
        return self.head(self.tokens(x) + places)


class Both(Places):
    """One table for tokens and positions."""

    def forward(self, x):
        return self.head(torch.tanh(self.places(x) + self.places(torch.arange(x.shape[1]))))


@pytest.mark.parametrize("kind", [Unsqueezed, Both])
@pytest.mark.parametrize("size", [(5, 3), (4, 4)])
def test_what_is_looked_up_once_is_served_by_the_module_around_it(kind, size):
    torch.manual_seed(0)
    model, x = kind("").double(), torch.randint(9, size)
    if kind is Both:
        model.tokens.requires_grad_(False)
    gradients = sample_gradients(model, (x,))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (x,), bound), clipped_sum(gradients, bound))


def test_the_trial_leaves_random_numbers_and_dropout_as_they_were():
    results = []
    for made_private in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 30), nn.Dropout(), nn.Linear(30, 3))
        if made_private:
            private(model, 1.0)
        results.append(model(torch.randn(6, 4)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_samples_that_are_not_finite_or_equal_are_no_reason_to_refuse():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    training, optimizer = private(model, 1.0)
    x = torch.randn(6, 4)
    x[1], x[2], x[4] = float("inf"), float("nan"), x[3]
    square(model(x)).sum().backward()
    assert training.samples == 6 and training.nonfinite_samples == 2
    optimizer.step()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_model_without_outputs_of_samples_still_trains():
    class OnlyLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).square().sum()

    torch.manual_seed(0)
    model = OnlyLoss().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    gradients = sample_gradients(model, (x,), loss=lambda y: y)
    bound = median_norm(gradients)
    assert_same(private_sum(model, (x,), bound, loss=lambda y: y), clipped_sum(gradients, bound))


class OnPacked(nn.Module):
    """A recurrent layer that the model's packed argument goes straight into."""

    def __init__(self, mixes=False):
        super().__init__()
        self.layer, self.mixes = nn.GRU(3, 4, batch_first=True), mixes

    def forward(self, packed):
        outputs, last = self.layer(packed)
        return (outputs, last[0] - last[0].mean(0)) if self.mixes else (outputs, last[0])


def packed_batch(rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, 3, generator=generator, dtype=torch.float64)[rows]
    lengths = torch.tensor([2, 6, 1, 4, 4])[rows]
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def test_packed_arguments_are_samples_of_their_own():
    def loss(output):
        outputs, last = output
        padded, _ = pad_packed_sequence(outputs, batch_first=True)
        return padded.square().sum((1, 2)) + last.square().sum(1)

    torch.manual_seed(0)
    model = OnPacked().double()
    gradients = []
    for i in range(5):
        value = loss(model(packed_batch([i]))).sum()
        found = torch.autograd.grad(value, list(model.parameters()))
        gradients.append(dict(zip(dict(model.named_parameters()), found, strict=True)))
    bound = median_norm(gradients)
    actual = private_sum(model, (packed_batch([0, 1, 2, 3, 4]),), bound, loss)
    assert_same(actual, clipped_sum(gradients, bound))
    private(mixing := OnPacked(mixes=True).double(), 1.0)
    with pytest.raises(Unsupported, match="mixes samples"):
        mixing(packed_batch([0, 1, 2, 3, 4]))


@pytest.mark.parametrize("seed", range(30))
def test_errors_that_cancel_are_no_reason_to_refuse(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2, 2),
        nn.ReLU(),
        nn.LayerNorm(2),
        nn.Linear(2, 1024),
        nn.Linear(1024, 10),
        nn.Linear(10, 1),
        nn.Flatten(),
        nn.Softmax(1),
    )
    training, _ = private(model, 1.0)
    square(model(torch.randn(10, 5, 2))).sum().backward()
    assert training.samples == 10


def test_a_batch_that_is_sorted_by_length_stays_sorted():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 4, batch_first=True)

        def forward(self, x, lengths):
            return self.layer(pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    training, _ = private(model := Sorted(), 1.0)
    square(model(torch.randn(6, 5, 3), torch.tensor([5, 4, 4, 3, 2, 1]))).sum().backward()
    assert training.samples == 6


def test_provenance_follows_values_and_not_names():
    table, x = torch.arange(9), torch.randint(9, (4, 3))
    with Provenance([table]) as provenance:
        shared = {
            "factory": torch.arange(3),
            "view": table[2:5].unsqueeze(0),
            "sum": table[:3] + torch.ones(3, dtype=torch.long),
            "length": torch.arange(int(x.shape[1])),
        }
        written = torch.zeros(3, dtype=torch.long)
        view = written[:2]
        written.copy_(x[0])
        of_samples = {
            "argument": x,
            "view": x.t(),
            "sum": table[:3] + x[0],
            "written": written,
            "view of what is written": view,
            "list": torch.tensor(x[0].tolist()),
            "filled": torch.full((1, 3), int(x[0, 0])),
        }
    assert all(map(provenance.is_shared, shared.values()))
    assert not any(map(provenance.is_shared, of_samples.values()))
