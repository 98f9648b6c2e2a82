"""Ways around the trial of the first call: what it cannot open, what it saw once, raggedness."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkernels.engine import Unsupported
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    private,
    sample_gradients,
    square,
)


class Layered(nn.Module):
    """A linear layer before a function of the batch, and one behind it."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function

    def forward(self, x, *more):
        return self.second(self.function(torch.tanh(self.first(x)), *more))


def centred(h, *_):
    return h - h.detach().mean(0)


@dataclass
class Batch:
    x: Tensor


@pytest.mark.parametrize("wrapped", [lambda x: UserDict(x=x), Batch])
def test_samples_that_hide_in_an_object_are_refused(wrapped):
    class Opens(Layered):
        def forward(self, batch):
            return super().forward(batch["x"] if isinstance(batch, UserDict) else batch.x)

    private(model := Opens(lambda h: functional.batch_norm(h, None, None, training=True)), 1.0)
    with pytest.raises(Unsupported, match="inside of which samples cannot be told apart"):
        model(wrapped(torch.randn(6, 4)))


def test_outputs_that_hide_in_an_object_are_refused():
    class Box:
        def __init__(self, value):
            self.value = value

    class Boxes(Layered):
        def forward(self, x):
            return x.sum(1), Box(super().forward(x))

    private(model := Boxes(centred), 1.0)
    with pytest.raises(Unsupported, match="returns a Box"):
        model(torch.randn(6, 4))


def test_outputs_in_nested_dataclasses_are_looked_at():
    @dataclass
    class Inner:
        y: Tensor

    @dataclass
    class Outer:
        inner: Inner

    class Nested(Layered):
        def forward(self, x):
            return Outer(Inner(super().forward(x)))

    private(model := Nested(centred), 1.0)
    with pytest.raises(Unsupported, match="mixes samples"):
        model(torch.randn(6, 4))


def test_a_trained_table_that_a_call_rescales_is_refused():
    class Rescales(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(9, 4) * 3), nn.Linear(4, 3)

        def forward(self, tokens):
            return self.head(functional.embedding(tokens, self.table, max_norm=1.0))

    training, _ = private(model := Rescales(), 1.0)
    with pytest.raises(Unsupported, match=r"writes to this tensor|cannot be repeated"):
        square(model(torch.randint(9, (5, 2)))).sum().backward()
    assert training.samples == 0


def test_copies_are_guarded_where_parameters_are_in_containers():
    class Contained(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(4))})

        def forward(self, x):
            return x * self.scales["one"]

    private(model := nn.Sequential(Contained()), 1.0)
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        copied(torch.randn(3, 4)).sum().backward()


def test_a_copy_that_cannot_be_made_private_stays_guarded():
    private(model := nn.Sequential(nn.Linear(4, 3)), 1.0)
    copied = copy.deepcopy(model)
    copied.append(nn.BatchNorm1d(3))
    with pytest.raises(Unsupported):
        private(copied, 1.0)
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        copied(torch.randn(3, 4)).sum().backward()


def test_noise_of_numpy_hides_nothing():
    def noisy(h, *_):
        noise = torch.as_tensor(numpy.random.randn(*h.shape), dtype=h.dtype)
        return centred(h) + 1e-3 * noise + 0 * torch.rand(1)

    private(model := Layered(noisy), 1.0)
    with pytest.raises(Unsupported, match="mixes samples"):
        model(torch.randn(8, 4))


def test_noise_of_numpy_is_no_reason_to_refuse():
    def noisy(h, *_):
        return h + torch.as_tensor(numpy.random.randn(*h.shape), dtype=h.dtype)

    training, _ = private(model := Layered(noisy), 1.0)
    square(model(torch.randn(8, 4))).sum().backward()
    assert training.samples == 8


def test_a_batch_of_zeros_settles_nothing():
    private(model := Layered(centred), 1.0)
    model(torch.zeros(8, 4))
    with pytest.raises(Unsupported, match="mixes samples"):
        model(torch.randn(8, 4))


def test_an_option_that_is_a_number_and_the_mode_of_a_part_are_other_forms():
    private(model := Layered(lambda h, k: centred(h) if k else h), 1.0)
    model(torch.randn(8, 4), 0)
    with pytest.raises(Unsupported, match="mixes samples"):
        model(torch.randn(8, 4), 1)

    class Part(nn.Module):
        def forward(self, h):
            return centred(h) if self.training else h

    model = Layered(part := Part().eval())
    private(model, 1.0)
    model(torch.randn(8, 4))
    part.train()
    with pytest.raises(Unsupported, match="mixes samples"):
        model(torch.randn(8, 4))


class Unpadded(nn.Module):
    """A layer that is given the steps of all samples that count, one after the other."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, lengths):
        inside = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        y = torch.zeros_like(x)
        y[inside] = torch.tanh(self.layer(x[inside]))
        return self.head(y)


@pytest.mark.parametrize("first", [[4, 4, 4, 4], [4, 3, 2, 3]])
def test_a_layer_is_not_given_windows_because_one_batch_is_full(first):
    torch.manual_seed(0)
    model = Unpadded().double()
    x = torch.randn(4, 4, 4, dtype=torch.float64)
    lengths = torch.tensor([4, 3, 2, 3])
    gradients = sample_gradients(model, (x, lengths))
    bound = median_norm(gradients)
    _, optimizer = private(model, bound)
    try:
        model(x, torch.tensor(first))
        square(model(x, lengths)).sum().backward()
    except (Unsupported, RuntimeError):
        return
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_states_of_samples_on_another_axis_are_no_reason_to_refuse(kind):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(3, 4, batch_first=True)

        def forward(self, x, state):
            return self.layer(x, state)[0]

    training, _ = private(model := Stateful(), 1.0)
    state = torch.randn(1, 6, 4)
    state = (state, torch.randn(1, 6, 4)) if kind is nn.LSTM else state
    square(model(torch.randn(6, 5, 3), state)).sum().backward()
    assert training.samples == 6


def test_a_sparse_buffer_is_watched_like_any_other():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("graph", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.graph, self.layer(x).t()).t()

    training, _ = private(model := Sparse(), 1.0)
    square(model(torch.randn(5, 4))).sum().backward()
    assert training.samples == 5


class Masked(nn.Module):
    """A module of one's own with a parameter, and a mask that samples have in common."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x, mask):
        return mask @ (x * self.scale)


class WithMask(nn.Module):
    """Makes the mask itself, so that no argument of the model looks like samples."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Masked(), nn.Linear(4, 2).double()

    def forward(self, x):
        steps = x.shape[1]
        return self.head(self.inner(x, torch.ones(steps, steps, dtype=x.dtype).tril()))


def test_a_mask_that_a_later_batch_is_as_long_as_stays_a_mask():
    torch.manual_seed(0)
    model = WithMask()
    batches = [torch.randn(n, 6, 4, dtype=torch.float64) for n in (5, 7, 6)]
    gradients = [g for x in batches for g in sample_gradients(model, (x,))]
    bound = median_norm(gradients)
    _, optimizer = private(model, bound)
    for x in batches:
        square(model(x)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))
